"""The loop's updates are those of fairseq's trainer to the bit, whoever wrote the checkpoint; bad ones are skipped."""

import math
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, load_script
from in_process import invoke
from torch.utils._pytree import tree_leaves

from lazyformer_fairseq.arguments import to_arguments
from lazyformer_fairseq.data.masked_text import MaskedTextOptions
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.planning.fit import Hardware, Plan
from lazyformer_fairseq.evaluation.planning.job import job_of_launch
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions, options_of_arch
from lazyformer_fairseq.options import select_options
from lazyformer_fairseq.training.loop import CHECKPOINT, TrainingLoop
from lazyformer_fairseq.training.objectives.interface import Objective
from lazyformer_fairseq.training.objectives.masked_lm import MaskedLMObjective
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.objectives.permuted_lm import PermutedLMObjective
from lazyformer_fairseq.training.objectives.stream_lm import StreamLMObjective
from lazyformer_fairseq.training.optimization import OptimizationConfig
from lazyformer_fairseq.training.update_guard import MOST_SKIPPED

UPDATES, HALF = 7, 4  # images have an epoch of 6 updates
MASKED = "--task full_sentences_masked_lm --tokens-per-sample 32 --criterion masked_lm_accuracy --max-positions 32"
STREAMS = "--task stream_language_modeling --tgt-len 6 --criterion causal_lm --mem-len 5 --adaptive-softmax-cutoff 20"
BATCHES = {"masked": ("bert_tiny", MASKED, 4), "streams": ("transformer_xl_tiny", STREAMS, 3)}
RECIPE = {"length_schedule": "8:0.3,16:0.8", "mask_prob": "0.3:0.15", "local_heads": True, "zero_last_maps": True}
RECIPE |= {"frequency_bias": True, "encoder_normalize_before": True}
BATCHES["laptop"] = ("bert_laptop_tiny", f"{MASKED} {shlex.join(to_arguments(RECIPE))}", 4)
PERMUTED = MASKED.replace("full_sentences_masked_lm", "masked_permuted_lm") + " --permuted-only --whole-word-masks"
BATCHES["permuted"] = ("mpnet_tiny", PERMUTED, 4)
BATCHES["images"] = (
    "igpt_s_tiny",
    "--task stream_language_modeling --criterion causal_lm --tgt-len 16 --dropout 0.1 "
    "--sublayer-pattern (s[positions=absolute,length=16]f)x2",
    4,
)
BATCHES |= {"nbrc": ("nbrc_tiny", MASKED, 4), "linformer": ("linformer_falling_tiny", MASKED, 4)}
BATCHES["mingru streams"] = ("mingru_tiny", STREAMS, 3)
BATCHES["experts"] = ("gshard_tiny", MASKED, 4)
BATCHES["experts streams"] = ("transformer_xl_tiny", f"{STREAMS} --sublayer-pattern (sf[experts=3])x2", 3)
ADAM = ("fused_adam", {"adam_betas": "(0.9, 0.98)"}, "linear_warmup", {"warmup_ratio": 0.3})
LAMB = ("nvlamb", {"weight_decay": 0.1, "max_weight_norm": 10.0, "no_bias_correction": True}, "cosine")
LAMB += ({"warmup_updates": 2, "min_lr": 0.001},)
MUON = ("muon", {"adam_lr": 1e-3, "no_decay_bias_and_norm": True}, "wsd", {"warmup_updates": 1, "decay_share": 0.5})
QUICK = [("masked", ADAM, "fp32"), ("masked", LAMB, "fp16"), ("experts", ADAM, "bf16"), ("laptop", MUON, "fp32")]
QUICK += [("streams", LAMB, "fp32"), ("permuted", ADAM, "bf16"), ("images", MUON, "bf16")]
SLOW = [
    ("masked", MUON, "bf16"),
    ("masked", ADAM, "bf16"),
    ("experts", ADAM, "fp32"),
    ("experts streams", ADAM, "fp32"),
]
SLOW += [("streams", ADAM, "fp32"), ("permuted", ADAM, "fp32"), ("images", ADAM, "fp32")]
SLOW += [("nbrc", ADAM, "fp32"), ("nbrc", MUON, "bf16"), ("linformer", ADAM, "bf16")]
SLOW += [("mingru streams", ADAM, precision) for precision in ("fp32", "bf16")]


