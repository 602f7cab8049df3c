"""The ``lazyformer`` command line."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import CONFIGS, PACKAGE_FOLDER, ExistingPath
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
from lazyformer_fairseq.options import Group, option, with_options_from
from lazyformer_fairseq.storage.atomic import refuse_filled_folder
from lazyformer_fairseq.zero_shot.commands import evaluate


class Program(Group):
    """The top-level command group."""

    def main(self, *args: Any, **more: Any) -> Any:
        """Run the command line, and print the package's errors, including parse errors, without a traceback."""
        replacements.install(Stage.COMMAND_LINE)
        return super().main(*args, **more)


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="lazyformer_fairseq")
def main() -> None:
    """Pre-train, fine-tune and compare LazyFormer and PAR encoders, from raw text to a table of results."""
    # Otherwise, importing fairseq_cli would configure logging to write messages of all levels to stdout.
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
        "What to write: weights for lazyformer_fairseq (safetensors), a folder for transformers (huggingface), or a "
        "repository on the Hugging Face Hub (hub).",
        "--to",
        choices=("safetensors", "huggingface", "hub"),
    )
    form: Optional[str] = option(
        None,
        "With --to huggingface or hub, the class of the exported model: transformers' BERT (bert), transformers' "
        "ModernBERT (modernbert), or a custom class whose code is exported too (custom).",
        "--as",
        choices=("auto", "bert", "modernbert", "custom"),
        shown="auto: bert or modernbert if the encoder is equivalent to one of them, otherwise custom",
    )
    head: Optional[str] = option(
        None,
        "With --to huggingface or hub, the classification or span head to export.",
        shown="the only head",
    )
    private: bool = option(False, "With --to hub, make the repository private if it is new.", "--private")


@main.command()
@click.argument("checkpoints", metavar="CHECKPOINT", type=ExistingPath())
@click.argument("out", type=click.Path(path_type=Path))
@with_options_from(ExportSettings)
def export(checkpoints: Path, out: Path, settings: ExportSettings) -> None:
    """Export a pre-trained or fine-tuned encoder to safetensors, a format that can be loaded without running code.

    CHECKPOINT is a file, a folder of checkpoints, or a folder written by `lazyformer finetune`; in the last case, the
    best run is exported. OUT will contain model.safetensors, config.json and the tokenizer. You can load OUT with
    lazyformer_fairseq.load, or start training from it with fairseq-train --finetune-from-model OUT/model.safetensors.

    With --to huggingface, OUT can be loaded with transformers' AutoModel, AutoTokenizer and pipeline. An encoder that
    is neither a BERT nor a ModernBERT is exported together with the code that it needs; a causal language model
    requires lazyformer_fairseq to be installed.

    With --to hub, OUT is the name of a repository, such as USER/MODEL. The newest checkpoint is uploaded to the branch
    main, and each checkpoint that was kept by --checkpoint-words is uploaded to a branch such as chck_10M.
    """
    if settings.target != "hub":
        refuse_filled_folder(out)
    if (checkpoints / "runs").is_dir():
        from lazyformer_fairseq.finetuning.registry import best_run

        checkpoints = best_run(checkpoints)
    if settings.private and settings.target != "hub":
        raise UserError("--private requires --to hub")
    if settings.target == "safetensors":
        for name, value in (("--as", settings.form), ("--head", settings.head)):
            if value:
                raise UserError(f"{name} requires --to huggingface or --to hub")
        from lazyformer_fairseq.evaluation.export import export as write

        write(checkpoints, out)
        click.echo(f"written: {out}")
        return
    refuse_without_extra("huggingface", f"lazyformer export --to {settings.target}")
    form = settings.form or "auto"
    if settings.target == "hub":
        from lazyformer_fairseq.huggingface.publish import publish

        for branch in publish(checkpoints, str(out), form, settings.head, settings.private):
            click.echo(f"uploaded: {out}, branch {branch}")
        return
    from lazyformer_fairseq.huggingface.export import export_to_huggingface

    chosen = export_to_huggingface(checkpoints, out, form, settings.head)
    descriptions = {
        "bert": "a transformers BERT",
        "modernbert": "a transformers ModernBERT",
        "causal": "a LazyFormerForCausalLM from lazyformer_fairseq, which supports generate",
    }
    click.echo(f"written: {out}, {descriptions.get(chosen, 'a custom model with its own code')}")
    if not (out / "tokenizer.json").is_file():
        click.echo(
            "The folder has no tokenizer. To add one, copy the dict.txt of the model's data next to its checkpoint and "
            "export again; image models do not need a tokenizer."
        )


@main.command()
def where() -> None:
    """Print the folders to pass to fairseq's own commands as --user-dir and --config-dir."""
    click.echo(f"user-dir: {PACKAGE_FOLDER}")
    click.echo(f"config-dir: {CONFIGS / 'pretraining'}")


if __name__ == "__main__":
    main(prog_name="lazyformer")
