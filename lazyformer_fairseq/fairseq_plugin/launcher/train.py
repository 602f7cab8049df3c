"""Run fairseq-train without what fairseq logs while it is loaded (``python -m`` and this module's name)."""

import logging

from lazyformer_fairseq.fairseq_plugin.registration import register

if __name__ == "__main__":
    register()
    for library in ("fairseq.distributed.utils", "fairseq.utils"):  # they have no log yet to leave this to
        logging.getLogger(library).setLevel(logging.WARNING)
    from fairseq_cli.train import cli_main

    cli_main()
