"""Task ``glue`` on small files of the official layout: what it loads, what it refuses, and a run that learns."""

import re

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks import setup_task
from fairseq.utils import apply_to_sample
from helpers import NAMES, THINGS, write_toy_glue

from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel
from lazyformer_fairseq.modules.networks.heads import ClassificationHead, LinearHead


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    """A folder of small tasks: the label of CoLA says whether a sentence starts with "the"."""
    return write_toy_glue(tmp_path_factory.mktemp("glue"))


@pytest.fixture
def config(glue, data_folder):
    """``config("CoLA", options ...)``: fairseq's configuration for a command line of that task."""

    def build(task, *arguments):
        command = [str(glue / task), "--task", "glue", "--criterion", "glue", "--arch", "bert_tiny", "--max-epoch", "1"]
        command += ["--optimizer", "fused_adam", "--lr-scheduler", "linear_warmup", "--batch-size", "16"]
        command += ["--tokenizer-folder", str(data_folder / "tokenizer"), *map(str, arguments)]
        parser = options.get_training_parser()
        return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, command))

    return build


def test_splits_of_the_folder_s_own_task(config):
    task = setup_task(config("CoLA").task)
    for split in ("train", "valid", "test"):
        task.load_dataset(split)
    assert task.description.name == "CoLA"
    assert [len(task.dataset(split)) for split in ("train", "valid", "test")] == [
        120,
        len(NAMES) * len(THINGS) - 120,
        1,
    ]
    assert task.dataset("train").targets.tolist() == [0, 1] * 60
    assert task.dataset("test").targets is None
    assert task.dataset("train")[1]["source"].tolist()[0] == task.source_dictionary.bos()


def test_scores_stay_exact_with_fp16(config):
    task = setup_task(config("STS-B").task)
    task.load_dataset("valid")
    batch = task.dataset("valid").collater([task.dataset("valid")[1]])
    in_half = apply_to_sample(lambda t: t.half() if t.dtype is torch.float32 else t, batch)  # as fairseq's trainer does
    assert in_half["target"].tolist() == [4.999]


def test_head_and_its_name(config):
    cfg = config("STS-B", "--glue-head-name", "similarity")
    model = setup_task(cfg.task).build_model(cfg.model)
    assert model.classification_heads["similarity"].out_proj.out_features == 1


@pytest.mark.parametrize(("given", "expected"), [([], ClassificationHead), (["--glue-head", "linear"], LinearHead)])
def test_the_kind_of_the_head(config, given, expected):
    cfg = config("STS-B", "--pooler-dropout", "0.1", *given)
    (head,) = setup_task(cfg.task).build_model(cfg.model).classification_heads.values()
    assert type(head) is expected
    assert head.dropout.p == 0.1


def test_tokenizer_is_found_beside_the_checkpoint(glue, config, data_folder, tmp_path):
    (tmp_path / "model.pt").touch()
    arguments = ["--tokenizer-folder", "", "--finetune-from-model", tmp_path / "model.pt"]
    with pytest.raises(UserError, match=re.escape(f"no tokenizer at {tmp_path}/tokenizer or {glue}/CoLA/tokenizer")):
        setup_task(config("CoLA", *arguments).task)
    Tokenizer.load(data_folder / "tokenizer").save(tmp_path / "tokenizer")
    task = setup_task(config("CoLA", *arguments).task)
    assert task.tokenizer_folder == tmp_path / "tokenizer"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--glue-task", "COCA"], "'COCA' is no GLUE task"),
        (["--best-checkpoint-metric", "f1"], "--best-checkpoint-metric f1: CoLA has loss, matthews, accuracy"),
        (["--best-checkpoint-metric", "matthews"], "add --maximize-best-checkpoint-metric"),
        (["--maximize-best-checkpoint-metric"], "drop --maximize-best-checkpoint-metric"),
        (["--valid-subset", "valid,test"], "split test has no labels"),
        (["--finetune-from-model", "nowhere.pt"], "nowhere.pt: no such file"),
        (["--tokenizer-folder", "nowhere"], "nowhere/tokenizer.json: cannot be read"),
    ],
)
def test_options_that_do_not_fit_are_refused_at_once(config, arguments, message):
    with pytest.raises(UserError, match=message):
        setup_task(config("CoLA", *arguments).task)


def test_a_missing_folder_is_refused(config):
    with pytest.raises(UserError, match="nowhere: no such folder"):
        setup_task(config("nowhere", "--glue-task", "MRPC").task)


def test_another_criterion_is_refused(config):
    cfg = config("CoLA", "--criterion", "cross_entropy")
    with pytest.raises(UserError, match="give --criterion glue"):
        setup_task(cfg.task).build_criterion(cfg.criterion)


def test_more_positions_than_the_model_has_are_refused(config):
    cfg = config("CoLA", "--tokens-per-sample", 512, "--max-positions", 64)
    with pytest.raises(UserError, match=r"--tokens-per-sample 512: the model has 64 positions"):
        setup_task(cfg.task).build_model(cfg.model)


@pytest.mark.parametrize(("options", "longest"), [((), 512), (("--tokens-per-sample", 8), 8)])
def test_inputs_are_cut_at_the_models_positions_or_shorter_by_option(config, options, longest):
    cfg = config("MRPC", *options)
    task = setup_task(cfg.task)
    task.build_model(cfg.model)
    task.load_dataset("train")
    assert task.max_positions() == longest
    assert task.dataset("train").sizes.max() <= longest
    assert longest == 512 or task.dataset("train").sizes.max() == longest


def test_it_learns_and_a_checkpoint_goes_on_to_another_task(glue, data_folder, fairseq_train, tmp_path):
    shared = "--criterion glue --arch bert_tiny --batch-size 16 --maximize-best-checkpoint-metric"
    state = fairseq_train(
        glue / "CoLA",
        f"{shared} --lr 0.003 --max-epoch 6 --best-checkpoint-metric matthews",
        tmp_path / "cola",
        task=f"glue --tokenizer-folder {data_folder / 'tokenizer'}",
    )
    assert state["extra_state"]["best"] > 0.9
    hub = LazyFormerModel.from_pretrained(str(tmp_path / "cola"))
    logits = hub.predict("cola", "the anna sees the river", "anna sees the river")
    assert logits.argmax(dim=1).tolist() == [1, 0]

    state = fairseq_train(
        glue / "STS-B",
        f"{shared} --max-epoch 1 --best-checkpoint-metric pearson "
        f"--finetune-from-model {tmp_path / 'cola' / 'checkpoint_best.pt'}",
        tmp_path / "sts-b",
        task="glue",
    )
    heads = {name.split(".")[1] for name in state["model"] if name.startswith("classification_heads")}
    assert heads == {"sts-b"}
    assert torch.isfinite(torch.tensor(state["extra_state"]["best"]))
