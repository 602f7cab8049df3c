"""Image GPT: pictures and arrays become colours, a model learns them, draws, and is probed (Chen et al., 2020)."""

import io
import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import mostly_slow
from in_process import invoke, refusal
from PIL import EpsImagePlugin, Image
from sklearn.datasets import load_digits

from lazyformer_fairseq.data.datasets.token_streams import TokenItems, item_length, make_streams, open_tokens
from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.language_modeling import images
from lazyformer_fairseq.language_modeling.evaluate import Loaded, load_model, token_losses
from lazyformer_fairseq.language_modeling.images import palette_of
from lazyformer_fairseq.language_modeling.prepare import read_manifest
from lazyformer_fairseq.language_modeling.probe import mean_features, probe_layers
from lazyformer_fairseq.language_modeling.sample import Writer
from lazyformer_fairseq.modules.networks.options import options_of_arch
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.training.loop import CHECKPOINT, TrainingLoop
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.objectives.stream_lm import StreamLMObjective
from lazyformer_fairseq.training.optimization import OptimizationConfig

SPLITS = ("train", "valid", "test")
PATTERN = "(s[positions=absolute,length=64]f)x{}"
MUON = {"optimizer": "muon", "optimizer_options": {"adam_lr": 3e-3}, "schedule": "linear_warmup"}


def write_digits(folder: Path, count: int = 120) -> Path:
    digits = load_digits()
    folder.mkdir()
    np.save(folder / "images.npy", digits.images[:count] / 16)
    np.save(folder / "labels.npy", digits.target[:count])
    return folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """As prepared: 8 x 8 pixels, 17 levels."""
    folder = tmp_path_factory.mktemp("digits")
    said = invoke("lm", "prepare-images", write_digits(folder / "source"), folder / "data", *WORDS)
    assert "17 colors, 8 x 8 pixels; 10 classes" in said
    return folder / "data"


WORDS = "--side 8 --valid 0.1 --test 0.1".split()


