"""Patterns side by side on a diagnostic: from scratch, and self-pretrained first."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.data.datasets.masked_blocks import MaskedInputsDataset, Masking
from lazyformer_fairseq.data.prepared_folder import load_prepared
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.diagnostics import comparison
from lazyformer_fairseq.experiments.diagnostics.comparison import rows_of, seconds_in_all
from lazyformer_fairseq.experiments.diagnostics.settings import TaskRunSettings
from lazyformer_fairseq.finetuning.tasks.listops import ListOpsSettings, prepare_listops
from lazyformer_fairseq.measure.stepwise import StepwiseTraining

# An operator on two digits: a tiny model learns something of it in a second or two.
EASY = ListOpsSettings(
    {"train": 90, "valid": 10, "test": 16}, min_length=4, max_length=6, max_depth=2, max_arguments=4, operators=("MAX",)
)
SIZES = "--embed-dim 16 --ffn-embed-dim 16 --heads 2 --batch-size 16"
PATTERNS = {"all": "sf", "window": "s[window=1,global=1] f"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks") / "listops"
    prepare_listops(EASY, folder)
    return folder


@pytest.fixture(scope="module")
def compared(data, tmp_path_factory):
    """The folder, the command's output and its words, and who was trained on which examples, in order."""
    out, seen = tmp_path_factory.mktemp("compared") / "out", []
    words = [
        "diagnostics",
        "run",
        str(data),
        str(out),
        *SIZES.split(),
        "--seeds",
        "1",
        "--updates",
        "2",
        "--device",
        "cpu",
    ]
    for name, pattern in PATTERNS.items():
        words += ["--pattern", f"{name}={pattern}"]
    with pytest.MonkeyPatch.context() as patch:
        plain = StepwiseTraining._next_batch

        def next_batch(self):
            batch = plain(self)
            seen.append((self.name, batch[0]["id"].tolist()))
            return batch

        patch.setattr(StepwiseTraining, "_next_batch", next_batch)
        ran = CliRunner().invoke(main, [*words, "--self-pretrain", "1"], catch_exceptions=False)
    return out, ran.output, words, seen


def settings_of(data, **given) -> TaskRunSettings:
    prepared = load_prepared(data)
    longest = max(counts["longest"] for counts in prepared.manifest["splits"].values())
    sizes = {"embed_dim": 16, "ffn_embed_dim": 16, "heads": 2, "batch_size": 16}
    return TaskRunSettings(str(data), prepared.sha256, longest, {"all": "sf"}, **{**sizes, **given})


