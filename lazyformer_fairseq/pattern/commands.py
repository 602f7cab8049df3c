"""``lazyformer pattern``."""

from dataclasses import replace
from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.arguments import GroupOfCommands
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER
from lazyformer_fairseq.patterns.sizes import CausalSizes, EncoderSizes, Sizes

POSITIVE = click.IntRange(min=1)
DEFAULT_ARCH = {ENCODER: "bert_base", CAUSAL: "transformer_xl_base"}
# Pieces of our tokenizers; words of WikiText-103 where the arch's softmax has bands for them, else bytes.
PIECES, WORDS, CHARACTERS = 32_768, 267_735, 204
MOST_DRAWN = 256


@click.group(cls=GroupOfCommands)
def pattern() -> None:
    """Look into a pattern before you train it."""


@pattern.command()
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option("--direction", type=click.Choice([ENCODER, CAUSAL]), help="[default: of --arch, else encoder]")
@click.option("--arch", help="Its sizes, and its pattern if none is given.  [default: bert_base, causal "
              "transformer_xl_base]")  # fmt: skip
@click.option("--embed-dim", type=POSITIVE, help="[default: the arch's]")
@click.option("--ffn-embed-dim", type=POSITIVE, help="[default: the arch's]")
@click.option("--heads", type=POSITIVE, help="[default: the arch's]")
@click.option("--vocab-size", type=POSITIVE, help="[default: 32768; of causal archs, that of their text]")
@click.option("--relative-position-buckets", "buckets", type=click.IntRange(min=0), help="Of T5's bias in encoders; 0 "
              "for none.  [default: the arch's; without --arch 0 where a kind refuses the bias]")  # fmt: skip
@click.option("--length", type=POSITIVE, default=512, help="Tokens whose FLOPs are counted.")
@click.option("--tokens", type=POSITIVE, default=32, help="Tokens to draw.")
@click.option(
    "--memory", type=click.IntRange(min=0), default=0, help="Tokens before these that a causal model remembers."
)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Draw to this PNG, not as text.")
def show(
    patterns: tuple[str, ...],
    direction: Optional[str],
    arch: Optional[str],
    embed_dim: Optional[int],
    ffn_embed_dim: Optional[int],
    heads: Optional[int],
    vocab_size: Optional[int],
    buckets: Optional[int],
    length: int,
    tokens: int,
    memory: int,
    output: Optional[Path],
) -> None:
    """Print each PATTERN's plan and costs, and draw what it looks at.

    Costs are parameters and FLOPs of each sublayer. The picture comes from the sublayers themselves: how much the
    output at a token depends on each input.

    \b
    lazyformer pattern show 's[strided=8]f' --tokens 32
    lazyformer pattern show --arch lazyformer_m2x6_s
    lazyformer pattern show 's[window=4]' 's[window=4,dilation=2]' --output masks.png
    """
    may_leave_bias_out = arch is None and buckets is None
    direction, arch = _choose(direction, arch)
    may_leave_bias_out &= direction == ENCODER  # causal models have none
    _check(direction, buckets, tokens, memory)
    sizes = _sizes(direction, arch, embed_dim, ffn_embed_dim, heads, vocab_size, buckets, max(length, tokens))
    patterns = patterns or (_row(arch).sublayer_pattern,)
    from lazyformer_fairseq.pattern.report import LEGEND, plan_table, text_picture
    from lazyformer_fairseq.pattern.seen import build_network, look, refuses_bias

    drawn = []
    for each in patterns:
        of_each = sizes
        if may_leave_bias_out and refuses_bias(each, direction):
            of_each = replace(sizes, relative_position_buckets=0)
        bias_buckets = getattr(of_each, "relative_position_buckets", 0)
        network = build_network(each, direction, sizes.num_heads, tokens, memory, bias_buckets)
        click.echo(f"{each}\n\n{plan_table(each, of_each, length, memory)}\n")
        drawn += look(network, tokens, memory)
    if not drawn:
        click.echo("no sublayer looks at other tokens")
    elif output is None:
        click.echo("\n\n".join([*map(text_picture, drawn), LEGEND]))
    else:
        from lazyformer_fairseq.pattern.pictures import draw_seen

        draw_seen(drawn, output)
        click.echo(f"written: {output}")


