"""NumPy array files, mapped into memory so that a header cannot claim more memory than the file has."""

import zipfile
from pathlib import Path
from typing import Optional

import numpy as np

from lazyformer_fairseq.errors import UserError

MAGIC = b"\x93NUMPY"


def map_array(path: Path, remedy: str, dtypes: str = "iu", ndim: Optional[int] = None) -> np.ndarray:
    """Map a ``.npy`` file into memory, read-only.

    Args:
        path: the file.
        remedy: the end of the error message.
        dtypes: the allowed types of numbers, as letters of numpy's ``dtype.kind``.
        ndim: the required number of dimensions; None for any.

    Raises:
        UserError: the file is not a ``.npy`` file, is shorter than its header says, or has another type or number of
            dimensions.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError("it is not a .npy file")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy may raise anything for a damaged header
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: cannot be read as an array: {said}; {remedy}") from None
    # Items without bytes, such as those of the type <U0, need no file, but a copy of them may need any amount of
    # memory.
    if array.dtype.kind not in dtypes or not array.dtype.itemsize or (ndim is not None and array.ndim != ndim):
        dimensions = ""
        if ndim is not None:
            dimensions = f" with ndim={ndim}"
        found = f"the type {array.dtype} and the shape {array.shape}"
        raise UserError(f"{path}: has {found}, which is not a suitable array{dimensions}; {remedy}")
    return array


def refuse_packed(path: Path) -> None:
    """Raise a ValueError for an ``.npz`` with compressed arrays, of which few bytes may stand for many."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("its arrays are compressed; write it with numpy.savez, which does not compress")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise ValueError("its arrays are larger than the file")
