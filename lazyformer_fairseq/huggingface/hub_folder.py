"""The weights in a model's folder, as the Hub has it.

Nothing in it is run, nothing outside it is read by its names.

FOLDER/model.safetensors             or pytorch_model.bin, which is read as weights alone
FOLDER/model.safetensors.index.json  or pytorch_model.bin.index.json: which of several files holds which weight
"""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_files import check
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_loading import (
    SAFETENSORS,
    forbid_unsafe_loads,
    named_errors,
)
from lazyformer_fairseq.huggingface.families import read_json_object

SAFE_FILE, PICKLED_FILE = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
NUMBERS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WHOLE_NUMBERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")  # of buffers


class Weights:
    """A folder's weights by name; each is read when it is asked for.

    Attributes:
        folder: for messages.
        shapes: of all.

    Raises:
        UserError: a file is missing, damaged, holds more than weights, or a name in an index leads elsewhere.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._safe: dict[str, Any] = {}
        self._pickled: dict[str, Tensor] = {}
        for path, wanted in _files(folder):
            found = self._open_safe(path) if path.name.endswith(SAFETENSORS) else self._open_pickled(path)
            if missing := sorted(wanted - found):
                raise UserError(f"{path}: lacks {missing[0]}, which the index says it holds; download the folder again")

    def read(self, name: str) -> Tensor:
        """A weight in float32.

        Raises:
            UserError: it holds other numbers than floating-point ones, or NaN or Inf.
        """
        weight = self._pickled[name] if name in self._pickled else self._safe[name].get_tensor(name)
        if weight.dtype not in NUMBERS.values():
            raise UserError(f"{self.folder}: {name} holds {weight.dtype}; give the model before it was quantised")
        if not weight.isfinite().all():
            raise UserError(f"{self.folder}: {name} holds NaN or Inf; download the folder again, or take another")
        return weight.float().clone(memory_format=torch.contiguous_format)

    def _open_safe(self, path: Path) -> set[str]:
        try:
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                part = file.get_slice(name)
                if part.get_dtype() not in (*NUMBERS, *WHOLE_NUMBERS):
                    raise UserError(f"{path}: {name} holds {part.get_dtype()}; give the model before it was quantised")
                self._add(name, tuple(part.get_shape()), path)
                self._safe[name] = file
            return set(file.keys())
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, MemoryError, OverflowError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path}: truncated, damaged or no safetensors file ({error})") from None

    def _open_pickled(self, path: Path) -> set[str]:
        forbid_unsafe_loads(os.environ)
        with named_errors(path):
            check(path)
            with open(path, "rb") as file:
                is_archive = file.read(2) == b"PK"  # else older than torch 1.6, and cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
        if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(weight, Tensor) for name, weight in content.items()
        ):
            raise UserError(f"{path}: holds something else than weights by name; give the model's own {PICKLED_FILE}")
        for name, weight in content.items():
            if weight.layout is not torch.strided or weight.device.type != "cpu" or weight.is_quantized:
                raise UserError(f"{path}: {name} is quantised or sparse; give the model before that")
            if weight.untyped_storage().nbytes() < weight.numel() * weight.element_size():
                raise UserError(f"{path}: {name} says it is larger than the file; do not use it")
            self._add(name, tuple(weight.shape), path)
            self._pickled[name] = weight
        return set(content)

    def _add(self, name: str, shape: tuple[int, ...], path: Path) -> None:
        if name in self.shapes:
            raise UserError(f"{path}: {name} is in two files; download the folder again")
        self.shapes[name] = shape


def _files(folder: Path) -> list[tuple[Path, set[str]]]:
    """The files with weights, each with the names that an index says it holds."""
    for name in (SAFE_FILE, PICKLED_FILE):
        if (folder / name).is_file():
            return [(folder / name, set())]
        if (folder / f"{name}{INDEX}").is_file():
            return _files_of_index(folder / f"{name}{INDEX}", Path(name).suffix)
    raise UserError(
        f"{folder}: holds no {SAFE_FILE} or {PICKLED_FILE}; weights of TensorFlow or Flax are not read, save the model "
        "with transformers' save_pretrained"
    )


def _files_of_index(path: Path, suffix: str) -> list[tuple[Path, set[str]]]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path}: has no weight_map; download the folder again")
    files: dict[str, set[str]] = {}
    for weight, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(suffix) or Path(file).name != file or "\0" in file:
            raise UserError(
                f"{path}: refused, nothing was read: {weight} is to be in {file!r}, which is no file *{suffix} of this "
                "folder; do not use it"
            )
        files.setdefault(file, set()).add(weight)
    for file in files:
        if not (path.parent / file).is_file():
            raise UserError(f"{path.parent / file}: no such file, but the index names it; download the folder again")
    return [(path.parent / file, weights) for file, weights in sorted(files.items())]