def train(data: Path, folder: Path, updates: int, layers: int = 2, width: int = 32, batch: int = 16) -> TrainingLoop:
    sizes = {"decoder_embed_dim": width, "decoder_ffn_embed_dim": 4 * width, "decoder_attention_heads": width // 16}
    options = options_of_arch("igpt_s_tiny", sublayer_pattern=PATTERN.format(layers), dropout=0.1, **sizes)
    objective = StreamLMObjective(Network(options), str(data), batch, 1, {"tgt_len": 64})
    training = TrainingLoop(
        objective, OptimizationConfig(updates, 0.02, schedule_options={"warmup_ratio": 0.1}, **MUON), folder
    )
    for _ in range(training.updates, updates):
        training.update()
    training.save()
    return training


@pytest.fixture(scope="module")
def checkpoint(digits, tmp_path_factory) -> Path:
    train(digits, folder := tmp_path_factory.mktemp("checkpoint"), updates=6)
    return folder / CHECKPOINT


def pictures(data: Path, split: str) -> np.ndarray:
    """(images, 8, 8, 3), of the ids."""
    dictionary = load_dictionary(data / "dict.txt")
    return palette_of(dictionary)[open_tokens(data / split).astype(int) - 4].reshape(-1, 8, 8, 3)


def test_levels_stay_as_they_are_and_splits_share_the_images_out(digits, tmp_path):
    written = [pictures(digits, split)[..., 0] for split in SPLITS]
    labels = [np.load(digits / f"{split}.labels.npy") for split in SPLITS]
    assert [len(each) for each in written] == [96, 12, 12]
    source = load_digits()
    expected = Counter(
        (np.rint(image / 16 * 255).astype(np.uint8).tobytes(), int(label))
        for image, label in zip(source.images[:120], source.target[:120], strict=True)
    )
    found = zip(np.concatenate(written), np.concatenate(labels), strict=True)
    assert Counter((image.tobytes(), int(label)) for image, label in found) == expected
    manifest, dictionary = read_manifest(digits), load_dictionary(digits / "dict.txt")
    assert (manifest["item"], manifest["unit"], manifest["classes"]) == (64, "pixel", list("0123456789"))
    assert dictionary.symbols[4] == "#000000" and dictionary.count[4:] == sorted(dictionary.count[4:], reverse=True)
    assert np.array_equal(np.load(digits / "palette.npy"), palette_of(dictionary))
    again, other = tmp_path / "again", tmp_path / "other"
    source = write_digits(tmp_path / "source")
    invoke("lm", "prepare-images", source, again, *WORDS)
    invoke("lm", "prepare-images", source, other, *WORDS, "--seed", 2)
    assert {path.name for path in again.iterdir()} == {path.name for path in digits.iterdir()}
    assert (again / "train.bin").read_bytes() == (digits / "train.bin").read_bytes()
    assert (other / "train.bin").read_bytes() != (digits / "train.bin").read_bytes()


def write_pictures(folder: Path, count: int, size=(9, 12)) -> Path:
    """Of noise, in folders of two classes."""
    chance = np.random.default_rng(1)
    for number in range(count):
        path = folder / "ab"[number % 2] / f"{number}.{'png' if number % 3 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(chance.integers(256, size=(*size, 3), dtype=np.uint8)).save(path)
    return folder


def test_k_means_finds_a_palette_that_other_images_may_take(tmp_path):
    for split, count in (("train", 8), ("test", 4)):
        write_pictures(tmp_path / "split" / split, count)
    said = invoke(
        "lm", "prepare-images", tmp_path / "split", tmp_path / "data", *"--side 6 --colours 16 --valid 0.5".split()
    )
    assert "16 colors, 6 x 6 pixels; 2 classes" in said
    assert [read_manifest(tmp_path / "data")["splits"][split]["items"] for split in SPLITS] == [4, 4, 4]
    palette = np.load(tmp_path / "data" / "palette.npy").astype(int)
    reduced = np.asarray(Image.open(tmp_path / "split" / "test" / "a" / "2.png").resize((6, 6), 4, (1.5, 0, 10.5, 9)))
    first = open_tokens(tmp_path / "data" / "test")[36:72] - 4  # a/0.jpg is before it
    distances = ((reduced.reshape(-1, 1, 3).astype(int) - palette) ** 2).sum(-1)
    assert np.array_equal(distances.min(-1), distances[np.arange(36), first])  # each the nearest
    chance = np.random.default_rng(2).integers(256, size=(3, 12, 12, 3), dtype=np.uint8)
    write_pictures(tmp_path / "more", 9)
    np.save(tmp_path / "more" / "a" / "arrays.npy", chance)
    words = ("--side", 6, "--palette", tmp_path / "data", "--valid", 0.2, "--test", 0.2)
    invoke("lm", "prepare-images", tmp_path / "more", tmp_path / "other", *words)
    assert (tmp_path / "other" / "dict.txt").read_bytes() == (tmp_path / "data" / "dict.txt").read_bytes()
    assert sum(read_manifest(tmp_path / "other")["splits"][split]["items"] for split in SPLITS) == 12


def test_a_photograph_is_read_upright(tmp_path):
    picture = Image.new("RGB", (4, 4))
    picture.paste((255, 255, 255), (0, 0, 2, 4))
    exif = picture.getexif()
    exif[0x0112] = 6  # the camera was turned
    picture.save(tmp_path / "turned.png", exif=exif)
    (found,) = images._read([tmp_path / "turned.png"], 4)
    assert (found[:2] == 255).all() and (found[2:] == 0).all()


def with_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """A .npy file of a header alone."""
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": dtype, "fortran_order": False, "shape": shape})
    return content.getvalue()


def packed() -> bytes:
    content = io.BytesIO()
    np.savez_compressed(content, labels=np.zeros(9))
    return content.getvalue()


@pytest.mark.parametrize("ending", ["png", "webp", "gif", "tiff", "jpg", "bmp", "ppm"])
def test_a_picture_that_stands_for_too_many_pixels_is_not_decoded(tmp_path, monkeypatch, ending):
    path = tmp_path / f"x.{ending}"
    Image.new("RGB", (64, 64)).save(path, **({"compression": "tiff_lzw"} if ending == "tiff" else {}))
    assert len(list(images._read([path], 4))) == 1
    monkeypatch.setattr(images, "PIXELS_PER_BYTE", 0)
    monkeypatch.setattr(images, "USUAL_PIXELS", 4095)
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(UserError, match=r"x\.\w+ decodes to 64 x 64 pixels from [\d,]+ bytes"):
        list(images._read([path], 4))


def test_postscript_under_another_name_starts_no_interpreter(tmp_path, monkeypatch):
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    path = tmp_path / "x.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    with pytest.raises(UserError, match="x.png: not a readable image"):
        list(images._read([path], 4))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.png", b"no picture", r"x\.png: not a readable image"),
        ("x.npy", b"no array", r"x\.npy: cannot be read as an array"),
        ("x.npy", np.zeros((2, 3, 4, 5)), r"x\.npy has the shape \(2, 3, 4, 5\)"),
        ("x.npy", np.zeros((2, 4, 4), int), r"x\.npy has the type int64; use uint8"),
        ("x.npy", np.full((2, 4, 4), 16.0), r"x\.npy: image 0 has values outside 0 to 1"),
        ("x.npy", np.array([[{}]]), r"x\.npy: cannot be read as an array \(.*objects"),
        ("x.npy", with_header("|u1", (10**9, 10**3, 10**3)), r"x\.npy: cannot be read as an array \(.*file size"),
        ("x.npy", with_header("|V0", (10**9, 4, 4)), r"x\.npy: arrays with type"),
        ("x.npy", packed(), r"x\.npy: cannot be read as an array \(it is not a \.npy file"),
        ("labels.npy", np.zeros(3), r"labels\.npy has the shape \(3,\), but there are 9 images"),
        ("labels.npy", with_header("<U0", (4 * 10**8,)), r"labels\.npy: arrays with type <U0"),
        ("labels.npy", packed(), r"labels\.npy: cannot be read as an array"),
        ("labels.npy", np.zeros((9, 1)), r"labels\.npy: arrays with type float64 and shape \(9, 1\)"),
    ],
)
def test_what_is_no_image_is_refused_by_its_name(tmp_path, name, content, message):
    path = tmp_path / "source" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    np.save(tmp_path / "source" / "y.npy", np.zeros((9, 4, 4)))
    words = "--side 3 --valid 0.2 --test 0.2".split()
    assert re.search(message, refusal("lm", "prepare-images", tmp_path / "source", tmp_path / "out", *words))
    assert not (tmp_path / "out").exists()


