"""Times attention over whole blocks and attention within the paragraphs of the same blocks.

    python scripts/time_documents.py wikitext-2/wiki.train.tokens --tokens-per-sample 2048

Each line of the file is a paragraph and counts as a document, and each word is a token. The script runs the forward and
backward pass of an `s` sublayer of BERT base's size alternately in both ways. The time includes the grouping of
documents, but not the projections. The script prints the fractions of query-key pairs that are visible and that are
computed, the times in milliseconds, and the relative time divided by the fraction of visible pairs.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate

from lazyformer_fairseq.evaluation.costs.machine import PRECISIONS
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.sublayers.interface import Context, by_document
from lazyformer_fairseq.modules.timing import SELECTOR
from lazyformer_fairseq.storage.json_files import write_json

WARM_UP = 2  # batches


def blocks(path: Path, time: int) -> Iterator[list[int]]:
    """Yield the lengths of the documents in each full block; a document that spans two blocks counts in both."""
    block: list[int] = []
    for length in (len(line.split()) + 1 for line in path.read_text().splitlines() if line.strip()):
        while length:
            block.append(min(length, time - sum(block)))
            length -= block[-1]
            if sum(block) == time:
                yield block
                block = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens-per-sample", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--s", default="s", help="the sublayer, such as s[window=128]")
    parser.add_argument("--bias", action="store_true", help="use T5's learned position bias")
    parser.add_argument("--back-end", default="auto")
    parser.add_argument(
        "--varlen",
        action="store_true",
        help="within documents, time torch's varlen_attn instead of this package's attention; needs a GPU and fp16 or "
        "bf16",
    )
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="fp32")
    parser.add_argument("--json", type=Path, help="file to write the row of the table to")
    given = parser.parse_args()

    batch, width = given.batch_size, given.tokens_per_sample
    needed = batch * (WARM_UP + given.batches)
    found = list(islice(blocks(given.text, width), needed))
    if len(found) < needed:
        sys.exit(
            f"{given.text} fills {len(found)} blocks of {width} tokens, but {needed} are required; use a longer text, "
            "fewer --batches, or a smaller --batch-size or --tokens-per-sample"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    buckets, size = 32 * given.bias, {"embed_dim": 768, "ffn_embed_dim": 8, "num_heads": 12}
    encoder = Encoder(given.s, None, **size, relative_position_buckets=buckets, attention_backend=given.back_end)
    like = {"device": device, "dtype": PRECISIONS[given.precision]}
    encoder.to(**like).train()
    SELECTOR.time_at_once()
    s = encoder.sublayers[0].inner
    projected = torch.randn(batch, width, 3 * 768, **like, requires_grad=True)
    gradient = torch.randn(batch, width, 768, **like)

    def seconds(shape: tuple[int, int], lengths: np.ndarray | None) -> float:
        qkv = projected.reshape(*shape, -1)
        x = qkv[..., :768]
        shared: Context = encoder.context(x, lengths=lengths)  # selects back ends, which is not timed
        start = time.perf_counter()
        shared = encoder.context(x, lengths=lengths)
        y, _ = by_document(s._attend, [x if s.choices else None, qkv], {}, shared)
        torch.autograd.grad(y, projected, gradient.view_as(y))
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def seconds_of_varlen(lengths: np.ndarray) -> float:
        from torch.nn.attention import varlen  # from torch 2.10 on

        starts = torch.tensor([0, *lengths.cumsum()], dtype=torch.int32, device=device)
        longest = int(lengths.max())
        start = time.perf_counter()
        q, k, v = projected.reshape(batch * width, 3, 12, 64).unbind(1)
        y = varlen.varlen_attn(q, k, v, starts, starts, longest, longest)
        torch.autograd.grad(y, projected, gradient.view_as(y))
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    spent, visible, computed = np.zeros(2), 0, 0
    for number in range(-WARM_UP, given.batches):
        lengths = np.array([length for _ in range(batch) for length in found.pop(0)])
        whole_blocks = seconds((batch, width), None)
        if given.varlen:
            documents = seconds_of_varlen(lengths)
        else:
            documents = seconds((1, batch * width), lengths)
        if number >= 0:
            spent += [whole_blocks, documents]
            visible += (lengths**2).sum()
            if given.varlen:
                computed += (lengths**2).sum()
            else:
                groups = encoder.context(gradient.reshape(1, -1, 768), lengths=lengths).documents.groups
                computed += sum(group.pairs for group in groups)
    whole, within = spent / given.batches * 1000
    pairs = given.batches * batch * width**2
    row = {
        "visible": visible / pairs,
        "computed": computed / pairs,
        "ms, all pairs": whole,
        "ms, within documents": within,
        "share of time": within / whole,
        "over that of pairs": within / whole / (visible / pairs),
    }
    formats = (".1%", ".1%", ".0f", ".1f", ".1%", ".2f")
    cells = [format(value, how) for value, how in zip(row.values(), formats, strict=True)]
    print(tabulate([cells], list(row), tablefmt="github"))
    if given.json:
        write_json(given.json, row)


if __name__ == "__main__":
    main()
