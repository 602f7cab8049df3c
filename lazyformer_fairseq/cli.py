"""The command ``lazyformer``."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import ExistingPath
from lazyformer_fairseq.corpus.commands import corpus
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.bench.commands import bench
from lazyformer_fairseq.evaluation.planning.commands import plan
from lazyformer_fairseq.experiments.compare.commands import compare
from lazyformer_fairseq.experiments.curves.commands import curves
from lazyformer_fairseq.experiments.demo.commands import demo
from lazyformer_fairseq.experiments.pattern.commands import pattern
from lazyformer_fairseq.experiments.reproduce.commands import reproduce
from lazyformer_fairseq.experiments.search.commands import search
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.fairseq_plugin import registration, replacements
from lazyformer_fairseq.fairseq_plugin.launcher.commands import pretrain
from lazyformer_fairseq.fairseq_plugin.replacements import Stage
from lazyformer_fairseq.finetuning.commands import finetune, predict, report
from lazyformer_fairseq.huggingface.commands import import_model
from lazyformer_fairseq.language_modeling.commands import lm
from lazyformer_fairseq.options import Group, option, takes
from lazyformer_fairseq.storage.atomic import refuse_filled_folder
from lazyformer_fairseq.zero_shot.commands import evaluate


class Program(Group):
    """The whole command line."""

    def main(self, *args: Any, **more: Any) -> Any:
        """Print errors of this package in its own words, from the first word of the command line on."""
        replacements.install(Stage.COMMAND_LINE)
        return super().main(*args, **more)


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="lazyformer_fairseq")
def main() -> None:
    """LazyFormer and PAR encoders for fairseq: from raw text to the table of results."""
    # Else fairseq_cli would, where it is imported: everything, to stdout.
    logging.basicConfig(format="%(levelname)s: %(message)s")
    registration.after_registration(replacements.start_run)


for command in (
    *(bench, compare, corpus, curves, demo, evaluate, finetune),
    *(import_model, lm, pattern, plan, predict, pretrain, report, reproduce, search),
):
    main.add_command(command)


@dataclass(frozen=True)
class ExportSettings:
    """Options of ``lazyformer export``."""

    target: str = option(
        "safetensors",
        "Whose format: lazyformer_fairseq's own, or transformers'.",
        "--to",
        choices=("safetensors", "huggingface"),
    )
    form: Optional[str] = option(
        None,
        "For huggingface: a BERT or ModernBERT of transformers, or a model with its own code.",
        "--as",
        choices=("auto", "bert", "modernbert", "custom"),
        shown="auto, one of transformers' if it is one",
    )
    head: Optional[str] = option(
        None,
        "For huggingface: the classification or span head to take along.",
        shown="the only one",
    )


@main.command()
@click.argument("checkpoints", metavar="CHECKPOINT", type=ExistingPath())
@click.argument("out", type=click.Path(path_type=Path))
@takes(ExportSettings)
def export(checkpoints: Path, out: Path, settings: ExportSettings) -> None:
    """Write a pre-trained or fine-tuned encoder as safetensors, which run no code when they are loaded.

    CHECKPOINT is a file, a folder of checkpoints, or one that `lazyformer finetune` wrote, whose best run counts.
    OUT gets model.safetensors, config.json and the tokenizer. lazyformer_fairseq.load reads it, and
    fairseq-train --finetune-from-model OUT/model.safetensors starts from it.

    With --to huggingface, AutoModel, AutoTokenizer and pipeline of transformers read it. One that is neither BERT nor
    ModernBERT brings the code that it needs; a causal language model needs this package there.
    """
    refuse_filled_folder(out)
    if (checkpoints / "runs").is_dir():
        from lazyformer_fairseq.finetuning.registry import best_run

        checkpoints = best_run(checkpoints)
    if settings.target == "safetensors":
        for name, value in (("--as", settings.form), ("--head", settings.head)):
            if value:
                raise UserError(f"{name} is for --to huggingface")
        from lazyformer_fairseq.evaluation.export import export as write

        write(checkpoints, out)
        click.echo(f"written: {out}")
        return
    refuse_without_extra("huggingface", "lazyformer export --to huggingface")
    from lazyformer_fairseq.huggingface.export import export_to_huggingface

    form = settings.form or "auto"
    chosen = export_to_huggingface(checkpoints, out, form, settings.head)
    theirs = {
        "bert": "a BERT of transformers",
        "modernbert": "a ModernBERT of transformers",
        "causal": "a LazyFormerForCausalLM of lazyformer_fairseq, with generate",
    }
    click.echo(f"written: {out}, {theirs.get(chosen, 'with code of its own')}")
    if not (out / "tokenizer.json").is_file():
        click.echo(
            "without a tokenizer: put the dict.txt of the model's data beside its checkpoint and export again; images "
            "have none"
        )


if __name__ == "__main__":
    main(prog_name="lazyformer")
