"""Reads ``dict.txt``, and names file and line of whatever is wrong with it."""

import io
from pathlib import Path
from typing import Union

from fairseq.data import Dictionary

from lazyformer_fairseq.errors import UserError


def load_dictionary(path: Union[str, Path]) -> Dictionary:
    """fairseq's dictionary of lines ``SYMBOL COUNT``; nothing in the file is run or unpickled.

    Raises:
        UserError: the file is missing, not UTF-8, or holds no symbol, or a line has another form or comes twice.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8") as file:
            lines = file.readlines()
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; give the folder that preprocessing wrote, with dict.txt in it"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a dictionary, no UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    dictionary = Dictionary()
    for number, line in enumerate(lines, start=1):
        try:
            dictionary.add_from_file(io.StringIO(line))
        except (ValueError, RuntimeError) as error:
            reason = str(error).partition(". Duplicate words")[0]
            raise UserError(f"{path}, line {number}: not a dictionary of lines 'symbol count': {reason}") from None
    if len(dictionary) == dictionary.nspecial:
        raise UserError(f"{path}: not a dictionary, it holds no symbol")
    return dictionary
