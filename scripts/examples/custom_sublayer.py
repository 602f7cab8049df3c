"""Define a kind of sublayer, and compare a model that uses it with a BERT of the same size.

    python scripts/examples/custom_sublayer.py DATA OUT [options of `lazyformer compare run`]

The new kind is `g`, the global mean: each token receives the projected mean of all tokens in its text. DATA is a corpus
written by `lazyformer corpus`. A table, plots and the trained models are written to OUT. With the tests' toy corpus,
tests/fixtures/checkpoints/m2x2/data, this takes less than a minute on one core. With more text, train for longer, for
instance by adding --budget 10min.

To use `g` in every command, set these environment variables:

    export PYTHONPATH=scripts/examples LAZYFORMER_KINDS=custom_sublayer
    lazyformer pattern show '(gf)x3 sf'

docs/add_a_kind.md explains settings in brackets, causal models, and how to write a package that can be installed and
exported.
"""

import sys

from torch import Tensor

from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.sublayers.interface import Context, Output, SharedState, Sublayer, SublayerOptions
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import ENCODER, Kind, register


class GlobalMean(Sublayer):
    """The projected mean of all tokens in a text, with C^2 + C parameters."""

    attends = True  # reads other tokens
    has_scores = False  # but does not compute attention scores, to which T5's bias could be added

    def __init__(self, embed_dim: int):
        super().__init__()
        self.out_proj = Linear(embed_dim, embed_dim)

    @classmethod
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "GlobalMean":
        return cls(options.embed_dim)

    def forward(self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: None = None) -> Output:
        is_text_BT1 = x_BTC.new_ones(*x_BTC.shape[:2], 1)
        is_padding_BT = shared.scores.is_padding(x_BTC.size(1))
        if is_padding_BT is not None:
            is_text_BT1 = is_text_BT1.masked_fill(is_padding_BT[..., None], 0)
        mean_B1C = (x_BTC * is_text_BT1).sum(1, keepdim=True) / is_text_BT1.sum(1, keepdim=True).clamp(min=1)
        return self.out_proj(mean_B1C).expand_as(x_BTC), {}


register(Kind("g", "global mean", "the mean of all tokens, projected", "an example", {ENCODER: GlobalMean}))

if __name__ == "__main__":
    from lazyformer_fairseq.cli import main

    settings = "--task masked-lm --recipe laptop --device cpu --in-turn --seeds 1 --budget 10s --equal-parameters"
    models = ["--model", "bert=(sf)x4", "--model", "global mean=(gf)x3 sf"]
    main(["compare", "run", *settings.split(), *models, *sys.argv[1:]], prog_name="lazyformer")
