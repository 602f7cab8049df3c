"""Compares the time of a `--optimizer muon` step with what its FLOPs would take at this machine's peak matmul rate.

    python scripts/bench_muon.py --arch bert_base --precision bf16

A step updates all weights with random gradients, including the weights that Adam updates. Steps and matmuls run
alternately, and nothing else should run on the machine. The target is a ratio of at most 1.5.
"""

import argparse
import sys

import torch
from tabulate import tabulate

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import count_parameters
from lazyformer_fairseq.evaluation.costs.latency import measure, peak_matmul_flops, square_matmuls
from lazyformer_fairseq.evaluation.costs.machine import PRECISIONS, device_named
from lazyformer_fairseq.evaluation.planning.job import job_of_arch
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.timing import SELECTOR
from lazyformer_fairseq.training.muon import MuonAndAdam, MuonOptions, blocks_of, count_flops, mark_matrices

BAR = 1.5


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--arch", default="bert_base", help="an encoder (default: %(default)s)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="precision of Muon's matmuls")
    parser.add_argument("--rounds", type=int, default=10, help="samples per measurement; the median is reported")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    given = parser.parse_args()
    device, job = device_named(given.device), job_of_arch(given.arch)
    if job.is_causal:
        raise UserError(f"--arch {given.arch}: use an encoder")
    SELECTOR.time_at_once()
    sizes = job.sizes
    widths = (sizes.vocab_size, sizes.embed_dim, sizes.ffn_embed_dim, sizes.num_heads)
    network = Encoder(job.pattern, *widths, max_positions=sizes.max_positions).to(device)
    mark_matrices(network)
    config = MuonOptions(muon_precision=given.precision)
    config.lr = [1e-4]
    weights = list(network.parameters())
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = MuonAndAdam(config, weights).optimizer
    matrices = [weight for weight in weights if blocks_of(weight)]
    flops = sum(n * count_flops(each.size(0) // n, each.size(1)) for each in matrices for n in [blocks_of(each)])
    callables = {"step": optimizer.step, **square_matmuls(device, PRECISIONS[given.precision])}
    timings = measure(callables, rounds=given.rounds, device=device)
    step, peak = timings["step"].median, peak_matmul_flops(timings)
    row = {
        "arch": given.arch,
        "parameters, million": f"{count_parameters(job.pattern, sizes) / 1e6:.1f}",
        "Muon's": f"{sum(map(torch.numel, matrices)) / 1e6:.1f}",
        "TFLOP": f"{flops / 1e12:.3f}",
        f"matmul peak, {given.precision}, TFLOP/s": f"{peak / 1e12:.3f}",
        "at the peak, ms": f"{1e3 * flops / peak:.1f}",
        "step, ms": f"{1e3 * step:.1f}",
        f"ratio (target {BAR})": f"{step * peak / flops:.2f}",
    }
    print(tabulate([row], "keys", tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
