"""``lazyformer pattern``: what a pattern builds, what it costs, and what each of its sublayers looks at."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.usual_sizes import arch_named, usual_symbols
from lazyformer_fairseq.options import Group, option, takes
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES, Architecture
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER, Sizes, sizes_of

MOST_DRAWN = 256
OF_ARCH = "the arch's"


@dataclass(frozen=True)
class ShowSettings:
    """The sizes in which a pattern is shown, and how much of it."""

    arch: Optional[str] = option(
        None,
        "Its sizes, and its pattern if none is given; a causal one, such as transformer_xl_base, for causal models.",
        parse=arch_named,
        shown="bert_base",
    )
    embed_dim: Optional[int] = option(None, "Width.", low=1, shown=OF_ARCH)
    ffn_embed_dim: Optional[int] = option(None, "Width of feed-forward sublayers.", low=1, shown=OF_ARCH)
    heads: Optional[int] = option(None, "Attention heads.", low=1, shown=OF_ARCH)
    relative_position_buckets: Optional[int] = option(
        None,
        "Of T5's bias in encoders; 0 for none.",
        low=0,
        shown="the arch's; without --arch 0 where an attention variant refuses the bias",
    )
    length: int = option(512, "Tokens whose FLOPs are counted.", low=1)
    tokens: int = option(32, "Tokens to draw.", low=1)
    memory: int = option(0, "Tokens before these that a causal model remembers.", low=0)
    output: Optional[Path] = option(None, "Draw to this PNG, not as text.")


@click.group(cls=Group)
def pattern() -> None:
    """Look into a pattern before you train it."""


@pattern.command()
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@takes(ShowSettings)
def show(patterns: tuple[str, ...], settings: ShowSettings) -> None:
    r"""Print each PATTERN's plan and costs, and draw what it looks at.

    Costs are parameters and FLOPs of each sublayer. The picture comes from the sublayers themselves: how much the
    output at a token depends on each input.

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
    patterns = patterns or (_row(arch).sublayer_pattern,)
    from lazyformer_fairseq.experiments.pattern import look

    drawn = []
    can_draw = tokens + memory <= MOST_DRAWN
    for each in patterns:
        of_each = sizes
        if settings.arch is settings.relative_position_buckets is None and look.refuses_bias(each, direction):
            of_each = replace(sizes, relative_position_buckets=0)
        bias_buckets = getattr(of_each, "relative_position_buckets", 0)
        click.echo(f"{each}\n\n{look.plan_table(each, of_each, settings.length, memory)}\n")
        if can_draw:
            network = look.build_network(each, direction, sizes.num_heads, tokens, memory, bias_buckets)
            drawn += look.look(network, tokens, memory)
    if not can_draw:
        click.echo(f"no picture: it has room for {MOST_DRAWN} tokens, --tokens and --memory together")
    elif not drawn:
        click.echo("no sublayer looks at other tokens")
    elif settings.output is None:
        click.echo("\n\n".join([*map(look.text_picture, drawn), look.LEGEND]))
    else:
        look.draw_seen(drawn, settings.output)
        click.echo(f"written: {settings.output}")


@pattern.command()
@click.argument("checkpoint", type=click.Path(path_type=Path, dir_okay=False))
def spans(checkpoint: Path) -> None:
    """Print how far each head of CHECKPOINT looks.

    For models with s[span=1024] or the like, whose heads learn it.
    """
    from lazyformer_fairseq.experiments.pattern.look import read_spans, spans_table

    click.echo(spans_table(read_spans(checkpoint)))


def _row(arch: str) -> Architecture:
    if arch in ARCHITECTURES:
        return ARCHITECTURES[arch]
    return CAUSAL_ARCHITECTURES[arch]


def _check(direction: str, settings: ShowSettings) -> None:
    """Raise a UserError for options that mean nothing in this direction, and for more than can be drawn."""
    tokens = settings.tokens
    memory = settings.memory
    buckets = settings.relative_position_buckets
    if memory and direction == ENCODER:
        raise UserError(f"--memory {memory}: encoders remember nothing; give a causal --arch, or 0")
    if buckets and direction == CAUSAL:
        raise UserError(f"--relative-position-buckets {buckets}: causal models have no T5 bias; leave it out")
    if settings.output and tokens + memory > MOST_DRAWN:
        raise UserError(
            f"--tokens {tokens}, --memory {memory}: at most {MOST_DRAWN} tokens together can be "
            "drawn; without --output the costs are printed alone"
        )


def _sizes(arch: str, settings: ShowSettings) -> Sizes:
    """Return the arch's sizes, but for what is given; an encoder has positions for the longest input."""
    options = _row(arch).options()
    part = "encoder" if arch in ARCHITECTURES else "decoder"
    names = {"embed_dim": "embed_dim", "ffn_embed_dim": "ffn_embed_dim", "attention_heads": "heads"}
    given = {f"{part}_{theirs}": getattr(settings, ours) for theirs, ours in names.items()}
    given["relative_position_buckets"] = settings.relative_position_buckets
    given["max_positions"] = max(settings.length, settings.tokens, options.get("max_positions", 512))
    given = {name: value for name, value in given.items() if value is not None}
    sizes = sizes_of(options | given, usual_symbols(options))
    if sizes.embed_dim % sizes.num_heads:
        raise UserError(f"{sizes.num_heads} attention heads do not divide an embedding dimension of {sizes.embed_dim}")
    return sizes
