"""``python -m lazyformer_fairseq.fairseq_plugin.launcher.hydra_train``: fairseq-hydra-train that knows this package.

By itself it loads the package after it has shared the work among processes, and has failed by then without GPUs.
"""

import logging
import warnings

from lazyformer_fairseq.fairseq_plugin.registration import register

if __name__ == "__main__":
    register()
    for library in ("fairseq.distributed.utils", "fairseq.utils", "hydra"):  # they have no log yet to leave this to
        logging.getLogger(library).setLevel(logging.WARNING)
    warnings.filterwarnings(
        "ignore",
        r"\s*(The version_base|.*is validated against ConfigStore)",
    )  # fairseq's hydra 1.0
    from fairseq_cli.hydra_train import cli_main

    cli_main()
