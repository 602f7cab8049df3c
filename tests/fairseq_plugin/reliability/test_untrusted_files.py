"""Dictionaries, tokenizers, data, archives and manifests of somebody else: nothing is run, nothing is followed."""

import bz2
import gzip
import hashlib
import json
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import zstandard
from fairseq import file_utils, hub_utils
from fairseq_plugin.reliability.test_untrusted_checkpoints import UNTRUSTED

from lazyformer_fairseq.corpus.readers import files
from lazyformer_fairseq.corpus.readers.files import BadInput, Piece
from lazyformer_fairseq.corpus.readers.formats import read_piece
from lazyformer_fairseq.corpus.readers.inputs import find_inputs
from lazyformer_fairseq.data.prepared_folder import PreparedTask
from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.indexed_format import check_items, read_index

PICKLES = ("pickle, protocol 0", "pickle, protocol 4", "pickle that evaluates", "torch, whole")


@pytest.fixture
def victim(tmp_path) -> Path:
    """What an untrusted file would make."""
    return tmp_path / "made by the file"


@pytest.mark.parametrize("form", PICKLES)
@pytest.mark.parametrize("name", ["sentencepiece.model", "dict.txt", "tokenizer.json"])
def test_a_pickle_in_a_tokenizer_or_as_dictionary(form, name, tmp_path, victim, data_folder):
    folder = Path(shutil.copytree(data_folder / "tokenizer", tmp_path / "tokenizer"))
    description = json.loads((folder / "tokenizer.json").read_text())
    UNTRUSTED[form](folder / name, victim)
    for forged in (False, True):
        if forged and name in description["sha256"]:
            description["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            (folder / "tokenizer.json").write_text(json.dumps(description))
        with pytest.raises(UserError, match=name):
            Tokenizer.load(folder)
    if name == "dict.txt":
        with pytest.raises(UserError, match="dict.txt.*: not a dictionary"):
            load_dictionary(folder / name)
    assert not victim.exists()


@pytest.mark.parametrize("form", PICKLES)
@pytest.mark.parametrize("name", ["train.idx", "train.bin"])
def test_a_pickle_as_binarised_data(form, name, tmp_path, victim, data_folder):
    shutil.copytree(data_folder / "shard0", tmp_path, dirs_exist_ok=True)
    UNTRUSTED[form](tmp_path / name, victim)
    with pytest.raises(UserError, match=name):
        check_items(tmp_path / "train", 160, 2)
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
        **{"splits": {"train": {"rows": rows, "bytes": (folder / "train.bin").stat().st_size}}},
    }
    manifest["splits"] |= splits or {}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_labels_that_are_a_pickle(tmp_path, victim, data_folder):
    folder = write_prepared(tmp_path / "CoLA", data_folder)
    assert len(PreparedTask.load(folder).read("train", None, 2).inputs) > 0
    targets = np.load(folder / "targets.train.npy").astype(object)
    np.save(folder / "targets.train.npy", targets, allow_pickle=True)
    with pytest.raises(UserError, match="damaged.*allow_pickle=False"):
        PreparedTask.load(folder).read("train", None, 2)
    UNTRUSTED["pickle that evaluates"](folder / "targets.train.npy", victim)
    with pytest.raises(UserError, match="damaged"):
        PreparedTask.load(folder).read("train", None, 2)
    assert not victim.exists()


def test_a_manifest_that_points_out_of_its_folder(tmp_path, data_folder):
    for number, name in enumerate(("../train", "/etc/train", "a/../../train", "")):
        folder = write_prepared(tmp_path / str(number), data_folder, splits={name: {"rows": 1, "bytes": 2}})
        with pytest.raises(UserError, match="manifest.json: damaged"):
            PreparedTask.load(folder)


def test_a_model_in_an_archive_is_refused(tmp_path):
    """fairseq would unpack links and absolute names as they stand, and move what they name."""
    outside, archive = tmp_path / "outside.pt", tmp_path / "model.tar.gz"
    outside.write_bytes(b"mine")
    with tarfile.open(archive, "w:gz") as content:
        content.addfile(tarfile.TarInfo(str(outside)))
    before = sorted(tmp_path.rglob("*"))
    for load in (file_utils.load_archive_file, lambda path: hub_utils.from_pretrained(path, "model.pt")):
        with pytest.raises(UserError, match="refused, nothing of it was unpacked"):
            load(str(archive))
    assert sorted(tmp_path.rglob("*")) == before and outside.read_bytes() == b"mine"
    assert file_utils.load_archive_file(str(tmp_path)) == str(tmp_path), "a folder is left alone"
    assert file_utils.load_archive_file(str(tmp_path / "missing")) is None


PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "zst": zstandard.compress}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("format", ["text", "book"])
def test_a_compressed_bomb_is_refused_before_it_fills_the_memory(kind, format, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BEYOND_BYTES", 1 << 20)
    monkeypatch.setattr(files, "MOST_AT_ONCE", 1 << 18)
    monkeypatch.setattr(files, "CHUNK", dict.fromkeys(PACKERS, 256))
    path = tmp_path / f"bomb.txt.{kind}"
    path.write_bytes(PACKERS[kind](b"a" * (1 << 24)))
    with files.open_decompressed(path) as file, pytest.raises(BadInput, match="200 times their size"):
        file.read()
    assert file.raw._unpacked < 1 << 24, "it stopped on the way"
    with pytest.raises(BadInput, match="200 times their size"):
        list(read_piece(Piece(str(path), format)))


def test_bz2_in_parts_is_read_as_a_whole(tmp_path, monkeypatch):
    """A decompressor may hold more than it gives at once; streams follow each other in one file."""
    monkeypatch.setattr(files, "MOST_AT_ONCE", 1000)
    content = np.random.default_rng(1).bytes(3000) + b"text\n" * 20_000
    path = tmp_path / "text.bz2"
    path.write_bytes(bz2.compress(content) + bz2.compress(b"more\n") + b"\0" * 10)
    with files.open_decompressed(path) as file:
        assert file.read() == content + b"more\n"
    path.write_bytes(bz2.compress(content)[:-4])
    with files.open_decompressed(path) as file, pytest.raises(BadInput, match="not whole"):
        file.read()


def test_a_pipe_or_a_device_is_no_input(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    for path in (str(tmp_path / "pipe.txt"), "/dev/zero"):
        with pytest.raises(UserError, match="a device or a pipe"):
            find_inputs([path])
    (tmp_path / "text.txt").write_text("A text.")
    assert [Path(file.path).name for file in find_inputs([str(tmp_path)])] == ["text.txt"]


def test_a_dump_with_entities_of_its_own_is_refused(tmp_path):
    """A page is parsed alone, so that a document type, the only place of entities, is malformed there."""
    path, ending = tmp_path / "dump.xml", "</page>\n</mediawiki>\n"
    for page in ('<page><!DOCTYPE page [<!ENTITY a "aaa">]><title>T</title>', "<page>"):
        path.write_text(f'<!DOCTYPE m [<!ENTITY a "aaa">]>\n<mediawiki>\n{page}<text>&a;</text>{ending}')
        with pytest.raises(BadInput, match="malformed XML"):
            list(read_piece(Piece(str(path), "mediawiki")))
