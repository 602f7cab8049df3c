"""Every command of the pages runs in miniature."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from helpers import PAGES, ROOT, mostly_slow, toy_texts, write_lines, write_toy_glue, write_toy_wikitext
from run_records import write_record
from tiny_berts import save_tiny
from toy_squad import write_articles

from lazyformer_fairseq.language_modeling.prepare import prepare

BEFORE = ROOT / "tests" / "fixtures" / "checkpoints" / "m2x2"  # what a user has where a page begins
OF_MODEL = "--encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --max-positions 64"
SIZES = f"{OF_MODEL} --num-workers 0"
M2X2 = "--sublayer-pattern M2x2"
PRETRAIN = f"{SIZES} --max-update 2 --tokens-per-sample 32"
HYDRA_LAUNCHED = (
    "optimization.max_update=2 dataset.num_workers=0 model.encoder_embed_dim=16 model.encoder_ffn_embed_dim=32 "
    "model.encoder_attention_heads=2 model.max_positions=64"
)
HYDRA = f"common.cpu=true common.fp16=false distributed_training.distributed_world_size=1 {HYDRA_LAUNCHED}"
HYDRA_PRETRAIN = f"{HYDRA} task.tokens_per_sample=32 task.sequences_per_update=8 dataset.batch_size=4"
YAML = f"--sequences-per-update 4 {HYDRA_LAUNCHED} task.tokens_per_sample=32 model.sublayer_pattern=M2x2"
LANGUAGE_MODEL = (
    "--decoder-embed-dim 8 --decoder-ffn-embed-dim 8 --decoder-attention-heads 2 --adaptive-softmax-cutoff '' "
    "--mem-len 8 --tgt-len 8"
)
TINY = "--embed-dim 8 --ffn-embed-dim 8 --heads 2 --seeds 1"
TINY_COMPARE = f"{TINY} --validation-tokens 100 --tokens-per-sample 16 --batch-size 4 --device cpu"
COMPARE = f"{TINY} --adaptive-softmax-cutoff '' --updates 1 --tgt-len 8 --mem-len 8 --batch-size 4 --device cpu"
SEARCH = "--batch-size 16 --sublayers 2 --constant-updates 1 --max-updates 60 --device cpu"
FRONT = f"{SEARCH} {OF_MODEL} --tokens-per-sample 32 --validation-tokens 64 --rungs 1"
BENCH = (
    "--baseline-arch bert_tiny --baseline-backend eager --relative-position-buckets 0 --lengths 8 --tokens 8 --rounds 2"
)
SQUAD_WINDOWS = "--task squad --max-length 64"
SQUAD_RUN = "--seeds 1 --epochs 1 --gpus none --workers 1"
CONTINUED = "--max-update 2 --sequences-per-update 4 --num-workers 0 --disable-validation"
# What makes a command small enough for a test, by how it begins (the longest counts).
ADDED_OPTIONS = {
    "lazyformer pretrain warm": CONTINUED,
    "lazyformer pretrain results/faster": CONTINUED,
    **dict.fromkeys((f"lazyformer {name}" for name in "curves export import plan predict report".split()), ""),
    **dict.fromkeys((f"lazyformer {name}" for name in ("lm evaluate", "compare report")), ""),
    "lazyformer evaluate": "--device cpu",
    "lazyformer import imported": "--sublayer-pattern M2",
    "lazyformer import checkpoints": "--sublayer-pattern M4",
    "lazyformer corpus": "--vocab-size 160 --valid-share 0.1",
    "lazyformer corpus my_texts data_of_bert": "--valid-share 0.1",
    "lazyformer compare wikitext": COMPARE,
    "lazyformer compare data": f"{TINY_COMPARE} --updates 1",
    "lazyformer compare data results/ten": f"{TINY_COMPARE} --budget 1s",
    "lazyformer compare data results/mine": f"{TINY_COMPARE} --budget 0.01s --lr 1e-3 --time-fractions 0.5",
    "lazyformer compare data results/orders": f"{TINY_COMPARE} --updates 1 --random-orders 2",
    "lazyformer reproduce": "--plan",
    "lazyformer search data results/front": f"{FRONT} --budgets 1.0,2.0 --evaluations 4",
    "lazyformer search data results/search_bert": f"{SEARCH} {OF_MODEL} --tokens-per-sample 32",
    "lazyformer search compress": "--budgets 0.8,0.9 --tokens 128 --candidates l,identity --top 1",
    "lazyformer search wikitext": f"{SEARCH} {LANGUAGE_MODEL}",
    "lazyformer pattern show": "--tokens 8 --heads 2",
    "lazyformer bench": f"--arch lazyformer_m2x6_s_tiny --what encoder {BENCH}",
    "lazyformer bench --arch transformer_xl_base": f"--arch transformer_xl_tiny {BENCH}",
    "lazyformer bench attention": "--lengths 16 --heads 2x4 --rounds 2",
    "OMP_NUM_THREADS=1 python scripts/time_tail.py": (
        "--patterns sff --words 50 --tokens 16 --batch-size 2 --texts 2 --rounds 1"
    ),
    "lazyformer pretrain": f"{PRETRAIN} {M2X2} --sequences-per-update 4",
    "lazyformer pretrain bert_base data --sublayer-pattern": f"{PRETRAIN} --sequences-per-update 4",
    **dict.fromkeys(
        (f"lazyformer pretrain {arch}.yaml" for arch in ("par_bert_base", "lazyformer_m2x6_s", "bert_laptop")), YAML
    ),
    "lazyformer pretrain par_transformer_base wikitext-103": (
        f"{LANGUAGE_MODEL} --sublayer-pattern sff --sequences-per-update 4 --max-update 2 --num-workers 0"
    ),
    "lazyformer lm prepare-images": "--side 8 --valid 0.1 --test 0.1",
    "lazyformer pretrain igpt_s": (
        "--sublayer-pattern s[positions=absolute,length=64]f --decoder-embed-dim 8 --decoder-ffn-embed-dim 8 "
        "--decoder-attention-heads 2 --tgt-len 64 --sequences-per-update 4 --max-update 2 --num-workers 0"
    ),
    **dict.fromkeys(("lazyformer lm sample", "lazyformer lm probe"), ""),
    "lazyformer finetune": "--tasks CoLA --lrs 1e-3 --seeds 1 --epochs 1 --max-train-rows 40 --gpus none",
    "lazyformer finetune checkpoints/lazyformer_m2x6_s --": "--lrs 1e-3 --seeds 1 --epochs 1 --gpus none",
    "lazyformer finetune m2x6=checkpoints/lazyformer_m2x6_s bert": "--epochs 1 --gpus none --workers 1",
    "lazyformer finetune lazy": f"{SQUAD_WINDOWS} {SQUAD_RUN}",
    "python scripts/hub_kernel/build.py": "",
    "scripts/preprocess_wiki_books.sh": "--dry-run",
    "scripts/reproduce_lazyformer.sh": "--plan",
    "scripts/prepare_wikitext103.sh": "--from my_wikitext --unofficial",
    "scripts/compare_language_models.sh": COMPARE,
    "scripts/examples/babylm.sh": (
        "--model bert=sf --updates 2 --lr 1e-3,2e-3 --embed-dim 8 --ffn-embed-dim 8 --heads 2 --tokens-per-sample 64 "
        "--batch-size 4 --validation-tokens 100"
    ),
    "python scripts/examples/train_with_transformers.py": "--updates 4",
    "fairseq-train data": f"{PRETRAIN} {M2X2} --batch-size 4 --sequences-per-update 8 --cpu",
    "fairseq-train glue_data/CoLA": f"{SIZES} {M2X2} --max-update 2 --cpu",
    "fairseq-hydra-train --config-dir configs/pretraining": HYDRA_PRETRAIN,
    "fairseq-hydra-train --config-dir configs/pretraining --config-name lazyformer_m2x6_s": (
        f"{HYDRA_PRETRAIN} model.sublayer_pattern=M2x2"
    ),
}
# Commands that need a network, an official text or a whole machine, and the tests that run them.
TESTED_ELSEWHERE = {
    "make ": "test_setup.py",
    "pip install": "test_extras.py",
    "pip uninstall": "test_extras.py",
    "hf download": "huggingface/test_refused_folders.py",
    "hf auth login": "huggingface/test_publish.py",
    "lazyformer export checkpoints/lazyformer_m2x6_s USER/lazyformer-m2x6 --to hub": "huggingface/test_publish.py",
    "scripts/download_wikipedia.sh": "test_corpus_scripts.py",
    "scripts/download_books.sh": "test_corpus_scripts.py",
    "scripts/prepare_enwik8.sh": "test_corpus_scripts.py",
    "scripts/prepare_text8.sh": "test_corpus_scripts.py",
    "DATA=my_data scripts/gpu/run.sh learning": "test_gpu_scripts.py",
    "lazyformer lm prepare wikitext": "language_modeling/test_prepare_and_evaluate.py",
    "lazyformer corpus babylm:my_texts data --executor ray": "corpus/test_on_a_cluster.py",
    "lazyformer corpus babylm:s3://bucket/my_texts s3://bucket/data --executor ray": "corpus/test_on_a_cluster.py",
    "lazyformer corpus my_texts data --executor ray": "corpus/test_on_a_cluster.py",
    "lazyformer corpus my_texts data --executor slurm": "executors/test_executors.py",
    "export RAY_ADDRESS": "corpus/test_on_a_cluster.py",
    "lazyformer compare data results/many --task masked-lm --alone --executor ray": "corpus/test_on_a_cluster.py",
    "lazyformer finetune checkpoints/lazyformer_m2x6_s --data glue_data --output results/glue --executor slurm": (
        "finetuning/test_grid.py"
    ),
}
# Every block of this one is in tests/test_a_new_kind.py.
WALK_THROUGH = "docs/add_a_kind.md"


def blocks_of(page: str) -> list[tuple[str, str]]:
    """(language, code) of each block of a page that is meant to be run."""
    return re.findall(r"^```(bash|python)\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


def commands_of(block: str) -> list[str]:
    """Without comments; what a backslash continues is one command."""
    lines = block.replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := re.sub(r"(^|\s)#.*", "", line).strip())]


def longest_start(command: str, table: Iterable[str]) -> str:
    return max((start for start in table if command.startswith(start)), key=len, default="")


def in_miniature(command: str, options: str) -> str:
    """The command with these options, in place of its own of the same names."""
    for name in re.findall(r"(?<!\S)--[\w-]+", options):
        command = re.sub(rf"\s+{name}(?!\S)(\s+(?!--)('[^']*'|\S+))*", "", command)
    return f"{command} {options}"


def things_to_run(page: str) -> list[list[str]]:
    """A page's code and commands in its order, in miniature; what README.md has too runs there alone."""
    in_readme = {code for _, block in blocks_of("README.md") for code in commands_of(block)}
    seen, result = set() if page == "README.md" else in_readme, []
    for language, block in blocks_of(page):
        if language == "python":
            result.append(["python", "-c", block])
            continue
        for command in commands_of(block):
            if command in seen or command.startswith("source ") or longest_start(command, TESTED_ELSEWHERE):
                continue
            start = longest_start(command, ADDED_OPTIONS)
            assert start, f"{page}: no test knows this command: {command}"
            result.append(["bash", "-c", in_miniature(command, ADDED_OPTIONS[start])])
    return result


