"""Files of somebody else at each entry: nothing of them is run, nothing is followed."""

import ast
import bz2
import gzip
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fairseq
import numpy as np
import pytest
import torch
import zstandard
from fairseq import checkpoint_utils, file_utils, hub_utils
from fairseq_plugin.reliability.damage import TINY
from helpers import ROOT, message_of, mostly_slow, write_toy_glue

from lazyformer_fairseq import LazyFormerModel
from lazyformer_fairseq.corpus.readers import files
from lazyformer_fairseq.corpus.readers.files import BadInputError, Piece
from lazyformer_fairseq.corpus.readers.formats import read_piece
from lazyformer_fairseq.data.glue import TASKS
from lazyformer_fairseq.data.prepared_folder import PreparedTask
from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.material import SearchContext
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.training import SupernetOptimization
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import read_setting
from lazyformer_fairseq.fairseq_plugin.replacements import EVALUATING_MODULES
from lazyformer_fairseq.finetuning.grid import load_start_models
from lazyformer_fairseq.finetuning.settings import PredictSettings
from lazyformer_fairseq.finetuning.tasks.glue import predict_task
from lazyformer_fairseq.language_modeling.evaluate import load_model
from lazyformer_fairseq.storage.checkpoint_file import UNSAFE_LOADS
from lazyformer_fairseq.storage.indexed_format import check_items, read_index
from lazyformer_fairseq.training.loop import TrainingLoop

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

PICKLES = ("pickle, protocol 0", "pickle, protocol 4", "pickle that evaluates", "torch, whole")


@pytest.fixture
def victim(tmp_path) -> Path:
    """What an untrusted file would make."""
    return tmp_path / "made by the file"


@pytest.mark.parametrize("form", UNTRUSTED)
def test_every_form_of_pickle_is_refused_and_runs_nothing(form, tmp_path, victim, monkeypatch, caplog):
    path = tmp_path / "checkpoint.pt"
    UNTRUSTED[form](path, victim)
    message = message_of(checkpoint_utils.load_checkpoint_to_cpu, str(path))
    assert str(path) in message
    assert "weights_only" not in message, "do not teach to switch the protection off"
    monkeypatch.setenv(UNSAFE_LOADS, "1")
    message_of(checkpoint_utils.load_checkpoint_to_cpu, str(path))
    assert f"{UNSAFE_LOADS} was set and has been removed" in caplog.text
    assert not victim.exists()
    if form in PICKLES or form == "pickle by hand":
        torch.load(path, weights_only=False) if "torch" in form else pickle.loads(path.read_bytes())
        assert victim.exists(), "the trap of this test does not work"


@pytest.mark.slow
def test_every_entry_refuses(tmp_path, victim, trained, data_folder, fairseq_train):
    """To resume, to start from, to use, to fine-tune, to predict, to evaluate, to go on with a search."""
    folder, tokenizer = tmp_path / "folder", trained / "tokenizer"
    shutil.copytree(tokenizer, folder / "tokenizer")
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "model.pt"):
        UNTRUSTED["torch, in the weights"](folder / name, victim)
    cola = write_toy_glue(tmp_path / "glue", train=4, valid=4) / "CoLA"
    evil = folder / "model.pt"
    train = f"{TINY} --max-update 2"
    tuning = f"--arch lazyformer_m2x6_s_tiny --criterion glue --batch-size 4 --finetune-from-model {evil}"
    search = SearchContext(SearchSettings(str(data_folder), "masked-lm", "bert_tiny", "sf", batch_size=2))
    for entry in (
        lambda: fairseq_train(data_folder, f"{train} --restore-file {evil}", tmp_path / "restored"),
        lambda: fairseq_train(data_folder, f"{train} --finetune-from-model {evil}", tmp_path / "tuned"),
        lambda: fairseq_train(data_folder, train, folder),
        lambda: fairseq_train(cola, tuning, tmp_path / "cola", task="glue"),
        lambda: LazyFormerModel.from_pretrained(folder),
        lambda: LazyFormerModel.from_pretrained(folder / "model.pt"),
        lambda: hub_utils.from_pretrained(str(folder), "model.pt", str(data_folder)),
        lambda: load_start_models({"evil": evil}, tokenizer),
        lambda: predict_task(TASKS["CoLA"], folder, cola, folder, PredictSettings(tokenizer=tokenizer)),
        lambda: load_model(evil, data_folder),
        lambda: checkpoint_utils.load_model_ensemble([str(evil)]),
        lambda: TrainingLoop(search.supernet_objective(), SupernetOptimization.of(search.settings), folder),
    ):
        assert "refused without running any code in it" in message_of(entry)
        assert not victim.exists()


