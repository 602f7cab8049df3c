"""The command ``lazyformer bench loader``."""

import click

from lazyformer_fairseq.existing_paths import refuse_missing_folders
from lazyformer_fairseq.several_values import numbers

POSITIVE = click.IntRange(min=1)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("data")
@click.argument("fairseq_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--arch", default="lazyformer_m2x6_s", help="The model to compare with.")
@click.option("--tokens-per-sample", type=POSITIVE, default=512, help="Longest block, as in pre-training.")
@click.option("--batch-size", type=POSITIVE, default=16, help="Blocks of a batch; an update is one batch.")
@click.option("--workers", multiple=True, callback=numbers(int), default=["0", "2"],
              help="Numbers of data workers to try, as 0,2; 0 is a thread.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=10.0, help="For each measurement.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda where there is a GPU]")
def loader(
    data: str,
    fairseq_options: tuple[str, ...],
    arch: str,
    tokens_per_sample: int,
    batch_size: int,
    workers: tuple[int, ...],
    seconds: float,
    device: str | None,
) -> None:
    """Measure the tokens a second that the data loader gives, alone, and those that training takes.

    DATA is what pre-training reads, as lazyformer corpus writes it. Other options of fairseq-train may follow, such as
    --bf16.

    \b
    lazyformer bench loader data --arch bert_base --batch-size 4
    """
    refuse_missing_folders(data)
    import torch
    from tabulate import tabulate

    from lazyformer_fairseq import USER_DIR
    from lazyformer_fairseq.benchmark.loader.speed import as_rows, measure_speeds
    from lazyformer_fairseq.errors import UserError

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here")
    command = [
        *(data, "--user-dir", str(USER_DIR), "--task", "full_sentences_masked_lm", "--arch", arch),
        *("--tokens-per-sample", str(tokens_per_sample), "--max-positions", str(tokens_per_sample)),
        *("--criterion", "masked_lm_accuracy", "--optimizer", "fused_adam", "--lr-scheduler", "linear_warmup"),
        *("--lr", "1e-4", "--max-update", "1000000", "--clip-norm", "1.0", "--batch-size", str(batch_size)),
        *("--num-workers", "0", "--log-format", "none", *fairseq_options),
    ]
    if device == "cpu" or not torch.cuda.is_available():
        command.append("--cpu")
    click.echo(tabulate(as_rows(measure_speeds(command, list(workers), seconds)), headers="keys", intfmt=","))
