"""Linear probes of an image model's layers, for ``lazyformer lm probe`` (Chen et al., 2020, section 3.4).

A logistic regression predicts the class of an image from a layer's features, averaged over the image's pixels. The
features are the normalized input of each attention sublayer and, at the end, the model's output features. For
comparison, raw pixels are probed in the same way.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lazyformer_fairseq.data.datasets.token_streams import TokenItems, item_length, open_tokens
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.language_modeling.evaluate import load_model, refuse_other_images
from lazyformer_fairseq.language_modeling.images import LABELS, palette_of, sample_indices
from lazyformer_fairseq.language_modeling.prepare import SPLITS
from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.report.figures import COLORS, picture
from lazyformer_fairseq.report.tables import Table
from lazyformer_fairseq.storage.arrays import map_array
from lazyformer_fairseq.storage.json_files import write_json

# Candidate values of scikit-learn's C; one is selected on the validation split.
STRENGTHS = (
    0.001,
    0.01,
    0.1,
    1.0,
)
PIXELS = "raw pixels"


def probe_layers(
    checkpoint: Path,
    data: Path,
    most: int,
    batch_size: int,
    device: Optional[str] = "cpu",
) -> dict[str, dict[str, float]]:
    """Probe raw pixels and each layer's features, and return the accuracies from :func:`probe`.

    Args:
        checkpoint: the image model's checkpoint file.
        data: the folder of prepared images.
        most: maximum number of images per split; larger splits are sampled at random.
        batch_size: number of images per forward pass.
        device: the device name.

    Raises:
        UserError: the data contains no images; the images have no labels, have only one class or differ in size from
            the model's images; or :func:`load_model` fails.
    """
    item = item_length(data)
    if not item:
        raise UserError(f"{data} contains no images; pass a folder written by `lazyformer lm prepare-images`")
    labels = {split: data / f"{split}.{LABELS}" for split in SPLITS}
    for path in labels.values():
        if not path.is_file():
            raise UserError(f"{path}: no such file; prepare images with classes, defined by folders or by {LABELS}")
    loaded = load_model(checkpoint, data, device)
    refuse_other_images(loaded, data)
    dictionary = loaded.dictionary
    classes: dict[str, np.ndarray] = {}
    ids: dict[str, np.ndarray] = {}
    for split, path in labels.items():
        of_all = map_array(path, "prepare the images again", ndim=1)
        places = sample_indices(len(of_all), most)
        classes[split] = of_all[places]
        ids[split] = open_tokens(data / split).reshape(-1, item)[places]
    if len(np.unique(classes["train"])) < 2:
        raise UserError(f"{labels['train']}: all images have the same class; use more classes, or more --images")

    features: dict[str, dict[str, np.ndarray]] = {}
    total = sum(len(of_split) for of_split in ids.values())
    with Progress(total=total, desc="reading", unit=" images") as bar:
        for split, of_split in ids.items():
            colours = palette_of(dictionary)[of_split.astype(np.int64) - dictionary.nspecial]
            pixels = colours.reshape(len(colours), -1).astype(np.float32)
            features.setdefault(PIXELS, {})[split] = pixels
            means = mean_features(loaded.model, of_split, dictionary.eos(), batch_size, bar)
            for name, mean in means.items():
                features.setdefault(name, {})[split] = mean
    shown = Progress(features.items(), total=len(features), desc="probing", unit=" layers")
    return {name: probe(of_layer, classes) for name, of_layer in shown}


@torch.inference_mode()
def mean_features(model: CausalLM, ids: np.ndarray, eos: int, batch_size: int, bar: Progress) -> dict[str, np.ndarray]:
    """Return each attention sublayer's input ("layer 1" and so on) and the output ("end"), averaged over pixels."""
    device = next(model.parameters()).device
    decoder = model.decoder
    found: dict[str, list[np.ndarray]] = {}
    batches = TokenItems(
        ids.reshape(-1), rows=batch_size, tgt_len=ids.shape[1], eos=eos, pad=model.padding_idx, keeps_rest=True
    )
    for batch in batches:
        source = batch["net_input"]["src_tokens"].to(device)
        features, extra = model(source, features_only=True, return_all_hiddens=True)
        states = []
        for x_BTC, sublayer in zip(extra["inner_states"], decoder.sublayers, strict=False):
            if sublayer.attends and decoder.normalize_before:
                states.append(sublayer.layer_norm(x_BTC))
            elif sublayer.attends:
                states.append(x_BTC)
        names = [f"layer {number}" for number in range(1, len(states) + 1)]
        for name, x_BTC in zip([*names, "end"], [*states, features], strict=True):
            mean_BC = x_BTC.float().mean(1).cpu().numpy()
            found.setdefault(name, []).append(mean_BC)
        bar.update(len(features))
    return {name: np.concatenate(parts)[: len(ids)] for name, parts in found.items()}


def probe(
    features: Mapping[str, np.ndarray],
    classes: Mapping[str, np.ndarray],
    seed: int = 1,
) -> dict[str, float]:
    """Fit a probe; return its accuracies on `valid` and `test` in percent, and the selected `C`.

    Args:
        features: each split's features.
        classes: each split's classes.
        seed: the random seed.
    """
    best: dict[str, float] = {}
    for strength in STRENGTHS:
        regression = LogisticRegression(C=strength, max_iter=1000, random_state=seed)
        fitted = make_pipeline(StandardScaler(), regression).fit(features["train"], classes["train"])
        found = {split: 100 * fitted.score(features[split], classes[split]) for split in ("valid", "test")}
        if not best or found["valid"] > best["valid"]:
            best = {**found, "C": strength}
    return best


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table with the accuracies on both splits and the selected C, for raw pixels and for each layer."""
    rows = [
        {
            "features": name,
            "valid": f"{of['valid']:.1f}%",
            "test": f"{of['test']:.1f}%",
            "C": f"{of['C']:g}",
        }
        for name, of in results.items()
    ]
    return Table("", rows).printed()


def write(results: Mapping[str, Mapping[str, float]], folder: Path) -> None:
    """Write ``probe.json``, and plot accuracy by layer to ``probe.png``, with a dotted line for raw pixels."""
    layers = [name for name in results if name != PIXELS]
    write_json(folder / "probe.json", results)
    with picture(folder / "probe.png") as axes:
        axis = axes[0, 0]
        for split, color in zip(("valid", "test"), COLORS, strict=False):
            accuracies = [results[name][split] for name in layers]
            axis.plot(layers, accuracies, "o-", color=color, label=split)
            axis.axhline(results[PIXELS][split], color=color, linestyle=":", label=f"{split}, {PIXELS}")
        axis.set_xticks(range(len(layers)), [name.removeprefix("layer ") for name in layers])
        axis.set_xlabel("layer (input to its attention)")
        axis.set_ylabel("linear probe accuracy, %")
        axis.legend(frameon=False)
