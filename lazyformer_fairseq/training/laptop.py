"""The recipe ``laptop``: options that let a small model learn more than token frequencies within minutes on one core.

The help text of each option names its source. Pre-norm follows Xiong et al. (2020, arXiv 2002.04745), and training
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
    "laptop: Muon, short blocks first, and weights that start from counts of tokens and their neighbours, for one core"
)


def laptop(without: Collection[str] = (), given: Collection[str] = ()) -> dict[str, Any]:
    """Return the options of :data:`LAPTOP` by name, except for those that are left out or overridden.

    Args:
        without: names of options to leave out. Without `optimizer`, Adam trains the model at its own learning rate;
            without `lr_scheduler`, the learning rate decays linearly right after the warm-up.
        given: names of options that the user sets, which are left out too.

    Raises:
        UserError: a name in `without` is not an option of the recipe.
    """
    left_out = {name.replace("-", "_") for name in without}
    if unknown := sorted(left_out - LAPTOP.keys()):
        names = [name.replace("_", "-") for name in LAPTOP]
        raise UserError(f"--without {unknown[0]}: the recipe has {', '.join(names)}{nearest(unknown[0], names)}")
    others = {*left_out, *given}
    usual: dict[str, Any] = {}
    if "optimizer" in others:
        others |= {"muon_scale", "adam_lr", "lr"}
        usual |= {"optimizer": "fused_adam", "lr": LAPTOP["adam_lr"]}
    if "lr_scheduler" in others:
        others |= {"decay_share", "decay"}
        usual["lr_scheduler"] = "linear_warmup"
    found = {**{name: value for name, value in LAPTOP.items() if name not in others}, **usual}
    return {name: value for name, value in found.items() if name not in given}
