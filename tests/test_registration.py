"""Importing the package is light and leaves the process as it was; it registers as soon as fairseq is loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

import lazyformer_fairseq

REGISTERED = """
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.tasks import TASK_REGISTRY
print(ARCH_MODEL_NAME_REGISTRY["bert_base"], *sorted({
    kind.__module__ for registry in (MODEL_REGISTRY, OPTIMIZER_REGISTRY, TASK_REGISTRY) for kind in registry.values()
    if kind.__module__.startswith("lazyformer_fairseq")
}))
"""
OURS = [
    "lazyformer",
    *(f"lazyformer_fairseq.fairseq_plugin.models.{name}" for name in ("huggingface_bert", "lazyformer")),
    "lazyformer_fairseq.fairseq_plugin.optim.optimizers",
    "lazyformer_fairseq.fairseq_plugin.tasks.full_sentences_masked_lm",
    "lazyformer_fairseq.fairseq_plugin.tasks.stream_language_modeling",
    *("lazyformer_fairseq.finetuning.tasks.squad", "lazyformer_fairseq.finetuning.texts"),
]


def output_of(code: str, python: str | Path = sys.executable) -> str:
    """What a fresh process prints; it must print nothing else."""
    run = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import fairseq, lazyformer_fairseq",
        # And then what fairseq does with --user-dir, where the package has been imported before, and where not.
        "import lazyformer_fairseq, argparse, fairseq; from fairseq import utils;"
        "utils.import_user_module(argparse.Namespace(user_dir=str(lazyformer_fairseq.USER_DIR)))",
        f"import argparse; from fairseq import utils;"
        f"utils.import_user_module(argparse.Namespace(user_dir={str(ROOT / 'lazyformer_fairseq')!r}))",
        "import lazyformer_fairseq; lazyformer_fairseq.register(); lazyformer_fairseq.register()",
        "from lazyformer_fairseq import LazyFormerModel; assert LazyFormerModel.from_pretrained",
        # Imports fairseq itself, and is imported by what is registered: half loaded when fairseq is.
        "import lazyformer_fairseq.fairseq_plugin.tasks.encoder_task",
    ],
)
def test_registered_whatever_comes_first(code, warm_python):
    assert output_of(code + REGISTERED, warm_python / "python").split() == OURS


def test_every_public_name_is_there():
    assert all(getattr(lazyformer_fairseq, name) for name in lazyformer_fairseq.__all__)
    with pytest.raises(AttributeError, match="module 'lazyformer_fairseq' has no attribute 'missing'"):
        _ = lazyformer_fairseq.missing


STATE = """
import json, logging, os, sys, warnings
logging.basicConfig(level=logging.ERROR)
def state():
    root = logging.getLogger()
    return [sys.excepthook is sys.__excepthook__, root.level, len(root.handlers), os.environ.get("HYDRA_FULL_ERROR")]
def filters():
    return [repr(one) for one in warnings.filters]
"""


@pytest.mark.slow
def test_a_notebook_keeps_its_excepthook_warnings_and_logging():
    """Also when it uses the package; what torch and fairseq add to the filters of warnings is theirs."""
    code = STATE + (
        "before, unfiltered = state(), filters()\n"
        "import lazyformer_fairseq\n"
        "print(json.dumps([state() == before, filters() == unfiltered, 'torch' in sys.modules]))\n"
        "import fairseq_cli.train, fairseq.options\n"
        "before, unfiltered = state(), filters()\n"
        "lazyformer_fairseq.LazyFormerModel\n"
        "print(json.dumps([state() == before, filters() == unfiltered]))\n"
    )
    light, used = map(json.loads, output_of(code).splitlines()[-2:])
    assert light == [True, True, False] and used == [True, True]


@pytest.mark.slow
def test_a_notebook_that_loads_a_model_has_fairseq_as_it_was_afterwards():
    old = ROOT / "tests" / "fixtures" / "checkpoint_of_0.1.0"
    code = STATE + (
        "import fairseq.utils\nfrom fairseq import checkpoint_utils\n"
        "import lazyformer_fairseq\n"
        "load, before = checkpoint_utils.load_checkpoint_to_cpu, state()\n"
        f"hub = lazyformer_fairseq.LazyFormerModel.from_pretrained({str(old)!r})\n"
        "print(load is checkpoint_utils.load_checkpoint_to_cpu, hasattr(fairseq.utils, 'eval'), state() == before)\n"
    )
    assert output_of(code).split()[-3:] == ["True", "False", "True"]


@pytest.mark.parametrize(
    ("packages", "unwanted"), [(("patterns",), ("torch", "fairseq")), (("patterns", "modules"), ("fairseq",))]
)
def test_patterns_and_modules_are_of_use_without_fairseq(packages, unwanted):
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in packages
        for path in sorted((ROOT / "lazyformer_fairseq" / package).rglob("*.py"))
        if "triton" not in path.parts  # not installed on every machine
    ]
    assert len(names) > 2
    code = f"import {', '.join(names)}\nimport sys\nprint(*({set(unwanted)!r} & set(sys.modules)))"
    assert output_of(code).split() == []


PARENT = """
import multiprocessing, sys
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import train
if __name__ == "__main__":
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser()))
    child = multiprocessing.get_context("spawn").Process(target=train.main, args=[cfg])
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.slow
def test_a_process_that_fairseq_starts_for_a_gpu_has_the_hooks_of_its_run(tmp_path):
    """It unpickles fairseq's main and the config; the parent's hooks are not there."""
    (tmp_path / "parent.py").write_text(PARENT)
    data = ROOT / "tests" / "fixtures" / "checkpoint_of_0.1.0" / "data"
    options = (
        "--task full_sentences_masked_lm --tokens-per-sample 32 --arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 "
        "--criterion masked_lm_accuracy --optimizer fused_adam --lr-scheduler linear_warmup --lr 1e-3 --max-update 1 "
        f"--batch-size 4 --cpu --num-workers 0 --disable-validation --user-dir {ROOT / 'lazyformer_fairseq'}"
    )
    command = [sys.executable, str(tmp_path / "parent.py"), str(data), *options.split(), "--save-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    assert b"lazyformer_fairseq sha256" in (tmp_path / "checkpoint_last.pt").read_bytes()
