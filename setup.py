"""Package metadata. `make setup` installs from here; lower bounds and pins are versions that were tried."""

import os
import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

INSTALL_REQUIRES = [
    # fairseq itself imports on no Python from 3.11 on; this fork of its main branch does, under the same name. On later
    # Pythons all works that does not train by fairseq-train.
    "fairseq-fixed==0.12.3.1; python_version < '3.13'",
    # From 2.6 on checkpoints load with weights_only=True, the protection that reliability/checkpoints is written for.
    "torch>=2.6,<2.14",  # 2.13.0 was tried last; scripts/choose_torch.py has the same bounds
    "annotated-types>=0.6,<1",  # bounds of fields, which pydantic reads
    "click>=8.4,<9",  # names the nearest command where one is misspelt
    "hydra-core>=1.3.2,<1.4",  # YAML files of trainings, as fairseq composes them
    "matplotlib>=3.9,<4",
    "numpy>=2.0,<3",
    "omegaconf>=2.3,<2.4",  # settings in fairseq's checkpoints; fairseq pins it
    "platformdirs>=4,<5",  # the user's cache folder, for what is measured on a machine
    "protobuf>=4.25,<8",  # sentencepiece_model_pb2
    "pydantic>=2.7,<3",  # files of settings against dataclasses; spacy needs it too
    "pyyaml>=6,<7",
    "regex>=2024.4",
    "sacremoses>=0.1.1,<0.3",
    "safetensors>=0.4.3,<1",  # weights without code, `lazyformer export`
    "scikit-learn>=1.5,<2",
    "scipy>=1.14,<2",
    "sentencepiece>=0.2.3,<0.3",
    "spacy>=3.8.2,<4",
    "tabulate>=0.9,<0.11",
    "tokenizers>=0.22,<0.24",
    "tqdm>=4.66.3,<5",
]

EXTRAS_REQUIRE = {
    "test": [
        "entmax>=1.3,<2",  # what our entmax is compared with
        "hypothesis>=6.100,<7",
        "mypy>=1.18,<2",
        "peft>=0.21,<1",  # whose adapters our models take
        "pytest>=8.3,<10",
        "pytest-timeout>=2.3,<3",
        "pytest-xdist>=3.6,<4",
        # The formatter's output changes between minor versions: keep in step with .pre-commit-config.yaml.
        "ruff>=0.17,<0.18",
    ],
    # `lazyformer corpus`.
    "corpus": [
        "fsspec>=2025.3",  # texts and corpora at URLs; s3fs, gcsfs and others are the user's
        "jinja2>=3.1,<4",
        "orjson>=3.10,<4",
        "pyarrow>=17,<27",  # Parquet
        "rensa>=0.5,<0.6",  # the hashes of a MinHash change with its versions
        "xxhash>=3.4,<4",
        "zstandard>=0.22,<1",
    ],
    # --report-to, and fairseq's --tensorboard-logdir and --wandb-project.
    "trackers": [
        "tensorboard>=2.18,<3",
        "trackio>=0.43,<1",
        "wandb>=0.19.10,<1",  # several open runs in a process: reinit="create_new"
    ],
    # `lazyformer bench`: Hugging Face's BertModel, a baseline; without it the others are measured. Tried with 5.23.
    "bench": ["transformers>=5,<6"],
    # `lazyformer export --to huggingface`, `lazyformer import`, transformers' Trainer. Tried with 4.57 and 5.24.
    "huggingface": [
        "accelerate>=1.1,<2",  # transformers' Trainer
        "transformers>=4.57,<6",
    ],
    # Several machines: --executor ray and slurm.
    "cluster": ["ray>=2.44,<3; python_version < '3.14'", "submitit>=1.5.2,<2"],
    # torch's own CUDA build brings triton. 3.3: its kernels may take tuples.
    "gpu": ["triton>=3.3,<4; platform_system == 'Linux'"],
    # `make docs`.
    "docs": ["mkdocs>=1.6.1,<2", "mkdocs-material>=9.8,<10", "mkdocstrings[python]>=1.0.8,<2"],
    # For tests without a GPU. Not in "test": a CUDA build of torch pins its own. Before 3.7 the interpreter fails with
    # numpy 2.
    "interpreter": ["triton>=3.7,<4; platform_system == 'Linux'"],
}


class BuildWithConfigs(build_py):
    """A wheel carries configs/ in the package; a checkout has it beside."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("configs", Path(self.build_lib, "lazyformer_fairseq", "configs"), dirs_exist_ok=True)


# publish.yml sets it: PyPI has neither the pages nor the pictures that README.md links to.
REPOSITORY = os.environ.get("REPOSITORY_URL", "")
README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
if REPOSITORY:
    README = re.sub(r"(!\[[^]]*\])\((?!http)", rf"\1({REPOSITORY}/raw/HEAD/", README)
    README = re.sub(r"\]\((?!http|#)", f"]({REPOSITORY}/blob/HEAD/", README)

setup(
    name="lazyformer_fairseq",
    version="1.0.0",
    description="A fairseq plugin to pre-train encoders that pay less for attention: LazyFormer, PAR, Sandwich, BERT",
    long_description=README,
    long_description_content_type="text/markdown",
    project_urls={"Source": REPOSITORY} if REPOSITORY else {},
    license="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["lazyformer_fairseq", "lazyformer_fairseq.*"]),
    package_data={
        "lazyformer_fairseq": ["py.typed"],
        "lazyformer_fairseq.corpus": ["report.html.jinja", "wiki_words.txt"],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    cmdclass={"build_py": BuildWithConfigs},
    entry_points={"console_scripts": ["lazyformer = lazyformer_fairseq.cli:main"]},
)