@pytest.fixture
def users_folder(tmp_path) -> Path:
    """Where a user stands: the checkout, texts of theirs, files of GLUE, BabyLM, SQuAD and of a BERT."""
    from other_tokenizers import write_bert_files  # which skips a test where the library is not there

    for name in ("lazyformer_fairseq", "configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_toy_wikitext(tmp_path / "my_wikitext")
    for name in ("my_texts", "babylm_text"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "toy.txt").write_text("\n\n".join(toy_texts(150)))
    write_toy_glue(tmp_path / "glue_data", train=40, valid=10)
    for split in ("train", "valid"):
        pairs = [{"sentence1": "Anna sees it .", "sentence2": "Ben sees .", "label": label} for label in (0, 1)]
        write_lines(tmp_path / "babylm_glue" / f"rte.{split}.jsonl", map(json.dumps, pairs))
    write_articles(tmp_path / "squad_data", train=5, dev=1)
    for name, count in (("train", 40), ("dev", 10)):
        rows = [f"{text.splitlines()[0]}\t{('negative', 'positive')[n % 2]}" for n, text in enumerate(toy_texts(count))]
        write_lines(tmp_path / "my_reviews" / f"{name}.tsv", ["text\tlabel", *rows])
        write_lines(tmp_path / "my_names" / f"{name}.conll", ["Anna B-PER", "sees O", "Paris B-LOC", ""] * count)
    shutil.copy(tmp_path / "my_reviews" / "dev.tsv", tmp_path / "texts.tsv")
    shutil.copy(tmp_path / "my_names" / "dev.conll", tmp_path / "texts.conll")
    write_bert_files(tmp_path / "my_bert")
    pair = {"sentence_good": "Anna sees Ben.", "sentence_bad": "Anna Ben sees."}
    write_lines(tmp_path / "blimp" / "order.jsonl", [json.dumps(pair)])
    images = np.random.default_rng(1).random((40, 8, 8))
    (tmp_path / "photographs").mkdir()
    np.save(tmp_path / "photographs" / "images.npy", images)
    np.save(tmp_path / "photographs" / "labels.npy", images[:, 0, 0] > 0.5)
    return tmp_path


def add_what_pages_begin_with(folder: Path) -> None:
    """Pre-training data, checkpoints of several names and a text for language models."""
    shutil.copytree(BEFORE / "data", folder / "data")
    shutil.copytree(BEFORE / "tokenizer", folder / "data" / "tokenizer")
    for name in ("lazyformer_m2x6_s", "bert_base", "lazyformer_m2x2", "par_bert_base", "bert_base_absolute"):
        shutil.copytree(BEFORE / "tokenizer", folder / "checkpoints" / name / "tokenizer")
        shutil.copy(BEFORE / "checkpoint_last.pt", folder / "checkpoints" / name)
        write_record(folder / "checkpoints" / name, [9.0, 8.5])
    (folder / "footing").symlink_to(folder / "data")
    prepare("wikitext", folder / "my_wikitext", folder / "wikitext-2")


RUN = [page for page in PAGES if blocks_of(page) and page != WALK_THROUGH]


@pytest.mark.parametrize("page", mostly_slow(RUN, "README.md"))
@pytest.mark.timeout(3600)
def test_every_command_runs(users_folder, page, warm_python):
    """They are forked from a python that has imported torch."""
    programs = f"{warm_python}:{Path(sys.executable).parent}"
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(users_folder)}
    environment["VOCAB_SIZE"] = "160"  # of scripts/examples/babylm.sh
    if page != "README.md":
        add_what_pages_begin_with(users_folder)
    if "bert-base-uncased" in PAGES[page]:
        save_tiny(users_folder / "bert-base-uncased")
    if page == "docs/reproduce.md":
        (users_folder / "my_texts" / "glue").symlink_to(users_folder / "glue_data")
    for program, *words in things_to_run(page):
        command = [shutil.which(program, path=environment["PATH"]), *words]
        run = subprocess.run(command, cwd=users_folder, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, f"{shlex.join(command)}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
        assert "Traceback" not in run.stderr
        if "fill_mask" in command[-1]:
            assert len(re.findall(r"^\d+%  ", run.stdout, re.MULTILINE)) == 3


def test_what_is_tested_elsewhere_is_in_a_page_and_in_that_test():
    commands = [code for page in PAGES for _, block in blocks_of(page) for code in commands_of(block)]
    for start, file in TESTED_ELSEWHERE.items():
        assert any(command.startswith(start) for command in commands), start
        assert start.split()[-1].split("/")[-1] in (ROOT / "tests" / file).read_text()