@pytest.fixture(scope="module")
def folders(data_folder, lm_data, tmp_path_factory) -> dict[str, Path]:
    images = tmp_path_factory.mktemp("tasks") / "images"
    images.mkdir()
    np.save(images / "noise.npy", np.random.default_rng(1).integers(0, 3, (40, 4, 4), dtype=np.uint8))
    invoke("lm", "prepare-images", images, images / "data", *"--side 4 --valid 0.2 --test 0.2".split())
    data = {what: lm_data if what.endswith("streams") else data_folder for what in BATCHES}
    return {**data, "images": images / "data"}


def objective_of(what: str, folder: Path) -> Objective:
    arch, _, batch_size = BATCHES[what]
    if what.endswith("streams"):
        pattern = {"sublayer_pattern": "(sf[experts=3])x2"} if "experts" in what else {}
        network = Network(options_of_arch(arch, mem_len=5, adaptive_softmax_cutoff="20", **pattern))
        return StreamLMObjective(network, str(folder), batch_size, 1, {"tgt_len": 6})
    if what == "images":
        pattern = "(s[positions=absolute,length=16]f)x2"
        network = Network(options_of_arch(arch, dropout=0.1, sublayer_pattern=pattern))
        return StreamLMObjective(network, str(folder), batch_size, 1, {"tgt_len": 16})
    recipe = RECIPE if what == "laptop" else {}
    network = Network(options_of_arch(arch, max_positions=32, **select_options(MaskedLMOptions, recipe)))
    objective = MaskedLMObjective
    text = select_options(MaskedTextOptions, recipe)
    if what == "permuted":
        objective = PermutedLMObjective
        text = {"permuted_only": True, "whole_word_masks": True}
    return objective(network, str(folder), batch_size, 1, UPDATES, {"tokens_per_sample": 32, **text})


def optimization_of(how: tuple, precision: str = "fp32", **more) -> OptimizationConfig:
    names = ("optimizer", "optimizer_options", "schedule", "schedule_options")
    return OptimizationConfig(
        UPDATES, 1e-2, clip_norm=0.5, precision=precision, **dict(zip(names, how, strict=True)), **more
    )


