"""Write the kernels of a lazy block as a folder that the Hugging Face library ``kernels`` loads.

The folder has the layout of a kernel repository with one variant for all versions of torch::

    OUT/README.md
    OUT/benchmarks/benchmark.py
    OUT/build/torch-universal/__init__.py       the function `attention`
    OUT/build/torch-universal/metadata.json
    OUT/build/torch-universal/modules_*.py      modules of this package with relative imports
"""

import hashlib
import json
import shutil
from pathlib import Path

import click

from lazyformer_fairseq.huggingface.code import LIBRARIES, follow_imports
from lazyformer_fairseq.storage.atomic import atomic_folder

HERE = Path(__file__).parent
NAME = "lazy_attention"
MODULES = [f"lazyformer_fairseq.modules.attention.{name}" for name in ("triton_kernels", "lazy_block")]


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
def build(out: Path) -> None:
    """Write a kernel repository to the folder OUT, to be loaded from there or uploaded to the Hub."""
    files = follow_imports(MODULES, LIBRARIES | {"triton"})
    files["__init__.py"] = (HERE / f"{NAME}.py").read_text(encoding="utf-8")
    digest = hashlib.sha256("".join(f"{name}\0{text}\0" for name, text in sorted(files.items())).encode()).hexdigest()
    unique = f"{NAME}_{digest[:12]}"  # so that several versions can be loaded at once
    metadata = {
        "id": unique,
        "name": NAME.replace("_", "-"),
        "version": 1,
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    with atomic_folder(out) as folder:
        variant = folder / "build" / "torch-universal"
        variant.mkdir(parents=True)
        for name, text in files.items():
            (variant / name).write_text(text, encoding="utf-8")
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        (folder / "benchmarks").mkdir()
        shutil.copy(HERE / "benchmark.py", folder / "benchmarks")
        shutil.copy(HERE / "README.md", folder)
    click.echo(f"written: {out}")


if __name__ == "__main__":
    build()
