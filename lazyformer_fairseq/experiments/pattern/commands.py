"""The command group ``lazyformer pattern``, which shows sublayers, their costs, and the tokens they attend to."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.default_vocab_sizes import arch_named, default_vocab_size
from lazyformer_fairseq.options import Group, option, with_options_from
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES, Architecture
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER, Sizes, sizes_of

MOST_DRAWN = 256
OF_ARCH = "the arch's"


@dataclass(frozen=True)
class ShowSettings:
    """The model sizes that a pattern is shown for, and the extent of the picture."""

    arch: Optional[str] = option(
        None,
        "Named model that supplies the default sizes and, if no PATTERN is given, the pattern. If it is a causal "
        "model, such as transformer_xl_base, all patterns are built as causal models.",
        parse=arch_named,
        shown="bert_base",
    )
    embed_dim: Optional[int] = option(None, "Embedding dimension.", low=1, shown=OF_ARCH)
    ffn_embed_dim: Optional[int] = option(None, "Width of the feed-forward sublayers.", low=1, shown=OF_ARCH)
    heads: Optional[int] = option(None, "Number of attention heads.", low=1, shown=OF_ARCH)
    relative_position_buckets: Optional[int] = option(
        None,
        "Number of buckets of T5's relative position bias in encoders; 0 for no bias.",
        low=0,
        shown="the arch's; without --arch, 0 if an attention variant does not support the bias",
    )
    length: int = option(512, "Sequence length, in tokens, for counting FLOPs.", low=1)
    tokens: int = option(32, "Number of tokens to draw.", low=1)
    memory: int = option(0, "Number of earlier tokens in a causal model's memory.", low=0)
    output: Optional[Path] = option(None, "PNG file to save the picture to, instead of printing it as text.")


@click.group(cls=Group)
def pattern() -> None:
    """Inspect a pattern before you train a model with it."""


@pattern.command()
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@with_options_from(ShowSettings)
def show(patterns: tuple[str, ...], settings: ShowSettings) -> None:
    r"""Print the plan and costs of each PATTERN, and draw which tokens its sublayers attend to.

    The costs are each sublayer's parameters and FLOPs. The picture is computed by running the sublayers; it shows how
    much the output at each token depends on each input token.

    \b
    lazyformer pattern show 's[strided=8]f' --tokens 32
    lazyformer pattern show --arch lazyformer_m2x6_s
    lazyformer pattern show 's[window=4]' 's[window=4,dilation=2]' --output masks.png
    """
    arch = settings.arch or "bert_base"
    tokens = settings.tokens
    memory = settings.memory
    direction = ENCODER if arch in ARCHITECTURES else CAUSAL
    _check(direction, settings)
    sizes = _sizes(arch, settings)
    for each in patterns:
        if each in (*ARCHITECTURES, *CAUSAL_ARCHITECTURES):
            raise UserError(f"{each} is the name of a model, not a pattern; use --arch {each}")
    patterns = patterns or (_row(arch).sublayer_pattern,)
    from lazyformer_fairseq.experiments.pattern import look

    drawn = []
    can_draw = tokens + memory <= MOST_DRAWN
    for each in patterns:
        of_each = sizes
        if settings.arch is settings.relative_position_buckets is None and look.has_bias_conflict(each, direction):
            of_each = replace(sizes, relative_position_buckets=0)
        bias_buckets = getattr(of_each, "relative_position_buckets", 0)
        click.echo(f"{each}\n\n{look.plan_table(each, of_each, settings.length, memory)}\n")
        if can_draw:
            network = look.build_network(each, direction, sizes.num_heads, tokens, memory, bias_buckets)
            drawn += look.find_attended_tokens(network, tokens, memory)
    if not can_draw:
        click.echo(f"no picture: --tokens and --memory together exceed the limit of {MOST_DRAWN} tokens")
    elif not drawn:
        click.echo("no sublayer attends to other tokens")
    elif settings.output is None:
        click.echo("\n\n".join([*map(look.text_picture, drawn), look.LEGEND]))
    else:
        look.draw_attended_tokens(drawn, settings.output)
        click.echo(f"written: {settings.output}")


@pattern.command()
@click.argument("checkpoint", type=click.Path(path_type=Path, dir_okay=False))
def spans(checkpoint: Path) -> None:
    """Print the learned attention span of each head in CHECKPOINT.

    The model must have sublayers with learned spans, such as s[span=1024].
    """
    from lazyformer_fairseq.experiments.pattern.look import read_spans, spans_table

    click.echo(spans_table(read_spans(checkpoint)))


def _row(arch: str) -> Architecture:
    if arch in ARCHITECTURES:
        return ARCHITECTURES[arch]
    return CAUSAL_ARCHITECTURES[arch]


def _check(direction: str, settings: ShowSettings) -> None:
    """Raise a UserError for options that do not apply to this direction, and for too many tokens to draw."""
    tokens = settings.tokens
    memory = settings.memory
    buckets = settings.relative_position_buckets
    if memory and direction == ENCODER:
        raise UserError(f"--memory {memory}: encoders have no memory; use a causal --arch, or omit --memory")
    if buckets and direction == CAUSAL:
        raise UserError(f"--relative-position-buckets {buckets}: causal models have no T5 bias; omit the option")
    if settings.output and tokens + memory > MOST_DRAWN:
        raise UserError(
            f"--tokens {tokens}, --memory {memory}: a picture can show at most {MOST_DRAWN} tokens in total; "
            "lower these values, or omit --output to print only the costs"
        )


def _sizes(arch: str, settings: ShowSettings) -> Sizes:
    """Return the arch's sizes, overridden by the user's settings.

    An encoder's number of positions is raised to fit the longest input.
    """
    options = _row(arch).options()
    part = "encoder" if arch in ARCHITECTURES else "decoder"
    names = {"embed_dim": "embed_dim", "ffn_embed_dim": "ffn_embed_dim", "attention_heads": "heads"}
    given = {f"{part}_{option_name}": getattr(settings, size) for option_name, size in names.items()}
    given["relative_position_buckets"] = settings.relative_position_buckets
    given["max_positions"] = max(settings.length, settings.tokens, options.get("max_positions", 512))
    given = {name: value for name, value in given.items() if value is not None}
    sizes = sizes_of(options | given, default_vocab_size(options))
    if sizes.embed_dim % sizes.num_heads:
        raise UserError(
            f"an embedding dimension of {sizes.embed_dim} is not divisible by {sizes.num_heads} attention heads"
        )
    return sizes
