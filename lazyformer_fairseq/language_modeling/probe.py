"""What the layers of an image model know: ``lazyformer lm probe`` (Chen et al., 2020, section 3.4).

A logistic regression tells an image's class from the mean, over its pixels, of what a layer's attention reads: the
normalised input of each attending sublayer, and the features at the end. The same on raw pixels stands beside it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lazyformer_fairseq.data.datasets.token_streams import TokenItems, open_tokens
from lazyformer_fairseq.data.text.dictionary_file import Dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.language_modeling.images import LABELS, palette_of
from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.report.figures import COLOURS, picture
from lazyformer_fairseq.report.tables import Table

STRENGTHS = (0.001, 0.01, 0.1, 1.0)  # C of scikit-learn, of which the validation split chooses one
SPLITS = ("train", "valid", "test")
PIXELS = "raw pixels"
Features = dict[str, np.ndarray]  # by name, (images, numbers)


class Labelled(NamedTuple):
    """Images of a split, ids (N, pixels), and their classes (N,)."""

    ids: np.ndarray
    classes: np.ndarray


def read_labelled(data: Path, split: str, item: int, most: int) -> Labelled:
    """The first images of a split. Raises a UserError where they have no labels."""
    path = data / f"{split}.{LABELS}"
    if not path.is_file():
        raise UserError(f"{path}: no such file: prepare images with labels, in a folder a class or with a {LABELS}")
    ids = np.asarray(open_tokens(data / split)).reshape(-1, item)
    classes = np.load(path, allow_pickle=False)
    if classes.shape != (len(ids),):
        raise UserError(f"{path}: has the shape {classes.shape}, but there are {len(ids):,} images; prepare them again")
    return Labelled(ids[:most], classes[:most])


@torch.inference_mode()
def mean_features(model: CausalLM, ids: np.ndarray, eos: int, batch_size: int, bar: Progress) -> Features:
    """Of each attending sublayer, "layer 1" on, and of the "end"."""
    device, found = next(model.parameters()).device, {}
    decoder = model.decoder
    batches = TokenItems(ids.reshape(-1), batch_size, ids.shape[1], eos, model.padding_idx, keeps_rest=True)
    for batch in batches:
        features, extra = model(
            batch["net_input"]["src_tokens"].to(device), features_only=True, return_all_hiddens=True
        )
        pairs = zip(extra["inner_states"], decoder.sublayers, strict=False)
        read = [(x, sublayer) for x, sublayer in pairs if sublayer.attends]
        inputs = [sublayer.layer_norm(x) if decoder.normalize_before else x for x, sublayer in read]
        for name, x_BTC in zip(
            [*(f"layer {n}" for n in range(1, len(inputs) + 1)), "end"], [*inputs, features], strict=True
        ):
            found.setdefault(name, []).append(x_BTC.float().mean(1).cpu().numpy())
        bar.update(len(features))
    return {name: np.concatenate(parts)[: len(ids)] for name, parts in found.items()}


def raw_pixels(ids: np.ndarray, dictionary: Dictionary) -> np.ndarray:
    """(images, 3 pixels): the colours themselves."""
    return palette_of(dictionary)[ids.astype(np.int64) - dictionary.nspecial].reshape(len(ids), -1).astype(np.float32)


def probe(features: Mapping[str, np.ndarray], classes: Mapping[str, np.ndarray], seed: int = 1) -> dict[str, float]:
    """Accuracy in percent of `valid` and `test`, from features and classes of all splits; `C` is what was chosen."""
    best: dict[str, float] = {}
    for strength in STRENGTHS:
        regression = LogisticRegression(C=strength, max_iter=1000, random_state=seed)
        fitted = make_pipeline(StandardScaler(), regression).fit(features["train"], classes["train"])
        found = {split: 100 * fitted.score(features[split], classes[split]) for split in ("valid", "test")}
        if not best or found["valid"] > best["valid"]:
            best = {**found, "C": strength}
    return best


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        {"features": name, "valid": f"{of['valid']:.1f}%", "test": f"{of['test']:.1f}%", "C": f"{of['C']:g}"}
        for name, of in results.items()
    ]
    return Table("", rows).printed()


def draw(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Accuracy by layer, and that of raw pixels as a line."""
    layers = [name for name in results if name != PIXELS]
    with picture(path) as axes:
        axis = axes[0, 0]
        for split, colour in zip(("valid", "test"), COLOURS, strict=False):
            axis.plot(
                range(1, len(layers) + 1), [results[name][split] for name in layers], "o-", color=colour, label=split
            )
            axis.axhline(results[PIXELS][split], color=colour, linestyle=":", label=f"{split}, {PIXELS}")
        axis.set_xlabel("layer whose input is read; the last point: the end")
        axis.set_ylabel("accuracy of a linear probe, %")
        axis.legend(frameon=False)