def test_few_images_and_palettes_of_words_are_refused(tmp_path, lm_data):
    np.save(tmp_path / "few.npy", np.zeros((9, 4, 4)))
    said = refusal("lm", "prepare-images", tmp_path, tmp_path / "out")
    assert "9 images leave none for valid" in said
    said = refusal(
        "lm", "prepare-images", tmp_path, tmp_path / "out", "--valid", 0.2, "--test", 0.2, "--palette", lm_data
    )
    assert "symbols are not colors" in said
    assert "is not a folder" in refusal("lm", "prepare-images", tmp_path / "few.npy", tmp_path / "out")


# What models read


def test_a_batch_has_whole_images_each_from_the_start_on():
    tokens = np.arange(10 * 4) + 4
    how = {"rows": 4, "tgt_len": 4, "eos": 2, "pad": 1, "item": 4}
    batches = [make_streams(tokens, **how, shards=2, shard=shard) for shard in (0, 1)]
    seen = [batches[shard][segment] for segment in range(len(batches[0])) for shard in (0, 1)]
    images = torch.cat([batch["target"] for batch in seen])
    assert images.shape == (8, 4) and len({int(image[0]) for image in images}) == 8
    assert all(torch.equal(image, image[0] + torch.arange(4)) and (image[0] - 4) % 4 == 0 for image in images)
    for batch in seen:
        source = batch["net_input"]["src_tokens"]
        assert (source[:, 0] == 2).all() and torch.equal(source[:, 1:], batch["target"][:, :-1])
    assert not torch.equal(images, images.sort(0).values)
    later, same = (torch.cat([x["target"] for x in make_streams(tokens, **how, epoch=n)]) for n in (2, 1))
    assert not torch.equal(images, later) and not torch.equal(later, same)
    rest = make_streams(tokens, **how, keeps_rest=True)
    assert type(rest) is TokenItems and torch.equal(rest[0]["target"].flatten(), torch.arange(4, 20))
    assert rest[2]["target"].tolist() == [[36, 37, 38, 39], [40, 41, 42, 43], [1] * 4, [1] * 4]
    assert rest[2]["ntokens"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tgt-len 16", "--tgt-len 16: the images have 64 pixels"),
        ("--mem-len 8 --sublayer-pattern sf", "--mem-len 8: images are independent"),
        ("--mem-len 8", r"--mem-len 8 cannot be used with s\[.*absolute positions are counted from"),
        ("--batch-size 1000 --sequences-per-update 1000", "96 images do not fill a batch of 1000"),
        ("--sublayer-pattern s[positions=absolute,length=63]", "64 tokens, but .* position table has length 63"),
    ],
)
def test_what_images_cannot_have_is_refused(digits, tmp_path, fairseq_train, words, message):
    options = (
        f"--arch igpt_s_tiny --sublayer-pattern {PATTERN.format(1)} --criterion causal_lm --batch-size 4 "
        f"--max-update 1 {words}"
    )
    task = "stream_language_modeling --tgt-len 64"
    if words.startswith("--tgt-len"):
        task, options = f"stream_language_modeling {words}", options.removesuffix(words)
    with pytest.raises(UserError, match=message):
        fairseq_train(digits, options, tmp_path, task)