def test_table_and_files(compared):
    out, output, *_ = compared
    assert (out / "table.md").read_text().strip() in output
    results = json.loads((out / "results.json").read_text())
    assert [(entry["name"], entry["start"]) for entry in results["entries"]] == [
        (name, start) for name in PATTERNS for start in ("from scratch", "self-pretrained")
    ]
    with (out / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 + len(results["data"]["rules"])
    assert rows[-4]["model"] == "rule: constant: the most frequent class"
    assert (out / "learning.png").stat().st_size > 1000
    for entry in results["entries"]:
        assert len(entry["masked_accuracy"]) == (1 if entry["start"] == "self-pretrained" else 0)
        assert entry["curves"][0]["updates"] == [0, 1, 2]
        own = zip(entry["seconds"], entry["self_pretraining_seconds"] or [0], strict=True)
        assert seconds_in_all(entry) == [one + other for one, other in own]


def test_fine_tuning_starts_from_the_masks_and_from_random_weights(compared, data):
    """What the folders hold, and what training the same command alone gives."""
    out, *_ = compared
    settings = settings_of(data, self_pretrain=1, updates=2, seeds=(1,))
    folder = out / "runs" / "all-seed1"
    before = torch.load(folder / "self-pretraining" / "checkpoint_last.pt", weights_only=False)["model"]
    for start, checkpoint in (
        ("from-scratch", None),
        ("self-pretrained", folder / "self-pretraining" / "checkpoint_last.pt"),
    ):
        alone = StepwiseTraining(settings.fine_tuning_command("sf", 1, checkpoint), out.parent / f"alone-{start}")
        weights = alone.trainer.model.state_dict()
        names = [name for name in before if name.startswith("encoder.sentence_encoder")]
        assert all(torch.equal(weights[name], before[name]) for name in names) is (checkpoint is not None)
        for _ in range(2):
            alone.update()
        together = torch.load(folder / start / "checkpoint_last.pt", weights_only=False)["model"]
        assert all(torch.equal(value, together[name]) for name, value in alone.trainer.model.state_dict().items())


def test_accuracy_is_that_of_the_saved_model(compared, data):
    from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel

    out, *_ = compared
    results = json.loads((out / "results.json").read_text())
    hub = LazyFormerModel.from_pretrained(out / "runs" / "window-seed1" / "self-pretrained")
    examples = load_prepared(data).read("test", None, 2)
    texts = [hub.tokenizer.decode(ids) for ids in examples.inputs]
    answers = [hub.predict("listops", text).argmax().item() for text in texts]
    assert results["entries"][3]["test_accuracy"][0] == pytest.approx(np.mean(answers == examples.targets))


def test_rerun_trains_nothing_and_resumes_what_was_stopped(compared, monkeypatch, tmp_path):
    out, _, words, _ = compared
    updates = []
    plain = StepwiseTraining.update
    monkeypatch.setattr(StepwiseTraining, "update", lambda self: (updates.append(self.name), plain(self))[1])
    again = [*words, "--self-pretrain", "1"]
    table = (out / "table.md").read_text().strip()
    assert table in CliRunner().invoke(main, again, catch_exceptions=False).output
    assert updates == []
    shutil.copytree(out, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "runs" / "all-seed1" / "self-pretrained")
    again[3] = str(tmp_path / "copy")
    CliRunner().invoke(main, again, catch_exceptions=False)
    assert updates == ["all self-pretrained"] * 2
    first, second = (json.loads((folder / "results.json").read_text()) for folder in (out, tmp_path / "copy"))
    for one, other in zip(first["entries"], second["entries"], strict=True):
        assert one["test_accuracy"] == other["test_accuracy"]
        assert one["curves"][0]["loss"] == other["curves"][0]["loss"]


def test_other_settings_are_refused(compared):
    _, _, words, _ = compared
    ran = CliRunner().invoke(main, [*words, "--self-pretrain", "4"])
    assert isinstance(ran.exception, UserError)
    assert "self_pretrain is 1 there, 4 here" in str(ran.exception)


def test_models_of_a_seed_take_turns_on_the_same_batches(compared):
    *_, seen = compared
    models = [f"{name} {start}" for name in PATTERNS for start in ("from scratch", "self-pretrained")]
    assert [name for name, _ in seen] == [f"{name} masks" for name in PATTERNS] + models * 2
    batches = [ids for _, ids in seen]
    assert batches[0] == batches[1]
    assert batches[2:6] == [batches[2]] * 4 and batches[6:] == [batches[6]] * 4 and batches[2] != batches[6]


@pytest.mark.slow
def test_an_easy_task_is_learnt(data, tmp_path):
    """The largest of two to four digits: far above the constant answer."""
    settings = settings_of(data, updates=100, seeds=(1,), rate=1e-2, batch_size=45)
    comparison.run(settings, tmp_path / "out", ["test"])
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    constant = result["data"]["rules"]["constant: the most frequent class"]
    assert result["entries"][0]["test_accuracy"][0] > constant + 0.2
    assert rows_of(result)[0]["start"] == "from scratch"


@pytest.mark.parametrize(
    ("options", "reason"),
    [("--pattern all=sq", "q"), ("--pattern all=sf --heads 3", "heads")],
)
def test_what_cannot_be_trained_is_refused(options, reason, data, tmp_path):
    words = [
        "diagnostics",
        "run",
        str(data),
        str(tmp_path / "out"),
        *SIZES.split(),
        *options.split(),
        "--device",
        "cpu",
    ]
    ran = CliRunner().invoke(main, words)
    assert isinstance(ran.exception, UserError)
    assert reason in str(ran.exception)


def test_data_of_another_kind_is_refused(data_folder, tmp_path):
    ran = CliRunner().invoke(
        main, ["diagnostics", "run", str(data_folder), str(tmp_path / "out"), "--pattern", "all=sf"]
    )
    assert isinstance(ran.exception, UserError)
    assert "lazyformer diagnostics" in str(ran.exception)


def test_a_block_is_an_input_with_its_ends_unmasked():
    masking = Masking(vocab_size=20, mask_index=4, pad_index=1, special=(0, 1, 2, 3, 4), probability=0.5)
    inputs = [np.array([0, *range(5, 5 + size), 2]) for size in (3, 9, 6)]

    class Items(list):
        sizes = np.array(list(map(len, inputs)))

    dataset = MaskedInputsDataset(Items(inputs), Items.sizes, 16, bos=0, eos=2, masking=masking, shuffle=False)
    assert [list(dataset.block(index)) for index in range(3)] == [list(ids) for ids in inputs]
    assert list(dataset.ordered_indices()) == [0, 2, 1]
    for index, ids in enumerate(inputs):
        example = dataset[index]
        is_target = example["target"].numpy() != 1
        assert not is_target[[0, -1]].any() and is_target.sum() >= 1
        assert (example["source"].numpy()[~is_target] == ids[~is_target]).all()
        assert (example["target"].numpy()[is_target] == ids[is_target]).all()