def test_settings_of_a_checkpoint_are_not_run(trained, tmp_path, victim):
    """A checkpoint of plain settings can name a model of fairseq's that runs a setting by eval()."""
    state = torch.load(trained / "checkpoint_last.pt")
    state["cfg"]["model"] = {"_name": "fconv_lm", "arch": "fconv_lm", "decoder_layers": code(victim)}
    torch.save(state, tmp_path / "checkpoint.pt")
    message = message_of(lambda: checkpoint_utils.load_model_ensemble([str(tmp_path / "checkpoint.pt")]))
    assert "mkdir" in message and "refused without running it" in message
    assert not victim.exists()


@pytest.mark.parametrize("entry", mostly_slow(["load_model_ensemble", "fairseq-eval-lm"], "load_model_ensemble"))
def test_fairseqs_own_entries_run_nothing_in_a_fresh_process(entry, trained, lm_data, tmp_path, victim, warm_python):
    """Of a stock task and a stock model, where no run of ours ever starts; whatever the environment allows."""
    state = torch.load(trained / "checkpoint_last.pt")
    names = {"task": "language_modeling", "model": "fconv_lm"}
    settings = {of: {"_name": name, "arch": name, "task": name, "tokens_per_sample": 8} for of, name in names.items()}
    settings["task"]["data"], settings["model"]["decoder_layers"] = str(lm_data), code(victim)
    torch.save({**state, "cfg": {**state["cfg"], **settings}}, tmp_path / "settings.pt")
    UNTRUSTED["torch, in the weights"](tmp_path / "pickle.pt", victim)
    program = (
        "import sys, lazyformer_fairseq\nfrom fairseq import checkpoint_utils as c\nc.load_model_ensemble(sys.argv[1:])"
    )
    words = ["-c", program]
    if entry == "fairseq-eval-lm":
        words = ["-m", "fairseq_cli.eval_lm", lm_data, "--user-dir", ROOT / "lazyformer_fairseq", "--cpu", "--path"]
    for evil in ("settings.pt", "pickle.pt"):
        command = [warm_python / "python", *words, tmp_path / evil]
        run = subprocess.run(command, env=os.environ | {UNSAFE_LOADS: "1"}, capture_output=True, text=True)
        assert run.returncode and "refused" in run.stderr, run.stdout + run.stderr
        assert not victim.exists()


def test_fairseqs_own_evaluation_of_settings_is_ours(victim):
    from fairseq import utils

    assert utils.eval_str_list("[0.5, 1]") == [0.5, 1.0] and utils.eval_bool("False") is False
    for run in (
        lambda: utils.eval_str_list(code(victim)),
        lambda: utils.eval_bool(code(victim)),
    ):
        assert "refused without running it" in message_of(run)
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
        *(("[(1268, 4)] + [(1268, 4)] * 2", [(1268, 4)] * 3), ("2 * (1,) + (3,)", (1, 1, 3))),
        *(("{'a': -1e3, \"b\": None}", {"a": -1000.0, "b": None}), ("'it''s'", "its"), ("[]", [])),
    ):
        assert read_setting(text) == value == eval(text.strip())
    for text in (
        *("print(1)", "().__class__", "lambda: 1", "[x for x in (1,)]", "f'{1}'", "(x := 1)", "open", "a[0]", "{**{}}"),
        *("1 if 1 else 2", "[0] * 99999999", "1 / 0", "[] + 1", "", "(", "{[]: 1}"),
        *("\0", "(" * 5000, "-" * 100_000 + "1", "1" * 2_000_000),
    ):
        with pytest.raises(UserError, match="refused without running it"):
            read_setting(text)


@pytest.mark.parametrize("form", PICKLES)
@pytest.mark.parametrize("name", ["sentencepiece.model", "dict.txt", "tokenizer.json", "train.idx", "train.bin"])
def test_a_pickle_in_a_tokenizer_as_dictionary_or_as_binarised_data(form, name, tmp_path, victim, data_folder):
    for source in ("shard0", "tokenizer"):
        shutil.copytree(data_folder / source, tmp_path, dirs_exist_ok=True)
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    UNTRUSTED[form](tmp_path / name, victim)
    for forged in (False, True):
        if forged and name in description["sha256"]:
            description["sha256"][name] = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
            (tmp_path / "tokenizer.json").write_text(json.dumps(description))
        with pytest.raises(UserError, match=name):
            check_items(tmp_path / "train", 160, 2) if "train" in name else Tokenizer.load(tmp_path)
    if name == "dict.txt":
        with pytest.raises(UserError, match="dict.txt.*: (not a dictionary|not UTF-8 text|the line is malformed)"):
            load_dictionary(tmp_path / name)
    assert not victim.exists()


