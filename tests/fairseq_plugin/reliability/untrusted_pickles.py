"""Files that make a folder when they are unpickled without protection, in every form that ``torch.load`` knows."""

import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


class MakesFolder:
    """Unpickled without protection it makes a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def _by_hand(folder: Path) -> bytes:
    return b"cposix\nmkdir\n(V" + str(folder).encode() + b"\ntR."


def _evaluated(folder: Path) -> bytes:
    return b"cbuiltins\neval\n(V__import__('os').mkdir('" + str(folder).encode() + b"')\ntR."


def _zip_with_another_pickle(path: Path, folder: Path) -> None:
    torch.save({"model": {}}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, _by_hand(folder) if name.endswith("data.pkl") else content)


def _legacy_tar(path: Path, folder: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            member.size = len(_by_hand(folder))
            archive.addfile(member, io.BytesIO(_by_hand(folder)))


def _torchscript(path: Path, folder: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path)


def _saved(wrap: Callable[[Any], Any], **options) -> Callable[[Path, Path], None]:
    return lambda path, folder: torch.save(wrap(MakesFolder(folder)), path, **options)


def _pickled(protocol: int) -> Callable[[Path, Path], None]:
    return lambda path, folder: path.write_bytes(pickle.dumps(MakesFolder(folder), protocol))


# name -> writes (a file, that makes a folder when it is unpickled)
UNTRUSTED: dict[str, Callable[[Path, Path], None]] = {
    **{f"pickle, protocol {protocol}": _pickled(protocol) for protocol in range(6)},
    "pickle by hand": lambda path, folder: path.write_bytes(_by_hand(folder)),
    "pickle that evaluates": lambda path, folder: path.write_bytes(_evaluated(folder)),
    "torch, whole": _saved(lambda trap: trap),
    "torch, in the weights": _saved(lambda trap: {"model": {"weight": trap}, "cfg": {}}),
    "torch, in the settings": _saved(lambda trap: {"model": {}, "cfg": {"model": trap}}),
    "torch, in an array of objects": _saved(lambda trap: {"model": np.array([trap], dtype=object)}),
    "torch before 1.6": _saved(lambda trap: {"model": trap}, _use_new_zipfile_serialization=False),
    "torch archive with another pickle": _zip_with_another_pickle,
    "torch's first format, a tar": _legacy_tar,
}
NO_CHECKPOINTS = {
    "TorchScript": _torchscript,
    "a list": lambda path, folder: torch.save([1, 2], path),
    "a number": lambda path, folder: torch.save(5, path),
    "an empty dictionary": lambda path, folder: torch.save({}, path),
    "random bytes": lambda path, folder: path.write_bytes(np.random.default_rng(1).bytes(5000)),
    "no bytes": lambda path, folder: path.write_bytes(b""),
}
