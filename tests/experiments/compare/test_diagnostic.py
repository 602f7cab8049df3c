"""Patterns side by side on a made task: from scratch, and self-pretrained first."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import golden_experiments
from in_process import invoke, refusal

from lazyformer_fairseq.data.datasets.masked_blocks import MaskedInputsDataset, Masking
from lazyformer_fairseq.data.prepared_folder import load_prepared
from lazyformer_fairseq.evaluation import hub
from lazyformer_fairseq.experiments.compare.settings import CompareSettings
from lazyformer_fairseq.finetuning.tasks.listops import ListOpsSettings, prepare_listops
from lazyformer_fairseq.training.loop import StepwiseTraining

# An operator on two digits: a tiny model learns something of it in a second or two.
EASY = ListOpsSettings(
    {"train": 90, "valid": 10, "test": 16}, min_length=4, max_length=6, max_depth=2, max_arguments=4, operators=("MAX",)
)
SIZES = "--embed-dim 16 --ffn-embed-dim 16 --heads 2 --batch-size 16 --device cpu"
MODELS = {"all": "sf", "masks": "sf; pretrain=1", "window": "s[window=1,global=1] f; pretrain=1"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks") / "listops"
    prepare_listops(EASY, folder)
    return folder


@pytest.fixture(scope="module")
def compared(data, tmp_path_factory):
    """The folder, and the command's output."""
    out = tmp_path_factory.mktemp("compared") / "out"
    words = f"compare {data} {out} --task listops {SIZES} --seeds 1 --updates 2".split()
    words += [word for name, spec in MODELS.items() for word in ("--model", f"{name}={spec}")]
    return out, invoke(*words)


def test_the_report_tells_of_masks_and_rules(compared):
    out, output = compared
    assert (out / "table.md").read_text().strip() in output
    assert "masks first filled masks in the task's own inputs: 1 updates" in output
    assert "Accuracy without a model: constant: the most frequent class " in output
    models = json.loads((out / "results.json").read_text())["models"]
    assert models.keys() == MODELS.keys() and "pretraining" not in models["all"]
    assert models["all"]["runs"]["1"]["curve"]["updates"] == [0, 1, 2] and models["all"]["flops_per_update"] > 0
    golden = golden_experiments("listops")
    for name, model in models.items():
        assert model["runs"]["1"]["curve"]["loss"] == pytest.approx(golden[f"{name} 1"], rel=1e-3), name


def test_training_starts_from_the_masks_or_from_random_weights(compared, data):
    """What the folders hold, and what training the same command alone gives."""
    out, _ = compared
    before_folder = out / "pretraining" / "masks-seed1"
    before = torch.load(before_folder / "checkpoint_last.pt", weights_only=False)["model"]
    settings = CompareSettings(
        task="listops", data=str(data), models=MODELS, updates=2, device="cpu",
        sizes={"embed_dim": 16, "ffn_embed_dim": 16, "heads": 2, "batch_size": 16},
    )  # fmt: skip
    task = settings.row.load(settings)
    for name, begins_with in (("all", None), ("masks", before_folder / "checkpoint_last.pt")):
        spec = settings.specs[name]
        lesson = replace(task.lesson(spec, 1, 2), begins_with=begins_with)
        learning = task.learning(spec, 1, settings.rates_of(spec)[0], 2)
        alone = StepwiseTraining(lesson, learning, out.parent / f"alone-{name}")
        weights = alone.model.state_dict()
        names = [name for name in before if name.startswith("encoder.sentence_encoder")]
        assert all(torch.equal(weights[name], before[name]) for name in names) is (begins_with is not None)
        for _ in range(2):
            alone.update()
        (run,) = (out / "runs").glob(f"{name}-*")
        together = torch.load(run / "checkpoint_last.pt", weights_only=False)["model"]
        assert all(torch.equal(value, together[name]) for name, value in alone.model.state_dict().items())


def test_accuracy_is_that_of_the_saved_model(compared, data):
    out, _ = compared
    (run,) = (out / "runs").glob("window-*")
    model = hub.load(run)
    examples = load_prepared(data).read("test", None, 2)
    answers = [model.predict("listops", model.tokenizer.decode(ids)).argmax().item() for ids in examples.inputs]
    final = json.loads((out / "results.json").read_text())["models"]["window"]["runs"]["1"]["final"]
    assert final["test_accuracy"] == pytest.approx(100 * np.mean(answers == examples.targets))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--task listops --model all=sf --heads 3", "heads"),
        ("--task pairs --model all=sf", "is of --task listops, not pairs"),
        ("--task listops --model all=fairseq:roberta_base", "models from elsewhere"),
        ("--task listops", "lazyformer diagnostics"),
    ],
)
def test_what_cannot_be_trained_is_refused(options, reason, data, lm_data, tmp_path):
    """Data of another kind too."""
    given = data if "--model" in options else lm_data
    assert reason in refusal(*f"compare {given} {tmp_path / 'out'} {SIZES} {options}".split())


def test_a_block_is_an_input_with_its_ends_unmasked():
    masking = Masking(vocab_size=20, mask_index=4, pad_index=1, special=(0, 1, 2, 3, 4), probability=0.5)
    inputs = [np.array([0, *range(5, 5 + size), 2]) for size in (3, 9, 6)]
    sizes = np.array(list(map(len, inputs)))
    dataset = MaskedInputsDataset(inputs, sizes, 16, bos=0, eos=2, masking=masking, shuffle=False)
    assert [list(dataset.block(index)) for index in range(3)] == [list(ids) for ids in inputs]
    assert list(dataset.ordered_indices()) == [0, 2, 1]
    for example, ids in zip(map(dataset.__getitem__, range(3)), inputs, strict=True):
        is_target = example["target"].numpy() != 1
        assert not is_target[[0, -1]].any() and is_target.sum() >= 1
        assert (example["source"].numpy()[~is_target] == ids[~is_target]).all()
        assert (example["target"].numpy()[is_target] == ids[is_target]).all()
