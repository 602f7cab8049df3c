"""``--checkpoint [NAME=]FILE``: which pre-trained models a grid starts from."""

import re
from collections.abc import Sequence
from pathlib import Path

from lazyformer_fairseq.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][\w.@+-]*")


def name_checkpoints(given: Sequence[str]) -> dict[str, Path]:
    """Model -> checkpoint, from ``NAME=FILE`` or ``FILE`` (named after its folder).

    Raises:
        UserError: a name that is taken or impossible, or no such file.
    """
    models: dict[str, Path] = {}
    for text in given:
        name, path = _split_name(text)
        if name in models:
            raise UserError(
                f"--checkpoint {text}: {models[name]} is called {name} too; give each a name, as in NAME={path}"
            )
        if not path.is_file():
            raise UserError(f"{path}: no such checkpoint; give a file such as checkpoint_last.pt")
        models[name] = path
    return models


def _split_name(text: str) -> tuple[str, Path]:
    name, found, path = text.partition("=")
    if not found:
        path = text
        name = Path(text).absolute().parent.name
    if not NAME.fullmatch(name):
        raise UserError(f"--checkpoint {text}: {name!r} cannot name a model's folder; give a name, as in m2x6={path}")
    return name, Path(path)
