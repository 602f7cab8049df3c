"""Whatever is given for a checkpoint, nothing of it is run: each form of file at each entry."""

import ast
import logging
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import fairseq
import pytest
import torch
from fairseq import checkpoint_utils, hub_utils
from fairseq_plugin.reliability.untrusted_pickles import NO_CHECKPOINTS, UNTRUSTED
from helpers import write_toy_glue
from omegaconf import OmegaConf

from lazyformer_fairseq import LazyFormerModel
from lazyformer_fairseq.data.glue import TASKS
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.training import STATE, load_state
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import UNSAFE_LOADS, read_setting
from lazyformer_fairseq.fairseq_plugin.reliability.command_line import find_user_error
from lazyformer_fairseq.fairseq_plugin.replacements import EVALUATING_MODULES
from lazyformer_fairseq.finetuning.grid import load_start_models
from lazyformer_fairseq.finetuning.tasks.glue import load_finetuned
from lazyformer_fairseq.language_modeling.evaluate import load_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
    pytest.mark.filterwarnings("ignore:.*torch[.]?jit|.*TorchScript"),
    pytest.mark.filterwarnings("ignore:invalid escape sequence"),
]
TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4"


@pytest.fixture
def victim(tmp_path) -> Path:
    """What an untrusted file would make."""
    return tmp_path / "made by the file"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def trained(data_folder, run_folder, fairseq_train) -> Path:
    """A folder with a checkpoint of one update."""
    if not (run_folder / "checkpoint_last.pt").exists():
        fairseq_train(data_folder, f"{TINY} --max-update 1 --disable-validation", run_folder)
    return run_folder


