"""Writes configs/pretraining/NAME.yaml for each named encoder, as differences from base.yaml.

    python scripts/write_configs.py

Run the script after you add or change a row of lazyformer_fairseq/patterns/architectures.py. Comments at the top of a
file are kept; a new file starts with the source of its row. The files of language models are written by hand.
"""

import json
import re
from pathlib import Path

import yaml

from lazyformer_fairseq.arguments import CONFIGS
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, MASKED_LM

FOLDER = CONFIGS / "pretraining"
OBJECTIVES = {MASKED_LM: "", "masked_permuted_lm": ", objective: permuted"}  # files in the folder objective


def names() -> list[str]:
    """Return the names of the encoders that have a file, which are all except the tiny ones for tests."""
    return sorted(name for name in ARCHITECTURES if not name.endswith("_tiny"))


def config_of(name: str, comments: str) -> str:
    """Return the content of NAME.yaml with these comments."""
    row = ARCHITECTURES[name]
    base = yaml.safe_load((FOLDER / "base.yaml").read_text(encoding="utf-8"))["model"]
    lines = ["# @package _global_", comments, f"defaults: [base, _self_, shared{OBJECTIVES[row.task]}]", "", "model:"]
    for option, value in row.options().items():
        if base.get(option) != value:
            is_word = isinstance(value, str) and re.fullmatch(r"\w+", value)
            lines.append(f"  {option}: {value if is_word else json.dumps(value)}")
    return "\n".join(lines) + "\n"


def comments_of(path: Path, source: str) -> str:
    """Return the comments at the top of a file after its first line, or the source for a new file."""
    if not path.exists():
        return f"# {source}."
    _, *lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.startswith("#"))


if __name__ == "__main__":
    for name in names():
        path = FOLDER / f"{name}.yaml"
        path.write_text(config_of(name, comments_of(path, ARCHITECTURES[name].source)), encoding="utf-8")
