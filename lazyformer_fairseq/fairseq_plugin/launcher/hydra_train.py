"""``python -m lazyformer_fairseq.fairseq_plugin.launcher.hydra_train``: fairseq-hydra-train with this package loaded.

By itself, fairseq-hydra-train loads the package only after it has set up its processes, which fails without GPUs.
"""

import logging
import warnings

from lazyformer_fairseq.fairseq_plugin.registration import register
from lazyformer_fairseq.fairseq_plugin.replacements import Stage, install

if __name__ == "__main__":
    register()
    install(Stage.COMMAND_LINE)  # hydra reads the settings before our run starts
    for library in ("fairseq.distributed.utils", "fairseq.utils", "hydra"):  # the run's log file does not exist yet
        logging.getLogger(library).setLevel(logging.WARNING)
    warnings.filterwarnings(
        "ignore",
        r"\s*(The version_base|.*is validated against ConfigStore)",
    )  # fairseq's hydra 1.0
    from fairseq_cli.hydra_train import cli_main

    cli_main()
