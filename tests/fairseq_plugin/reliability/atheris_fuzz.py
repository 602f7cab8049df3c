"""Fuzzes one reader under libFuzzer, which looks for inputs that reach new lines of the code: not part of any test.

    pip install atheris       # needs Python 3.11
    PYTHONPATH=tests python tests/fairseq_plugin/reliability/atheris_fuzz.py "corpus manifest" -max_total_time=600

Without a target it lists them. A crash is written to the working directory as ``crash-...``, which the same command
with that file at its end runs again.
"""

import sys
import tempfile
from pathlib import Path
from unittest import mock

import atheris

with atheris.instrument_imports(include=["lazyformer_fairseq"]):
    import lazyformer_fairseq  # noqa: F401  registers everything with fairseq

from fairseq_cli.train import cli_main
from fairseq_plugin.reliability.fuzz_targets import Target, make_targets
from helpers import ROOT, build_toy_corpus

from lazyformer_fairseq.fairseq_plugin.models.export import export


def make(folder: Path) -> dict[str, Target]:
    """A toy corpus, a model of one update, and the targets that read them."""
    build_toy_corpus(folder / "corpus", vocab_size=160)
    command = (
        f"fairseq-train {folder / 'corpus'} --user-dir {ROOT / 'lazyformer_fairseq'} --task full_sentences_masked_lm "
        "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --optimizer fused_adam "
        "--lr-scheduler linear_warmup --batch-size 4 --max-update 1 --disable-validation --cpu --num-workers 0 "
        f"--save-dir {folder / 'run'}"
    )
    with mock.patch("sys.argv", command.split()), mock.patch("fairseq_cli.train.logger.info"):
        cli_main()
    export(folder / "run", folder / "model")
    (folder / "files").mkdir()
    return make_targets(folder / "files", folder / "corpus", folder / "model")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        targets = make(folder)
        if len(sys.argv) < 2 or sys.argv[1] not in targets:
            sys.exit(f"give one of: {', '.join(targets)}")
        target = targets[sys.argv.pop(1)]
        seeds = folder / "seeds"
        seeds.mkdir()
        for number, seed in enumerate(target.seeds):
            (seeds / str(number)).write_bytes(seed)
        replayed = any(Path(argument).is_file() for argument in sys.argv[1:])
        atheris.Setup(sys.argv if replayed else [*sys.argv, str(seeds)], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
