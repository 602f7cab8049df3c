"""What decides the result of a search from a checkpoint; kept in its folder, so that a rerun goes on with it alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.load_tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models import hub
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.fairseq_plugin.models.safetensors_files import CONFIG_FILE
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_loading import load_safely
from lazyformer_fairseq.warm_start.start import Trained


@dataclass(frozen=True)
class FromCheckpoint:
    """One option of `lazyformer search --from` each.

    Attributes:
        weights: hash of the checkpoint: another one of the same name is another search.
        text: raw text, or a folder of binarised data.
        tokens: of text that losses are measured on.
        budgets: shares of the trained model's latency.
        candidates: as written in a pattern.
        reach: how many sublayers below that hand something on a consumer may choose from.
        top: patterns of each budget that are measured in a round.
        control: random patterns of each budget; None for as many as the search measures.
        heads: always "plain"; a search with matched heads, which went, cannot go on.
        prices: milliseconds by kind, if the user gives them.
        latency_tokens: of a sequence.
    """

    checkpoint: str
    weights: str
    text: str
    tokens: int
    budgets: tuple[float, ...]
    candidates: tuple[str, ...]
    reach: int = 4
    top: int = 4
    rounds: int = 2
    control: Optional[int] = None
    heads: str = "plain"
    prices: Optional[dict[str, float]] = None
    latency_tokens: int = 512
    seed: int = 1


def load_trained(path: Path) -> tuple[Trained, TextTokenizer]:
    """The masked-LM encoder of a checkpoint, or of a folder of checkpoints, and its tokenizer.

    Raises:
        UserError: it is damaged or unsafe, a causal model, or none of this package's.
    """
    checkpoint = checkpoint_at(path)
    try:
        state = load_safely(checkpoint)
    except UserError as error:
        if (checkpoint.parent / CONFIG_FILE).is_file():
            raise UserError(
                f"{error}\nA BERT of the Hub becomes a checkpoint of this package first: lazyformer import"
            ) from None
        raise
    _refuse_causal(state, checkpoint)
    tokenizer = load_tokenizer(checkpoint.parent / "tokenizer")
    model = hub.build(LazyFormerModel, state, tokenizer.dictionary, checkpoint)
    return Trained(model.cfg, model.state_dict(), tokenizer.dictionary), tokenizer


def _refuse_causal(state: Any, checkpoint: Path) -> None:
    try:
        options = dict(state["cfg"]["model"])
    except (KeyError, TypeError, ValueError):
        return  # what loads the model says what it is
    if "decoder_embed_dim" in options:
        raise UserError(
            f"{checkpoint}: is a causal language model; --from takes masked-LM encoders, for only their weights can "
            "start another pattern (docs/change_of_pattern.md)"
        )
