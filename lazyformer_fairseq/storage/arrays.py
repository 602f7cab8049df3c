"""Arrays in files of numpy's, mapped into memory: a header cannot claim more of it than the file has."""

import zipfile
from pathlib import Path
from typing import Optional

import numpy as np

from lazyformer_fairseq.errors import UserError

MAGIC = b"\x93NUMPY"


def map_array(path: Path, remedy: str, dtypes: str = "iu", ndim: Optional[int] = None) -> np.ndarray:
    """Map a ``.npy`` file, read-only.

    Args:
        path: path of the file.
        remedy: ends the message.
        dtypes: the types that its numbers may have, letters of numpy's ``dtype.kind``.
        ndim: the number of dimensions that it must have.

    Raises:
        UserError: the file is none, is shorter than its header says, or holds other numbers or dimensions.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError("it is no .npy file")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy may raise anything for a damaged header
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: cannot be read as an array: {said}; {remedy}") from None
    # Items of no bytes, as of the type <U0, need no file, and a copy of them may need any memory.
    if array.dtype.kind not in dtypes or not array.dtype.itemsize or (ndim is not None and array.ndim != ndim):
        dimensions = ""
        if ndim is not None:
            dimensions = f" of {ndim} dimensions"
        found = f"the type {array.dtype} and the shape {array.shape}"
        raise UserError(f"{path}: has {found}, which is no array{dimensions} for this; {remedy}")
    return array


def refuse_packed(path: Path) -> None:
    """Raise a ValueError for an ``.npz`` whose arrays are packed, so that few bytes may stand for many."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("its arrays are packed; numpy's savez packs none")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise ValueError("its arrays are larger than the file")