def refusal(run: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:
        run()
    error = find_user_error(caught.value)
    assert isinstance(error, UserError), repr(caught.value)
    return str(error)


@pytest.mark.parametrize("form", UNTRUSTED)
def test_every_form_of_pickle_is_refused_and_runs_nothing(form, tmp_path, victim):
    UNTRUSTED[form](tmp_path / "checkpoint.pt", victim)
    message = refusal(lambda: checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint.pt")))
    assert str(tmp_path / "checkpoint.pt") in message
    assert not victim.exists()
    assert "weights_only" not in message, "do not teach to switch the protection off"


@pytest.mark.parametrize("form", ["pickle, protocol 0", "pickle by hand", "pickle that evaluates", "torch, whole"])
def test_the_traps_of_these_tests_work(form, tmp_path, victim):
    path = tmp_path / "checkpoint.pt"
    UNTRUSTED[form](path, victim)
    torch.load(path, weights_only=False) if "torch" in form else pickle.loads(path.read_bytes())
    assert victim.exists()


@pytest.mark.parametrize("form", NO_CHECKPOINTS)
def test_what_is_no_checkpoint_is_named(form, tmp_path, victim):
    NO_CHECKPOINTS[form](tmp_path / "checkpoint.pt", victim)
    assert "checkpoint.pt: " in refusal(
        lambda: checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint.pt"))
    )


@pytest.mark.slow
def test_every_entry_refuses(tmp_path, victim, trained, data_folder, fairseq_train):
    """To resume, to start from, to use, to fine-tune, to predict, to evaluate, to go on with a search."""
    folder = tmp_path / "folder"
    shutil.copytree(trained / "tokenizer", folder / "tokenizer")
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "model.pt", STATE):
        UNTRUSTED["torch, in the weights"](folder / name, victim)
    glue_data = write_toy_glue(tmp_path / "glue", train=4, valid=4)
    evil = folder / "model.pt"
    entries = [
        lambda: fairseq_train(data_folder, f"{TINY} --max-update 2 --restore-file {evil}", tmp_path / "restored"),
        lambda: fairseq_train(data_folder, f"{TINY} --max-update 2 --finetune-from-model {evil}", tmp_path / "tuned"),
        lambda: fairseq_train(data_folder, f"{TINY} --max-update 2", folder),
        lambda: fairseq_train(
            glue_data / "CoLA",
            f"--arch lazyformer_m2x6_s_tiny --criterion glue --batch-size 4 --finetune-from-model {evil}",
            tmp_path / "cola",
            task="glue",
        ),
        lambda: LazyFormerModel.from_pretrained(folder),
        lambda: LazyFormerModel.from_pretrained(folder, "model.pt"),
        lambda: hub_utils.from_pretrained(str(folder), "model.pt", str(data_folder)),
        lambda: load_start_models({"evil": evil}, trained / "tokenizer"),
        lambda: load_finetuned(TASKS["CoLA"], folder, glue_data / "CoLA", trained / "tokenizer"),
        lambda: load_model(evil, data_folder),
        lambda: checkpoint_utils.load_model_ensemble([str(evil)]),
        lambda: load_state(folder / STATE),
    ]
    for entry in entries:
        refusal(entry)
        assert not victim.exists()


def test_torchs_switch_for_unsafe_loads_is_taken_back(monkeypatch, caplog, tmp_path, victim):
    UNTRUSTED["torch, whole"](tmp_path / "checkpoint.pt", victim)
    monkeypatch.setenv(UNSAFE_LOADS, "1")
    with caplog.at_level(logging.WARNING):
        refusal(lambda: checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint.pt")))
    assert not victim.exists()
    assert f"{UNSAFE_LOADS} is set, and taken back" in caplog.text


def code(victim: Path) -> str:
    return f"__import__('os').mkdir({str(victim)!r})"


def test_settings_of_a_checkpoint_are_not_run(trained, tmp_path, victim):
    """A checkpoint of plain settings can name a model of fairseq's that runs a setting by eval()."""
    state = torch.load(trained / "checkpoint_last.pt")
    state["cfg"]["model"] = {"_name": "fconv_lm", "arch": "fconv_lm", "decoder_layers": code(victim)}
    torch.save(state, tmp_path / "checkpoint.pt")
    message = refusal(lambda: checkpoint_utils.load_model_ensemble([str(tmp_path / "checkpoint.pt")]))
    assert "mkdir" in message and "nothing of it was run" in message
    assert not victim.exists()


def test_fairseqs_own_evaluation_of_settings_is_ours(victim):
    from fairseq import utils
    from fairseq.models.fconv_lm import FConvLanguageModel

    assert utils.eval_str_list("[0.5, 1]") == [0.5, 1.0] and utils.eval_bool("False") is False
    for run in (
        lambda: utils.eval_str_list(code(victim)),
        lambda: utils.eval_bool(code(victim)),
        lambda: FConvLanguageModel.build_model(
            OmegaConf.create({"decoder_layers": code(victim), "decoder_attention": "False", "tokens_per_sample": 4}),
            type("Task", (), {"target_dictionary": [], "source_dictionary": []}),
        ),
    ):
        assert "nothing of it was run" in refusal(run)
    assert not victim.exists()
    eval(code(victim))
    assert victim.exists(), "the trap of this test does not work"


def test_every_module_of_fairseq_that_evaluates_is_listed():
    """A new version of fairseq may have more of them."""
    root = Path(fairseq.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        source = path.read_text()
        if "examples" not in path.relative_to(root).parts and re.search(r"\b(eval|exec)\(", source):
            calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
            if any(isinstance(function, ast.Name) and function.id in ("eval", "exec") for function in calls):
                found.add(".".join(path.relative_to(root.parent).with_suffix("").parts))
    assert found == set(EVALUATING_MODULES)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[(512, 3), (512, 2)]", [(512, 3), (512, 2)]),
        ("(0.9, 0.999)", (0.9, 0.999)),
        ("{'a': -1e3, \"b\": None}", {"a": -1000.0, "b": None}),
        (" True ", True),
        ("'it''s'", "its"),
        ("[]", []),
    ],
)
def test_settings_are_values(text, value):
    assert read_setting(text) == value == eval(text.strip())


@pytest.mark.parametrize(
    "text",
    [
        *("print(1)", "().__class__", "lambda: 1", "[x for x in (1,)]", "f'{1}'", "(x := 1)", "open", "a[0]", "{**{}}"),
        *("1 if 1 else 2", "[0] * 99999999", "1 / 0", "[] + 1", "", "(", "{[]: 1}"),
        *("\0", "(" * 5000, "-" * 100_000 + "1", "1" * 2_000_000),
    ],
)
def test_settings_that_are_no_values_are_refused(text):
    with pytest.raises(UserError, match="refused, nothing of it was run"):
        read_setting(text)