def test_bits_per_pixel_are_of_each_image_alone(digits, checkpoint):
    model = load_model(checkpoint, digits).model
    tokens = open_tokens(digits / "test")
    found = [token_losses(model, tokens, 2, 64, 0, batch_size=size, item=64) for size in (1, 5)]
    np.testing.assert_allclose(*found, atol=1e-5)
    with torch.no_grad():
        image = torch.from_numpy(tokens[64:128].astype(np.int64))[None]
        source = torch.cat([torch.tensor([[2]]), image[:, :-1]], 1)
        expected, _ = model(source, target=image)
    np.testing.assert_allclose(found[0][64:128], expected[0].numpy(), atol=1e-5)
    said = invoke("lm", "evaluate", checkpoint, digits, "--batch-size", 4)
    bits = re.match(r"test: ([\d.]+) bits per pixel", said)
    assert float(bits[1]) == pytest.approx(found[0].mean() / math.log(2), abs=1e-4)
    with pytest.raises(UserError, match="images are independent"):
        token_losses(model, tokens, 2, 64, 5, item=64)


# What they draw, and know


@pytest.mark.parametrize(
    "pattern", mostly_slow(["", "(s[synthesizer=dense+dot,length=64]f)", "sfl", "s[window=5]f"], "")
)
def test_each_pixel_is_the_likeliest_after_those_before(digits, checkpoint, pattern):
    """With what sublayers remember, or read anew; at temperature 0, and among the likeliest one."""
    model, dictionary, _ = load_model(checkpoint, digits)
    if pattern:
        model = Network(options_of_arch("igpt_s_tiny", sublayer_pattern=pattern)).build(dictionary).eval()
        torch.nn.init.normal_(model.softmax.own.bands[0].table)
    given = torch.from_numpy(open_tokens(digits / "test")[:128].astype(np.int64)).view(2, 64)[:, :32]
    loaded = Loaded(model, dictionary, 64)
    greedy = Writer(digits, loaded, temperature=0).continued(given, 64)
    top = Writer(digits, loaded, top_k=1).continued(given, 64)
    assert torch.equal(greedy, top) and torch.equal(greedy[:, :32], given)
    with torch.no_grad():
        scores, _ = model(torch.cat([torch.full((2, 1), 2), greedy[:, :-1]], 1))
    assert torch.equal(4 + scores[:, 32:, 4:].argmax(-1), greedy[:, 32:])
    draw = [Writer(digits, Loaded(model, dictionary, 64), seed=seed).continued(given[:, :0], 64) for seed in (1, 1, 2)]
    assert torch.equal(draw[0], draw[1]) and not torch.equal(draw[0], draw[2]) and (draw[0] >= 4).all()


def test_pictures_are_grids_of_images(digits, checkpoint, tmp_path):
    path = tmp_path / "drawn.png"
    invoke("lm", "sample", checkpoint, digits, "--output", path, "--count", 10, "--device", "cpu")
    assert Image.open(path).size == (8 * 100, 2 * 100)
    invoke("lm", "sample", checkpoint, digits, "--output", path, "--count", 3, "--complete", "--device", "cpu")
    grid = np.asarray(Image.open(path)).reshape(3, 100, 6, 100, 3).swapaxes(1, 2)[:, :, :96:12, :96:12]
    whole = pictures(digits, "test")[:3]
    assert np.array_equal(grid[:, 5], whole) and (grid[:, 0, 4:] == 128).all()
    assert all(np.array_equal(grid[:, column, :4], whole[:, :4]) for column in range(5))
    assert "--prompt is for texts" in refusal("lm", "sample", checkpoint, digits, "--prompt", "x")


def test_images_of_another_size_than_the_models_are_refused(digits, checkpoint, tmp_path):
    small = tmp_path / "small"
    invoke("lm", "prepare-images", write_digits(tmp_path / "source"), small, "--side", 4, "--palette", digits)
    for words in (("sample", checkpoint, small, "--complete"), ("probe", checkpoint, small, tmp_path / "probed")):
        said = refusal("lm", *words, "--device", "cpu")
        assert "the images have 16 pixels, but the model was trained on images with 64" in said


