"""``python -m lazyformer_fairseq.fairseq_plugin.launcher.train``: fairseq-train without its startup log output."""

import logging

from lazyformer_fairseq.fairseq_plugin.registration import register

if __name__ == "__main__":
    register()
    for library in ("fairseq.distributed.utils", "fairseq.utils"):  # the run's log file does not exist yet
        logging.getLogger(library).setLevel(logging.WARNING)
    from fairseq_cli.train import cli_main

    cli_main()
