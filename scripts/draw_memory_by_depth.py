"""Plots the peak memory of an update against depth: plain, with --checkpoint-activations, and with --reversible.

    python scripts/draw_memory_by_depth.py memory_by_depth.png

The encoders have width 32 and read 2 x 256 tokens on a CPU; torch reports the memory. Layers share their weights, so
that the memory of weights and gradients does not depend on depth.
"""

import argparse
from pathlib import Path

import torch

from lazyformer_fairseq.evaluation.costs.latency import peak_memory
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.recomputed import segments_of
from lazyformer_fairseq.patterns.kinds import ENCODER
from lazyformer_fairseq.report.figures import handles, picture, styles

DEPTHS = (2, 4, 8, 12, 24)
WAYS = {
    "plain": {},
    "--checkpoint-activations": {"checkpoints": True},
    "--reversible": {"reversible": True},
}


def peak(pattern: str, checkpoints: bool = False, **options) -> int:
    """Return the peak memory of a pre-norm encoder's forward and backward pass, in bytes."""
    torch.manual_seed(1)
    sizes = {"relative_position_buckets": 0, "attention_backend": "fused", "normalize_before": True}
    network = Encoder(pattern, None, 32, 128, 4, **sizes, **options)
    network.checkpoints = checkpoints
    layer = len(segments_of(network.plan, ENCODER)[0])
    for place in range(layer, len(network.sublayers)):
        network.sublayers[place] = network.sublayers[place % layer]
    x = torch.randn(2, 256, 32, requires_grad=True)

    def update() -> None:
        network.train()(x)[0].sum().backward()

    update()
    network.zero_grad(set_to_none=True)
    return peak_memory(update, "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="path of the plot")
    out, look = parser.parse_args().out, styles(WAYS)
    with picture(out, columns=2, legend=handles(look), sharey=True) as ((first, second),):
        for axis, layer, title in ((first, "sf", "layers: (sf)xN"), (second, "sflf", "lazy blocks: M2 x N/2")):
            for way, options in WAYS.items():
                found = [peak(f"({layer})x{2 * depth // len(layer)}", **options) / 2**20 for depth in DEPTHS]
                print(f"{title}, {way}, MiB at {DEPTHS} layers: {', '.join(f'{each:.2f}' for each in found)}")
                axis.plot(DEPTHS, found, **look[way])
            axis.set(title=title, xlabel="layers", ylim=(0, None))
        first.set_ylabel("peak of an update, MiB")


if __name__ == "__main__":
    main()