def write_prepared(folder: Path, data: Path, splits: dict | None = None) -> Path:
    """A prepared GLUE task whose inputs are the items of binarised data."""
    folder.mkdir()
    for ending in (".bin", ".idx"):
        shutil.copy(data / "shard0" / f"valid{ending}", folder / f"train{ending}")
    rows = len(read_index(folder / "train").sizes)
    np.save(folder / "targets.train.npy", np.zeros(rows, dtype=np.int64))
    manifest = {
        **{"format": "lazyformer glue task", "format_version": 1, "task": "CoLA", "max_length": 64, "tokenizer": {}},
        **{"files": {"train.tsv": {"sha256": "0", "rows": 1}}},
        **{"splits": {"train": {"rows": rows, "bytes": (folder / "train.bin").stat().st_size, "kept_tokens": 9}}},
    }
    manifest["splits"] |= splits or {}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_labels_that_are_a_pickle_and_a_manifest_that_points_out_of_its_folder(tmp_path, victim, data_folder):
    folder = write_prepared(tmp_path / "CoLA", data_folder)
    assert len(PreparedTask.load(folder).read("train", None, 2).inputs) > 0
    targets = np.load(folder / "targets.train.npy").astype(object)
    np.save(folder / "targets.train.npy", targets, allow_pickle=True)
    with pytest.raises(UserError, match="damaged.*cannot be read as an array [(].*Python objects"):
        PreparedTask.load(folder).read("train", None, 2)
    UNTRUSTED["pickle that evaluates"](folder / "targets.train.npy", victim)
    with pytest.raises(UserError, match="damaged"):
        PreparedTask.load(folder).read("train", None, 2)
    assert not victim.exists()
    for number, name in enumerate(("../train", "/etc/train", "a/../../train", "")):
        folder = write_prepared(tmp_path / str(number), data_folder, splits={name: {"rows": 1, "bytes": 2}})
        with pytest.raises(UserError, match="manifest.json: the manifest is damaged"):
            PreparedTask.load(folder)


def test_a_model_in_an_archive_is_refused(tmp_path):
    """fairseq would unpack links and absolute names as they stand, and move what they name."""
    outside, archive = tmp_path / "outside.pt", tmp_path / "model.tar.gz"
    outside.write_bytes(b"mine")
    with tarfile.open(archive, "w:gz") as content:
        content.addfile(tarfile.TarInfo(str(outside)))
    before = sorted(tmp_path.rglob("*"))
    for load in (file_utils.load_archive_file, lambda path: hub_utils.from_pretrained(path, "model.pt")):
        with pytest.raises(UserError, match="refused without being unpacked"):
            load(str(archive))
    assert sorted(tmp_path.rglob("*")) == before and outside.read_bytes() == b"mine"
    assert file_utils.load_archive_file(str(tmp_path)) == str(tmp_path), "a folder is left alone"
    assert file_utils.load_archive_file(str(tmp_path / "missing")) is None


PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "zst": zstandard.compress}


@pytest.mark.slow
@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("format", ["text", "book"])
def test_a_compressed_bomb_is_refused_before_it_fills_the_memory(ending, format, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BEYOND_BYTES", 1 << 20)
    monkeypatch.setattr(files, "MOST_AT_ONCE", 1 << 18)
    monkeypatch.setattr(files, "CHUNK", 256)
    path = tmp_path / f"bomb.txt.{ending}"
    path.write_bytes(PACKERS[ending](b"a" * (1 << 24)))
    with files.open_decompressed(path) as file, pytest.raises(BadInputError, match="50 times its size"):
        file.read()
    assert file.raw._unpacked < 1 << 24, "it stopped on the way"
    with pytest.raises(BadInputError, match="50 times its size"):
        list(read_piece(Piece(str(path), format)))


def test_a_dump_with_entities_of_its_own_is_refused(tmp_path):
    """A page is parsed alone, so that a document type, the only place of entities, is malformed there."""
    path, ending = tmp_path / "dump.xml", "</page>\n</mediawiki>\n"
    for page in ('<page><!DOCTYPE page [<!ENTITY a "aaa">]><title>T</title>', "<page>"):
        path.write_text(f'<!DOCTYPE m [<!ENTITY a "aaa">]>\n<mediawiki>\n{page}<text>&a;</text>{ending}')
        with pytest.raises(BadInputError, match="malformed XML"):
            list(read_piece(Piece(str(path), "mediawiki")))
