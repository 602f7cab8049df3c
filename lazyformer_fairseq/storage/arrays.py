"""Loads NumPy array files safely, without allocating more memory than the size of the file."""

import zipfile
from pathlib import Path
from typing import Optional

import numpy as np

from lazyformer_fairseq.errors import UserError

MAGIC = b"\x93NUMPY"


def map_array(path: Path, remedy: str, dtypes: str = "iu", ndim: Optional[int] = None) -> np.ndarray:
    """Memory-map a ``.npy`` file, read-only.

    Args:
        path: the file.
        remedy: advice at the end of the error message.
        dtypes: allowed number types, as letters of numpy's ``dtype.kind``.
        ndim: required number of dimensions; None for any.

    Raises:
        UserError: the file is not a ``.npy`` file, is shorter than its header specifies, or has an unsupported type or
            number of dimensions.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError("it is not a .npy file")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy may raise anything for a damaged header
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: cannot be read as an array ({said}); {remedy}") from None
    has_type = array.dtype.kind in dtypes
    # An array of zero-byte items (type <U0, for example) occupies no space in the file, but copying it may need any
    # amount of memory.
    has_bytes = array.dtype.itemsize > 0
    has_dimensions = ndim is None or array.ndim == ndim
    if not (has_type and has_bytes and has_dimensions):
        dimensions = ""
        if ndim is not None:
            dimensions = f" (ndim must be {ndim})"
        found = f"type {array.dtype} and shape {array.shape}"
        raise UserError(f"{path}: arrays with {found} are not supported here{dimensions}; {remedy}")
    return array


def refuse_packed(path: Path) -> None:
    """Raise a ValueError for an ``.npz`` with compressed arrays, because a small file may expand to a huge size."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("the arrays are compressed; write the file with numpy.savez, which does not compress")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise ValueError("the arrays are larger than the file")
