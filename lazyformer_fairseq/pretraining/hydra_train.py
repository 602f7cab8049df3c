"""``python -m lazyformer_fairseq.pretraining.hydra_train``: fairseq-hydra-train that knows this package.

By itself it loads the package after it has shared the work among processes, and has failed by then without GPUs.
"""

from fairseq_cli.hydra_train import cli_main

from lazyformer_fairseq import register

if __name__ == "__main__":
    register()
    cli_main()
