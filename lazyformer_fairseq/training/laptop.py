"""The recipe ``laptop``: options that let a small model learn more than token frequencies within minutes on one core.

Some options' help texts cite their sources. Pre-norm follows Xiong et al. (2020, arXiv 2002.04745), and training
without dropout follows Geiping and Goldstein (2022, arXiv 2212.14034).
"""

from collections.abc import Collection, Mapping
from typing import Any

from lazyformer_fairseq.errors import UserError, nearest

# The keys are fairseq-train's option names. `lazyformer pretrain`, `compare`, `demo` and `search` read this table.
LAPTOP: Mapping[str, Any] = {
    "encoder_normalize_before": True,
    "no_token_positional_embeddings": True,
    "relative_position_buckets": 32,
    "local_heads": True,
    "zero_last_maps": True,
    "frequency_bias": True,
    "neighbour_embeddings": True,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "weight_decay": 0.0,
    "mask_prob": "0.3",
    "length_schedule": "128:0.8",
    "optimizer": "muon",
    "lr": 5e-3,
    "muon_scale": "original",
    "adam_lr": 3e-3,
    "adam_betas": "(0.9,0.98)",
    "clip_norm": 0.0,
    "lr_scheduler": "wsd",
    "warmup_ratio": 0.01,
    "decay_share": 0.5,
    "decay": "linear",
}
LAPTOP_ARCH = "bert_laptop"
LAPTOP_TOKENS = 512
LAPTOP_HELP = (
    "laptop: Muon, shorter blocks first, weights initialized from token and neighbor counts (intended for one core)"
)


def laptop(without: Collection[str] = (), given: Collection[str] = ()) -> dict[str, Any]:
    """Return the recipe's options by name, without the excluded and overridden ones.

    Args:
        without: names of options to exclude. Without `optimizer`, the model is trained with Adam and the recipe's
            learning rate for Adam; without `lr_scheduler`, the learning rate decays linearly right after the warm-up.
        given: names of options set by the user, which are excluded too.

    Raises:
        UserError: a name in `without` is not one of the recipe's options.
    """
    left_out = {name.replace("-", "_") for name in without}
    if unknown := sorted(left_out - LAPTOP.keys()):
        names = [name.replace("_", "-") for name in LAPTOP]
        raise UserError(
            f"--without {unknown[0]}: not one of the recipe's options, which are {', '.join(names)}"
            f"{nearest(unknown[0], names)}"
        )
    others = {*left_out, *given}
    usual: dict[str, Any] = {}
    if "optimizer" in others:
        others |= {"muon_scale", "adam_lr", "lr"}
        usual |= {"optimizer": "fused_adam", "lr": LAPTOP["adam_lr"]}
    if "lr_scheduler" in others:
        others |= {"decay_share", "decay"}
        usual["lr_scheduler"] = "linear_warmup"
    options = {name: value for name, value in LAPTOP.items() if name not in others}
    options |= usual
    return {name: value for name, value in options.items() if name not in given}
