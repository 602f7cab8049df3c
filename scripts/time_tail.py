"""Times models, computing the feed-forward sublayers at the top for all tokens or only for those that a head reads.

    OMP_NUM_THREADS=1 python scripts/time_tail.py --patterns '(sf)x7' '(sff)x3 (f)x5'

For each pattern, the script times an update of a masked LM (forward pass, loss, backward pass, fused Adam) and the
classification of texts. Both variants run alternately. The table shows the median and quartiles of the CPU time in
milliseconds, and the ratio of the medians.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq import build
from lazyformer_fairseq.modules.timing import SELECTOR

WARM_UP = 2  # rounds
HEAD = "classes"
SIZES = {
    "encoder_embed_dim": 192,
    "encoder_ffn_embed_dim": 768,
    "encoder_attention_heads": 6,
    "relative_position_buckets": 32,
}


def masked_logits(model: nn.Module, tokens_BT: Tensor, places_M: Tensor, is_whole: bool) -> Tensor:
    """Return the logits of masked tokens; with `is_whole`, the features of all tokens are computed first."""
    if not is_whole:
        return model(tokens_BT, masked_tokens=places_M, has_padding=False)[0]
    features, _ = model(tokens_BT, features_only=True, has_padding=False)
    return model.encoder.lm_head(features, places_M)


def classes(model: nn.Module, tokens_BT: Tensor, is_whole: bool) -> Tensor:
    """Return the logits of classes; with `is_whole`, the features of all tokens are computed first."""
    if not is_whole:
        return model(tokens_BT, classification_head_name=HEAD, has_padding=False)[0]
    features, _ = model(tokens_BT, features_only=True, has_padding=False)
    return model.classification_heads[HEAD](features)


def measured(call: Callable[[bool], object], rounds: int) -> np.ndarray:
    """Return the CPU time in milliseconds for all tokens and for only the tokens read, of shape (rounds, 2)."""
    samples = []
    for _ in range(WARM_UP + rounds):
        row = []
        for is_whole in (True, False):
            start = time.process_time()
            call(is_whole)
            row.append(1000 * (time.process_time() - start))
        samples.append(row)
    return np.array(samples[WARM_UP:])


def rows_of(pattern: str, given: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yield the rows of a pattern: an update, and the classification of texts."""
    torch.manual_seed(1)
    model = build(given.arch, given.words, sublayer_pattern=pattern, max_positions=given.tokens, **SIZES)
    model.register_classification_head(HEAD, 2)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    tokens_BT = torch.randint(5, given.words, (given.batch_size, given.tokens))
    places_M = torch.randperm(tokens_BT.numel())[: round(given.masked * tokens_BT.numel())].sort().values
    targets_M = tokens_BT.flatten()[places_M]
    texts_BT = torch.randint(5, given.words, (given.texts, given.tokens))

    def update(is_whole: bool) -> None:
        optimizer.zero_grad()
        F.cross_entropy(masked_logits(model, tokens_BT, places_M, is_whole), targets_M).backward()
        optimizer.step()

    @torch.inference_mode()
    def classify(is_whole: bool) -> None:
        classes(model, texts_BT, is_whole)

    for what, call in (("update", update), ("classes", classify)):
        model.train(call is update)
        samples = measured(call, given.rounds)
        all_tokens, read = (
            f"{median:.0f} ({low:.0f} to {high:.0f})" for low, median, high in np.percentile(samples, [25, 50, 75], 0).T
        )
        ratio = np.divide(*np.median(samples, 0))
        yield {
            "pattern, work": f"{pattern}, {what}",
            "all tokens": all_tokens,
            "only tokens read": read,
            "speed-up": f"{ratio:.2f}",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", nargs="+", default=["(sf)x7", "(sff)x3 (f)x5"])
    parser.add_argument(
        "--arch", default="bert_tiny", help="architecture for everything except the pattern and the sizes"
    )
    parser.add_argument("--words", type=int, default=8192, help="vocabulary size")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per text")
    parser.add_argument("--batch-size", type=int, default=8, help="texts per update")
    parser.add_argument("--texts", type=int, default=32, help="texts per classified batch")
    parser.add_argument("--masked", type=float, default=0.3, help="fraction of tokens to predict")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    SELECTOR.time_at_once()
    rows = [row for pattern in given.patterns for row in rows_of(pattern, given)]
    print(tabulate(rows, "keys", tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
