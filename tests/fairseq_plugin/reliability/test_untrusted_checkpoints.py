"""Whatever is given for a checkpoint, nothing of it is run: each form of file at each entry."""

import ast
import io
import os
import pickle
import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fairseq
import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, hub_utils
from fairseq_plugin.reliability.damage import TINY
from helpers import message_of, write_toy_glue
from omegaconf import OmegaConf

from lazyformer_fairseq import LazyFormerModel
from lazyformer_fairseq.data.glue import TASKS
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.training import STATE, load_state
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import UNSAFE_LOADS, read_setting
from lazyformer_fairseq.fairseq_plugin.replacements import EVALUATING_MODULES
from lazyformer_fairseq.finetuning.grid import load_start_models
from lazyformer_fairseq.finetuning.tasks.glue import load_finetuned
from lazyformer_fairseq.language_modeling.evaluate import load_model

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol", "ignore:invalid escape sequence")


class MakesFolder:
    """Unpickled without protection it makes a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def by_hand(folder: Path) -> bytes:
    return b"cposix\nmkdir\n(V" + str(folder).encode() + b"\ntR."


def zip_with_another_pickle(path: Path, folder: Path) -> None:
    torch.save({"model": {}}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, by_hand(folder) if name.endswith("data.pkl") else content)


def legacy_tar(path: Path, folder: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            member.size = len(by_hand(folder))
            archive.addfile(member, io.BytesIO(by_hand(folder)))


def saved(wrap: Callable[[Any], Any], **options) -> Callable[[Path, Path], None]:
    return lambda path, folder: torch.save(wrap(MakesFolder(folder)), path, **options)


def code(victim: Path) -> str:
    return f"__import__('os').mkdir({str(victim)!r})"


# Every form that ``torch.load`` knows: name -> writes (a file, that makes a folder when it is unpickled)
UNTRUSTED: dict[str, Callable[[Path, Path], object]] = {
    **{
        f"pickle, protocol {protocol}": lambda path, folder, protocol=protocol: path.write_bytes(
            pickle.dumps(MakesFolder(folder), protocol)
        )
        for protocol in range(6)
    },
    "pickle by hand": lambda path, folder: path.write_bytes(by_hand(folder)),
    "pickle that evaluates": lambda path, folder: path.write_bytes(
        b"cbuiltins\neval\n(V" + code(folder).encode() + b"\ntR."
    ),
    "torch, whole": saved(lambda trap: trap),
    "torch, in the weights": saved(lambda trap: {"model": {"weight": trap}, "cfg": {}}),
    "torch, in the settings": saved(lambda trap: {"model": {}, "cfg": {"model": trap}}),
    "torch, in an array of objects": saved(lambda trap: {"model": np.array([trap], dtype=object)}),
    "torch before 1.6": saved(lambda trap: {"model": trap}, _use_new_zipfile_serialization=False),
    "torch archive with another pickle": zip_with_another_pickle,
    "torch's first format, a tar": legacy_tar,
}


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


@pytest.mark.parametrize("form", UNTRUSTED)
def test_every_form_of_pickle_is_refused_and_runs_nothing(form, tmp_path, victim, monkeypatch, caplog):
    path = tmp_path / "checkpoint.pt"
    UNTRUSTED[form](path, victim)
    message = message_of(checkpoint_utils.load_checkpoint_to_cpu, str(path))
    assert str(path) in message
    assert "weights_only" not in message, "do not teach to switch the protection off"
    monkeypatch.setenv(UNSAFE_LOADS, "1")
    message_of(checkpoint_utils.load_checkpoint_to_cpu, str(path))
    assert f"{UNSAFE_LOADS} is set, and taken back" in caplog.text
    assert not victim.exists()
    if form in ("pickle, protocol 0", "pickle by hand", "pickle that evaluates", "torch, whole"):
        torch.load(path, weights_only=False) if "torch" in form else pickle.loads(path.read_bytes())
        assert victim.exists(), "the trap of this test does not work"


@pytest.mark.slow
def test_every_entry_refuses(tmp_path, victim, trained, data_folder, fairseq_train):
    """To resume, to start from, to use, to fine-tune, to predict, to evaluate, to go on with a search."""
    folder, tokenizer = tmp_path / "folder", trained / "tokenizer"
    shutil.copytree(tokenizer, folder / "tokenizer")
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "model.pt", STATE):
        UNTRUSTED["torch, in the weights"](folder / name, victim)
    cola = write_toy_glue(tmp_path / "glue", train=4, valid=4) / "CoLA"
    evil = folder / "model.pt"
    train = f"{TINY} --max-update 2"
    tuning = f"--arch lazyformer_m2x6_s_tiny --criterion glue --batch-size 4 --finetune-from-model {evil}"
    for entry in (
        lambda: fairseq_train(data_folder, f"{train} --restore-file {evil}", tmp_path / "restored"),
        lambda: fairseq_train(data_folder, f"{train} --finetune-from-model {evil}", tmp_path / "tuned"),
        lambda: fairseq_train(data_folder, train, folder),
        lambda: fairseq_train(cola, tuning, tmp_path / "cola", task="glue"),
        lambda: LazyFormerModel.from_pretrained(folder),
        lambda: LazyFormerModel.from_pretrained(folder, "model.pt"),
        lambda: hub_utils.from_pretrained(str(folder), "model.pt", str(data_folder)),
        lambda: load_start_models({"evil": evil}, tokenizer),
        lambda: load_finetuned(TASKS["CoLA"], folder, cola, tokenizer),
        lambda: load_model(evil, data_folder),
        lambda: checkpoint_utils.load_model_ensemble([str(evil)]),
        lambda: load_state(folder / STATE),
    ):
        message_of(entry)
        assert not victim.exists()


def test_settings_of_a_checkpoint_are_not_run(trained, tmp_path, victim):
    """A checkpoint of plain settings can name a model of fairseq's that runs a setting by eval()."""
    state = torch.load(trained / "checkpoint_last.pt")
    state["cfg"]["model"] = {"_name": "fconv_lm", "arch": "fconv_lm", "decoder_layers": code(victim)}
    torch.save(state, tmp_path / "checkpoint.pt")
    message = message_of(lambda: checkpoint_utils.load_model_ensemble([str(tmp_path / "checkpoint.pt")]))
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
        assert "nothing of it was run" in message_of(run)
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


def test_settings_are_values_or_refused():
    for text, value in (
        *(("[(512, 3), (512, 2)]", [(512, 3), (512, 2)]), ("(0.9, 0.999)", (0.9, 0.999)), (" True ", True)),
        *(("{'a': -1e3, \"b\": None}", {"a": -1000.0, "b": None}), ("'it''s'", "its"), ("[]", [])),
    ):
        assert read_setting(text) == value == eval(text.strip())
    for text in (
        *("print(1)", "().__class__", "lambda: 1", "[x for x in (1,)]", "f'{1}'", "(x := 1)", "open", "a[0]", "{**{}}"),
        *("1 if 1 else 2", "[0] * 99999999", "1 / 0", "[] + 1", "", "(", "{[]: 1}"),
        *("\0", "(" * 5000, "-" * 100_000 + "1", "1" * 2_000_000),
    ):
        with pytest.raises(UserError, match="refused, nothing of it was run"):
            read_setting(text)