def words_of(what: str, folder: Path, optimization: OptimizationConfig) -> list[str]:
    arch, words, batch_size = BATCHES[what]
    given = {**optimization.optimizer_options, **optimization.schedule_options, "user_dir": ROOT / "lazyformer_fairseq"}
    given |= {
        "optimizer": optimization.optimizer,
        "lr_scheduler": optimization.schedule,
        "lr": optimization.rate,
        "arch": arch,
    }
    given |= {"max_update": UPDATES, "batch_size": batch_size, "clip_norm": optimization.clip_norm}
    given |= {"warmup_init_lr": 0} if optimization.schedule == "cosine" else {}
    flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in given.items()]
    precision = [] if optimization.precision == "fp32" else [f"--{optimization.precision}"]
    return [str(folder), *shlex.split(words), *flags, *precision, "--cpu", "--num-workers=0", "--no-epoch-checkpoints"]


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("what", "how", "precision"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_updates_are_those_of_fairseqs_trainer_and_either_resumes_the_other(what, how, precision, folders, tmp_path):
    """With dropout; fairseq's epoch is over within these updates, and so is ours."""
    make_theirs, optimization = load_script("fairseq_stepwise").FairseqTraining, optimization_of(how, precision)
    words = words_of(what, folders[what], optimization)

    def ours(folder: str) -> TrainingLoop:
        return TrainingLoop(objective_of(what, folders[what]), optimization, tmp_path / folder)

    whole, theirs = ours("whole"), make_theirs(words, tmp_path / "theirs")
    for update in range(UPDATES):
        assert whole.optimizer.get_lr() == theirs.trainer.get_lr()
        assert whole.update() == theirs.update()
        assert equal(whole.model.state_dict(), theirs.trainer.model.state_dict()), update
        if update == HALF:
            whole.save()
            theirs.save()
    for make, folder in ((ours, "theirs"), (lambda folder: make_theirs(words, tmp_path / folder), "whole")):
        resumed = make(folder)
        assert resumed.updates == HALF + 1
        for _ in range(HALF + 1, UPDATES):
            resumed.update()
        model = getattr(resumed, "model", None) or resumed.trainer.model
        assert equal(model.state_dict(), whole.model.state_dict()), f"{folder} resumed"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_is_as_large_as_is_planned_and_has_the_word_table_once(precision, folders, tmp_path):
    optimization, data = optimization_of(ADAM, precision), folders["masked"]
    theirs = load_script("fairseq_stepwise").FairseqTraining(
        words_of("masked", data, optimization), tmp_path / "theirs"
    )
    ours = TrainingLoop(objective_of("masked", data), optimization, tmp_path / "ours")
    job = job_of_launch("bert_tiny", None, str(data), ["--max-positions", "32", "--tokens-per-sample", "32"])
    planned = Plan(job, Hardware(1, 0, precision), [], None, 1.0, "", None).checkpoint_bytes
    for training in (ours, theirs):
        training.update()
        training.save()
        kept = tree_leaves(torch.load(tmp_path / ("ours" if training is ours else "theirs") / CHECKPOINT))
        storages = [each.untyped_storage() for each in kept if torch.is_tensor(each)]
        found = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        assert found == pytest.approx(planned, rel=0.01)


def test_a_validation_is_fairseqs(folders, tmp_path):
    optimization = optimization_of(ADAM)
    words = words_of("masked", folders["masked"], optimization)
    expected = load_script("fairseq_stepwise").FairseqTraining(words, tmp_path / "theirs").evaluate()
    found = TrainingLoop(objective_of("masked", folders["masked"]), optimization, tmp_path / "ours").evaluate()
    assert found == {name: pytest.approx(float(expected[name])) for name in found} and len(found) == 2


class Broken(MaskedLMObjective):
    """Whose loss is no number from its third update on."""

    def loss(self, model, batch):
        loss, size, log = super().loss(model, batch)
        self.calls = getattr(self, "calls", 0) + 1
        factor = float("nan") if self.calls > 2 else 1.0
        return loss * factor, size, {**log, "loss": log["loss"] * factor}


@pytest.mark.parametrize("what", ["masked", "streams"])
def test_a_batch_that_predicts_nothing_is_an_update_and_has_no_part_in_a_validation(what, folders, tmp_path):
    objective = objective_of(what, folders[what])
    training = TrainingLoop(objective, optimization_of(ADAM), tmp_path)
    batch = next(iter(objective.batches()))
    empty = {**batch, "target": torch.full_like(batch["target"], objective.dictionary.pad())}
    empty.pop("masked_positions", None)
    training.train_on([empty])
    assert training.updates == 1
    assert training.guard.skipped_in_a_row == 0
    if what == "masked":
        _, _, log = objective.loss(training.model.eval(), batch)
        _, _, nothing = objective.loss(training.model, empty)
        assert objective.measures([log, nothing]) == objective.measures([log])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_updates_without_numbers_are_skipped_and_many_in_a_row_end_it(precision, folders, tmp_path):
    objective = Broken(**vars(objective_of("masked", folders["masked"])))
    training = TrainingLoop(objective, optimization_of(ADAM, precision), tmp_path)
    training.update()
    training.update()
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    for _ in range(MOST_SKIPPED - 1):
        training.update()
    assert equal(before, training.model.state_dict()) and training.updates == MOST_SKIPPED + 1
    with pytest.raises(UserError, match="10 updates in a row, up to update 12, .* lower --lr"):
        training.update()


def test_an_overflow_halves_the_scale_of_the_loss_and_is_no_update(folders, tmp_path):
    training = TrainingLoop(objective_of("masked", folders["masked"]), optimization_of(ADAM, "fp16"), tmp_path)
    training.weights.scale.value = 2.0**22
    read, following = [], training._next_batches
    training._next_batches = lambda: read.append(following()) or read[-1]
    tokens = training.update()
    assert len(read) == 1 + 22 - math.log2(training.weights.scale.value) > 2
    assert tokens == sum(batch["ntokens"] for batches in read for batch in batches)
    assert training.updates == len(training.seconds) == 1


def test_what_cannot_resume_is_refused_in_words(folders, tmp_path):
    training = TrainingLoop(objective_of("masked", folders["masked"]), optimization_of(ADAM), tmp_path)
    training.save(with_optimizer=False)
    with pytest.raises(UserError, match="has no optimizer state"):
        TrainingLoop(training.objective, training.optimization, tmp_path)
    training.save()
    other = objective_of("masked", folders["masked"])
    other.network = Network(options_of_arch("bert_tiny", max_positions=64))
    with pytest.raises(UserError, match=" does not match the model; remove"):
        TrainingLoop(other, training.optimization, tmp_path)
    (tmp_path / CHECKPOINT).write_bytes(b"PK")
    with pytest.raises(UserError, match="truncated, damaged"):
        TrainingLoop(other, training.optimization, tmp_path)