@pattern.command()
@click.argument("checkpoint", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("output", type=click.Path(path_type=Path, dir_okay=False), required=False)
def spans(checkpoint: Path, output: Optional[Path]) -> None:
    """Print how far each head of CHECKPOINT looks, and draw it.

    For models with s[span=1024] or the like, whose heads learn it. OUTPUT is a PNG.
    """
    from lazyformer_fairseq.pattern.spans import draw_spans, read_spans, spans_table

    found = read_spans(checkpoint)
    click.echo(spans_table(found))
    if output is not None:
        draw_spans(found, output)
        click.echo(f"written: {output}")


def _row(arch: str):
    return ARCHITECTURES[arch] if arch in ARCHITECTURES else CAUSAL_ARCHITECTURES[arch]


def _choose(direction: Optional[str], arch: Optional[str]) -> tuple[str, str]:
    """Direction and arch; raises a UserError where they do not fit together."""
    if arch is None:
        direction = direction or ENCODER
        return direction, DEFAULT_ARCH[direction]
    if arch not in ARCHITECTURES and arch not in CAUSAL_ARCHITECTURES:
        raise UserError(f"--arch {arch}: unknown; docs/architectures.md has them all")
    of_arch = ENCODER if arch in ARCHITECTURES else CAUSAL
    if direction not in (None, of_arch):
        raise UserError(f"--direction {direction}: {arch} is {of_arch}; leave one of the two out")
    return of_arch, arch


def _check(direction: str, buckets: Optional[int], tokens: int, memory: int) -> None:
    """Raises a UserError for options that mean nothing in this direction, and for more than can be drawn."""
    if memory and direction == ENCODER:
        raise UserError(f"--memory {memory}: encoders remember nothing; give --direction causal, or 0")
    if buckets and direction == CAUSAL:
        raise UserError(f"--relative-position-buckets {buckets}: causal models have no T5 bias; leave it out")
    if tokens + memory > MOST_DRAWN:
        raise UserError(
            f"--tokens {tokens}, --memory {memory}: at most {MOST_DRAWN} tokens together can be "
            "drawn; --length counts FLOPs of longer ones"
        )


def _sizes(
    direction: str,
    arch: str,
    embed_dim: Optional[int],
    ffn_embed_dim: Optional[int],
    heads: Optional[int],
    vocab_size: Optional[int],
    buckets: Optional[int],
    longest: int,
) -> Sizes:
    """The arch's, but for what is given; an encoder has at least as many positions as the longest input."""
    row = _row(arch)
    if direction == ENCODER:
        widths = (
            embed_dim or row.encoder_embed_dim,
            ffn_embed_dim or row.encoder_ffn_embed_dim,
            heads or row.encoder_attention_heads,
        )
        buckets = row.relative_position_buckets if buckets is None else buckets
        positions = max(longest, row.max_positions or EncoderSizes.max_positions)
        sizes: Sizes = EncoderSizes(vocab_size or PIECES, *widths, positions, buckets)
    else:
        cutoffs = tuple(int(cutoff) for cutoff in row.adaptive_softmax_cutoff.split(",") if cutoff)
        vocab_size = vocab_size or (WORDS if cutoffs else CHARACTERS)
        widths = (
            embed_dim or row.decoder_embed_dim,
            ffn_embed_dim or row.decoder_ffn_embed_dim,
            heads or row.decoder_attention_heads,
        )
        cutoffs = tuple(cutoff for cutoff in cutoffs if cutoff < vocab_size)
        sizes = CausalSizes(vocab_size, *widths, cutoffs, row.adaptive_softmax_factor)
    if sizes.embed_dim % sizes.num_heads:
        raise UserError(f"{sizes.num_heads} attention heads do not divide an embedding dimension of {sizes.embed_dim}")
    return sizes