def test_texts_are_continued_too():
    trained = Path(__file__).parents[1] / "fixtures" / "checkpoints" / "language_model"
    words = ("lm", "sample", trained / "checkpoint_last.pt", trained / "data", "--device", "cpu")
    word = load_dictionary(trained / "data" / "dict.txt").symbols[5]
    said = invoke(*words, "--prompt", f"{word} {word}", "--count", 1, "--length", 40)
    assert said.startswith(f"{word} {word}") and len(said.replace("\n", " </s> ").split()) >= 40
    assert invoke(*words, "--length", 40) != said
    assert invoke(*words, "--prompt", "</s>", "--count", 1, "--length", 2).startswith("\n")
    assert "'nowhere' is not a symbol in" in refusal(*words, "--prompt", "nowhere")
    assert "--complete is for images" in refusal(*words, "--complete")


def test_a_probe_reads_each_layer_beside_raw_pixels(digits, checkpoint, tmp_path, lm_data):
    said = invoke("lm", "probe", checkpoint, digits, tmp_path / "probed", "--device", "cpu", "--batch-size", 7)
    found = json.loads((tmp_path / "probed" / "probe.json").read_text())
    assert [*found] == ["raw pixels", "layer 1", "layer 2", "end"] and all(name in said for name in found)
    assert found["raw pixels"]["test"] > 50  # by chance 10
    loaded, ids = load_model(checkpoint, digits), open_tokens(digits / "test").reshape(-1, 64)
    features = mean_features(loaded.model, ids, 2, 5, Progress(disable=True))
    with torch.no_grad():
        source = torch.from_numpy(np.pad(ids.astype(np.int64), ((0, 0), (1, 0)), constant_values=2)[:, :-1])
        end, states = loaded.model.decoder(source, return_all=True)
        first = loaded.model.decoder.sublayers[0].layer_norm(states[0])
    for name, expected in (("end", end), ("layer 1", first)):
        np.testing.assert_allclose(features[name], expected.mean(1).numpy(), atol=1e-5)
    assert Image.open(tmp_path / "probed" / "probe.png").size[0] > 100
    assert "contains no images" in refusal("lm", "probe", checkpoint, lm_data, tmp_path / "other")
    unlabelled = tmp_path / "source"
    write_digits(unlabelled)
    (unlabelled / "labels.npy").unlink()
    invoke("lm", "prepare-images", unlabelled, tmp_path / "data", *WORDS)
    assert "labels.npy: no such file" in refusal("lm", "probe", checkpoint, tmp_path / "data", tmp_path / "other")
    assert item_length(lm_data) == 0


def test_of_many_images_in_the_order_of_their_classes_some_of_each_are_read(digits, checkpoint, tmp_path):
    data = shutil.copytree(digits, tmp_path / "data")
    for split in SPLITS:  # by class, as folders have them
        labels, ids = np.load(data / f"{split}.labels.npy"), np.fromfile(data / f"{split}.bin", np.uint8)
        order = labels.argsort(kind="stable")
        np.save(data / f"{split}.labels.npy", labels[order])
        ids.reshape(len(labels), -1)[order].tofile(data / f"{split}.bin")
    accuracy = probe_layers(checkpoint, data, most=48, batch_size=8)["raw pixels"]["test"]
    assert accuracy > 50  # the first 48 have half of the classes
    np.save(data / "train.labels.npy", np.zeros(96, int))
    with pytest.raises(UserError, match="train.labels.npy: all images have the same class"):
        probe_layers(checkpoint, data, most=48, batch_size=8)


@pytest.mark.slow
def test_digits_cost_fewer_bits_the_longer_a_model_trains(tmp_path):
    """All 1,797 of them, on one core in a minute: fewer bits per pixel of held-out images than 2.2."""
    invoke("lm", "prepare-images", write_digits(tmp_path / "source", 1797), tmp_path / "data", *WORDS)
    training = train(tmp_path / "data", tmp_path / "run", updates=150, layers=4, width=64, batch=32)
    losses = token_losses(training.model, open_tokens(tmp_path / "data" / "test"), 2, 64, 0, batch_size=90, item=64)
    assert losses.mean() / math.log(2) < 2.22, "predicted by counts of left and upper neighbours they cost 2.37"
