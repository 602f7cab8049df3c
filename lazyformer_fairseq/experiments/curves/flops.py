"""FLOPs of training on a token, by the formulas of ``costs``, from the settings in a run's log."""

from collections.abc import Mapping

from lazyformer_fairseq.measure.costs.flops import count_flops
from lazyformer_fairseq.patterns.sizes import CausalSizes, EncoderSizes

FORWARD_AND_BACKWARD = 3  # a backward pass is two forward passes

Settings = Mapping[str, str]


def flops_of_token(model: Settings, task: Settings, symbols: int) -> float:
    """Of forward and backward pass, a sequence's FLOPs shared by its tokens.

    Args:
        model, task: the sections of the config, values as text.
        symbols: of the dictionary.

    Raises:
        KeyError, ValueError: the settings are those of another package's model or task.
    """
    if "encoder_embed_dim" in model:
        length = int(task["tokens_per_sample"])
        predicted, memory = round(float(task["mask_prob"]) * length), 0
        widths = (int(model[f"encoder_{name}"]) for name in ("embed_dim", "ffn_embed_dim", "attention_heads"))
        positions, buckets = int(model["max_positions"]), int(model["relative_position_buckets"])
        sizes = EncoderSizes(symbols, *widths, positions, buckets)
    else:
        length, memory, predicted = int(task["tgt_len"]), int(model["mem_len"]), None
        widths = (int(model[f"decoder_{name}"]) for name in ("embed_dim", "ffn_embed_dim", "attention_heads"))
        cutoffs = tuple(int(cutoff) for cutoff in model["adaptive_softmax_cutoff"].split(",") if cutoff)
        sizes = CausalSizes(symbols, *widths, cutoffs, int(model["adaptive_softmax_factor"]))
    forward = count_flops(model["sublayer_pattern"], sizes, length, memory, predicted=predicted)
    return FORWARD_AND_BACKWARD * forward / length
