"""The pages: every command runs in miniature, every table and link is held to what it describes."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path

import pytest
from fairseq.dataclass import FairseqDataclass
from helpers import ROOT, count_causal_parameters, count_parameters, toy_texts, write_toy_glue
from language_model_data import write_toy_wikitext
from omegaconf import MISSING as REQUIRED
from squad_grids import write_articles
from tiny_berts import save_tiny
from training_logs import write_run

from lazyformer_fairseq.costs.flops import count_flops
from lazyformer_fairseq.costs.flops import count_parameters as count_parameters_by_formula
from lazyformer_fairseq.criterions.continued_masked_lm import ContinuedMaskedLMConfig
from lazyformer_fairseq.language_modeling.text.prepare import prepare
from lazyformer_fairseq.models.causal_lm_config import CausalLMConfig
from lazyformer_fairseq.models.config import LazyFormerConfig
from lazyformer_fairseq.optim.fused_adam import FusedAdamConfig
from lazyformer_fairseq.optim.linear_warmup import LinearWarmupConfig
from lazyformer_fairseq.optim.nvlamb import NvLambConfig
from lazyformer_fairseq.optim.polynomial_warmup import PolynomialWarmupConfig
from lazyformer_fairseq.patterns import attention_kinds
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import expand
from lazyformer_fairseq.patterns.kinds import kinds
from lazyformer_fairseq.patterns.settings import Setting
from lazyformer_fairseq.patterns.sizes import EncoderSizes
from lazyformer_fairseq.reliability.options import ReliabilityConfig
from lazyformer_fairseq.tasks.full_sentences_masked_lm import FullSentencesMaskedLMConfig
from lazyformer_fairseq.tasks.glue import GlueConfig
from lazyformer_fairseq.tasks.squad import SquadConfig
from lazyformer_fairseq.tasks.stream_language_modeling import StreamLanguageModelingConfig

PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
}

# --- Commands

BEFORE = ROOT / "tests" / "fixtures" / "checkpoint_of_0.1.0"  # what a user has where a page begins
PATTERN = "--sublayer-pattern M2x2"
SIZES = (
    "--encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --max-positions 64 --num-workers 0"
)
PRETRAIN = f"{SIZES} --max-update 2 --tokens-per-sample 32"
HYDRA_LAUNCHED = (
    "optimization.max_update=2 dataset.num_workers=0 model.encoder_embed_dim=16 model.encoder_ffn_embed_dim=32 "
    "model.encoder_attention_heads=2 model.max_positions=64"
)
HYDRA = f"common.cpu=true common.fp16=false distributed_training.distributed_world_size=1 {HYDRA_LAUNCHED}"
HYDRA_PRETRAIN = f"{HYDRA} task.tokens_per_sample=32 task.sequences_per_update=8 dataset.batch_size=4"
LANGUAGE_MODEL = (
    "--decoder-embed-dim 8 --decoder-ffn-embed-dim 8 --decoder-attention-heads 2 --adaptive-softmax-cutoff '' "
    "--mem-len 8 --tgt-len 8"
)
COMPARE = (
    "--embed-dim 8 --ffn-embed-dim 8 --heads 2 --adaptive-softmax-cutoff '' --updates 1 --seeds 1 "
    "--tgt-len 8 --mem-len 8 --batch-size 4 --device cpu"
)
SEARCH = "--batch-size 16 --sublayers 2 --constant-updates 1 --max-updates 60 --device cpu"
BENCH = (
    "--baseline-arch bert_tiny --baseline-backend eager --relative-position-buckets 0 --lengths 8 --tokens 8 --rounds 2"
)
SQUAD_WINDOWS = "--max-length 64 --stride 16 --max-question-length 16"
SQUAD_RUN = "--seeds 1 --epochs 1 --gpus none --workers 1"
# What makes a command small enough for a test, by how it begins (the longest counts).
ADDED_OPTIONS = {
    "lazyformer continue": "--max-update 2 --sequences-per-update 4 --num-workers 0 --disable-validation",
    "lazyformer corpus": "--vocab-size 160 --valid-share 0.1",
    "lazyformer curves": "",
    "lazyformer export": "",
    "lazyformer import": "",
    "lazyformer import imported": "--sublayer-pattern M2",
    "lazyformer corpus my_texts data_of_bert": "--valid-share 0.1",
    "lazyformer glue": "",
    "lazyformer glue run": "--tasks CoLA --lrs 1e-3 --seeds 1 --epochs 1 --max-train-rows 40 --gpus none",
    "lazyformer lm evaluate": "",
    "lazyformer import checkpoints": "--sublayer-pattern M4",
    "lazyformer lm compare": COMPARE,
    "lazyformer search data": f"{SEARCH} {SIZES} --tokens-per-sample 32",
    "lazyformer search wikitext": f"{SEARCH} {LANGUAGE_MODEL}",
    "lazyformer plan": "",
    "lazyformer pattern show": "--tokens 8 --heads 2",
    "lazyformer bench": f"--arch lazyformer_m2x6_s_tiny --what encoder {BENCH}",
    "lazyformer bench --arch transformer_xl_base": f"--arch transformer_xl_tiny --mem-len 8 {BENCH}",
    "lazyformer bench table4": "--arch distilbert_tiny --tokens 8 --rounds 2",
    "lazyformer bench kinds": "--lengths 16 --heads 2x4 --rounds 2",
    "lazyformer bench backends": "--lengths 16 --layers 1 --tokens 16 --rounds 2 --output measured.json",
    "lazyformer pretrain": f"{PRETRAIN} {PATTERN} --sequences-per-update 4",
    "lazyformer pretrain bert_base data --sublayer-pattern": f"{PRETRAIN} --sequences-per-update 4",
    "lazyformer pretrain-phases": f"{PRETRAIN} {PATTERN} --sequences-per-update 4",
    "lazyformer pretrain par_bert_base.yaml": (
        f"--sequences-per-update 4 {HYDRA_LAUNCHED} task.tokens_per_sample=32 model.sublayer_pattern=M2x2"
    ),
    "lazyformer pretrain lazyformer_m2x6_s.yaml": (
        f"--sequences-per-update 4 {HYDRA_LAUNCHED} task.tokens_per_sample=32 model.sublayer_pattern=M2x2"
    ),
    "scripts/preprocess_wiki_books.sh": "--dry-run",
    "scripts/reproduce_lazyformer.sh": "--plan",
    "lazyformer finetune-squad": f"{SQUAD_WINDOWS} {SQUAD_RUN}",
    "lazyformer squad": "",
    "lazyformer squad prepare": SQUAD_WINDOWS,
    "lazyformer squad run --checkpoint": SQUAD_RUN,
    "lazyformer squad run --data": f"{SQUAD_WINDOWS} {SQUAD_RUN}",
    "lazyformer finetune": "--tasks CoLA --lrs 1e-3 --seeds 1 --epochs 1 --max-train-rows 40 --gpus none",
    "scripts/prepare_wikitext103.sh": "--from my_wikitext --unofficial",
    "lazyformer lm train": (
        f"{LANGUAGE_MODEL} --sublayer-pattern sff --rows-per-update 4 --max-update 2 --num-workers 0"
    ),
    "scripts/compare_language_models.sh": COMPARE,
    "fairseq-train data": f"{PRETRAIN} {PATTERN} --batch-size 4 --sequences-per-update 8 --cpu",
    "fairseq-train squad_data": (
        f"{SIZES} {PATTERN} --max-update 2 --cpu --tokens-per-sample 64 --doc-stride 16 --max-question-tokens 16"
    ),
    "fairseq-train glue_data/CoLA": f"{SIZES} {PATTERN} --max-update 2 --cpu",
    "fairseq-hydra-train --config-dir configs/pretraining --config-name lazyformer_m2x6_s": (
        f"{HYDRA_PRETRAIN} model.sublayer_pattern=M2x2"
    ),
    "fairseq-hydra-train --config-dir configs/pretraining --config-name bert_base": HYDRA_PRETRAIN,
    "fairseq-hydra-train --config-dir configs/finetuning": (
        f"{HYDRA} model.sublayer_pattern=M2x2 task.tokens_per_sample=64"
    ),
}
# Commands that need a network, an official text or a whole machine, and the tests that run them.
TESTED_ELSEWHERE = {
    "make ": "test_setup.py",
    "pip install": "test_setup.py",
    "hf download": "huggingface/reading/test_refused_folders.py",
    "scripts/download_wikipedia.sh": "test_corpus_scripts.py",
    "scripts/download_books.sh": "test_corpus_scripts.py",
    "scripts/prepare_enwik8.sh": "test_lm_scripts.py",
    "scripts/prepare_text8.sh": "test_lm_scripts.py",
    "scripts/bench_gpu.sh": "test_bench_gpu_script.py",
    "lazyformer lm prepare": "language_modeling/test_commands.py",
}
# Every block of this one is in tests/test_a_new_kind.py.
WALK_THROUGH = "docs/add_a_kind.md"
QUICK = ("README.md", "docs/training.md", "docs/patterns.md", "docs/data.md", "docs/your_tokenizer.md",
         "docs/reproduce.md")  # fmt: skip


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
    seen = (
        set() if page == "README.md" else {code for _, block in blocks_of("README.md") for code in commands_of(block)}
    )
    result = []
    for language, block in blocks_of(page):
        if language == "python":
            result.append([sys.executable, "-c", block])
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
    """Where a user stands: the checkout, texts of theirs, files of GLUE, of SQuAD and of a BERT."""
    from other_tokenizers import write_bert_files  # which skips a test where the library is not there

    for name in ("lazyformer_fairseq", "configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_toy_wikitext(tmp_path / "my_wikitext")
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "my_texts" / "toy.txt").write_text("\n\n".join(toy_texts(150)))
    write_toy_glue(tmp_path / "glue_data", train=40, valid=10)
    write_articles(tmp_path / "squad_data", train=5, dev=1)
    write_bert_files(tmp_path / "my_bert")
    return tmp_path


def add_what_pages_begin_with(folder: Path) -> None:
    """Pre-training data, checkpoints of several names and a text for language models."""
    shutil.copytree(BEFORE / "data", folder / "data")
    shutil.copytree(BEFORE / "tokenizer", folder / "data" / "tokenizer")
    for name in ("lazyformer_m2x6_s", "bert_base", "lazyformer_m2x2", "par_bert_base", "bert_base_absolute"):
        shutil.copytree(BEFORE / "tokenizer", folder / "checkpoints" / name / "tokenizer")
        shutil.copy(BEFORE / "checkpoint_last.pt", folder / "checkpoints" / name)
        write_run(folder / "checkpoints" / name / "train.log", [9.0, 8.5])
    prepare("wikitext", folder / "my_wikitext", folder / "wikitext-2")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page in QUICK else [pytest.mark.slow])
        for page in PAGES
        if blocks_of(page) and page != WALK_THROUGH
    ],
)  # fmt: skip
@pytest.mark.timeout(3600)
def test_every_command_runs(users_folder, page):
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(users_folder),
    }
    if page != "README.md":
        add_what_pages_begin_with(users_folder)
    if "bert-base-uncased" in PAGES[page]:
        save_tiny(users_folder / "bert-base-uncased")
    for command in things_to_run(page):
        run = subprocess.run(command, cwd=users_folder, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, f"{shlex.join(command)}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
        assert "Traceback" not in run.stderr
        if "fill_mask" in command[-1]:
            assert len(re.findall(r"^\d+%  ", run.stdout, re.MULTILINE)) == 3


def test_the_blocks_alone_learn_in_plain_torch():
    [(_, classifier)] = blocks_of("docs/use_in_your_model.md")
    use = """
import sys
import torch

torch.manual_seed(1)
series, labels, lengths = torch.randn(64, 12, 6), torch.randint(3, (64,)), torch.randint(6, 13, (64,))
series[torch.arange(64), lengths - 1, 0] = 4.0 * (labels - 1)  # the last measurement tells
is_padding = torch.arange(12) >= lengths[:, None]
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
for _ in range(60):
    loss = nn.functional.cross_entropy(model(series, is_padding), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
right = (model(series, is_padding).argmax(-1) == labels).float().mean().item()
assert right > 0.9, right
alone = model(series[:1, : lengths[0]])
torch.testing.assert_close(model(series[:1], is_padding[:1]), alone, atol=1e-4, rtol=1e-4)
assert "fairseq" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", classifier + use], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("start", "file"), TESTED_ELSEWHERE.items())
def test_what_is_tested_elsewhere_is_in_a_page_and_in_that_test(start, file):
    commands = [code for page in PAGES for _, block in blocks_of(page) for code in commands_of(block)]
    assert any(command.startswith(start) for command in commands)
    assert start.split()[-1].split("/")[-1] in (ROOT / "tests" / file).read_text()


# --- Tables


def rows_of(page: str, columns: int) -> list[list[str]]:
    """The cells of a page's table rows of so many columns."""
    rows = (re.split(r"(?<!\\)\|", line.strip("|")) for line in PAGES[page].splitlines() if line.startswith("|"))
    return [[cell.strip(" `") for cell in row] for row in rows if len(row) == columns]


def test_the_estimates_for_one_gpu_follow_their_formulas():
    rows = {name: ARCHITECTURES[name] for name in ("bert_small", "lazyformer_small")}
    forward, memory = [], []
    for row in rows.values():
        sizes = EncoderSizes(32_768, row.encoder_embed_dim, row.encoder_ffn_embed_dim, 8, 512, 32)
        forward.append(count_flops(row.sublayer_pattern, sizes, 512, predicted=77))
        attending = expand(row.sublayer_pattern).count("s")
        bytes_a_token = 34 * 512 * 8 + 5 * 8 * 512 * attending + 1.5 * 32_768
        memory.append((16 * count_parameters_by_formula(row.sublayer_pattern, sizes), 512 * bytes_a_token))
    assert "32.7 GFLOP for `bert_small`, 31.6 GFLOP for `lazyformer_small`" in PAGES["docs/one_gpu.md"]
    assert [f"{flops / 1e9:.1f}" for flops in forward] == ["32.7", "31.6"]
    hours = [row for row in rows_of("docs/one_gpu.md", columns=4) if row[1].isdigit()]
    assert len(hours) == 5
    for _, peak, *written in hours:
        assert written == [f"{3 * flops * 256 * 100_000 / (float(peak) * 1e12 * 0.3) / 3600:.1f}" for flops in forward]
    gigabytes = [row for row in rows_of("docs/one_gpu.md", columns=3) if row[0].isdigit()]
    assert len(gigabytes) == 3
    for batch, *written in gigabytes:
        assert written == [f"{(fixed + int(batch) * each) / 1e9:.1f}" for fixed, each in memory]


def test_the_table_of_architectures_is_the_one_in_the_code():
    named = {**ARCHITECTURES, **CAUSAL_ARCHITECTURES}
    written = {cells[0]: cells[1:] for cells in rows_of("docs/architectures.md", columns=5) if cells[0] in named}
    assert written.keys() == {name for name in named if not name.endswith("_tiny")}
    for name, cells in written.items():
        row = named[name]
        if name in ARCHITECTURES:
            sizes = (row.encoder_ffn_embed_dim, row.encoder_embed_dim, row.encoder_attention_heads)
            parameters = count_parameters(name)
        else:
            sizes = (row.decoder_ffn_embed_dim, row.decoder_embed_dim, row.decoder_attention_heads)
            parameters = count_causal_parameters(name, 267_735 if row.adaptive_softmax_cutoff else 204)
        counted = f"{parameters / 1e6:.1f}M"
        assert cells == [row.sublayer_pattern, ", ".join(map(str, sizes)), counted, row.source], name


CONFIGS = {
    "Encoders": LazyFormerConfig,
    "Language models": CausalLMConfig,
    "Every task": ReliabilityConfig,
    "`--task full_sentences_masked_lm`": FullSentencesMaskedLMConfig,
    "`--task glue`": GlueConfig,
    "`--task squad`": SquadConfig,
    "`--task stream_language_modeling`": StreamLanguageModelingConfig,
    "`--criterion continued_masked_lm`": ContinuedMaskedLMConfig,
    "`--optimizer fused_adam`": FusedAdamConfig,
    "`--optimizer nvlamb`": NvLambConfig,
    "`--lr-scheduler linear_warmup`": LinearWarmupConfig,
    "`--lr-scheduler polynomial_warmup`": PolynomialWarmupConfig,
}
SET_BY_ARCH = {
    LazyFormerConfig: ARCHITECTURES["bert_base"].options(),
    CausalLMConfig: CAUSAL_ARCHITECTURES["transformer_xl_base"].options(),
}


def own_options(config: type[FairseqDataclass]) -> list[Field]:
    """Those that become flags and are not inherited from another section."""
    inherited = () if config is ReliabilityConfig else {field.name for field in fields(ReliabilityConfig)}
    return [
        field
        for field in fields(config)
        if "help" in field.metadata and field.default not in (MISSING, REQUIRED) and field.name not in inherited
    ]


def table_of_options(config: type[FairseqDataclass]) -> str:
    """As Markdown: docs/options.md holds it to the letter."""
    lines = []
    for field in own_options(config):
        default = "off" if field.default is False else "" if field.default is None else str(field.default)
        default = "the arch's" if field.name in SET_BY_ARCH.get(config, ()) else default
        text = field.metadata["help"].replace("<", r"\<")
        lines.append(f"| `--{field.name.replace('_', '-')}` | {default} | {text} |")
    return "\n".join(lines)


@pytest.mark.parametrize(("section", "config"), CONFIGS.items(), ids=[config.__name__ for config in CONFIGS.values()])
def test_the_table_of_options_is_that_of_the_code(section, config):
    text = PAGES["docs/options.md"].split(f"## {section}\n")[1].split("\n## ")[0]
    written = "\n".join(line for line in text.splitlines() if line.startswith("| `--"))
    assert written == table_of_options(config)


def test_the_table_of_letters_is_the_one_in_the_code():
    lines = PAGES["docs/patterns.md"].splitlines()
    rows = [f"| `{kind.letter}` | {kind.name} | {kind.help} | {kind.source} |" for kind in kinds()]
    assert [line for line in lines if re.match(r"\| `.` \|", line)] == rows
    settings = [
        f"| `{kind.letter}[{setting.name}={setting.default}]` | {setting.unit} | {setting.help} |"
        for kind in kinds()
        for setting in kind.settings
        if setting not in attention_kinds.SETTINGS
    ]
    assert [line for line in lines if re.match(r"\| `.\[", line)] == settings


def test_the_table_of_settings_is_the_one_in_the_code():
    def values(setting: Setting) -> str:
        return ", ".join(filter(None, [setting.unit, *setting.choices]))

    rows = [
        f"| {each.name} | {values(each)} | {each.default or 'none'} | {each.help} |"
        for each in attention_kinds.SETTINGS
    ]
    lines = PAGES["docs/attention_kinds.md"].splitlines()
    start = lines.index("| setting | values | default | |")
    assert lines[start + 2 : start + 2 + len(rows)] == rows


def test_patterns_become_what_the_page_says():
    text = PAGES["docs/patterns.md"].split("| you write |")[1].split("\n\n")[0]
    patterns = [re.findall("`(.*?)`", line) for line in text.splitlines() if line.startswith("| `")]
    assert len(patterns) >= 6
    for first, *others in patterns:
        assert {expand(first)} >= {expand(other) for other in others}


# --- Links and names

# docs/add_a_kind.md walks through the one, a command writes the other.
MADE_BY_READERS = {"lazyformer_fairseq/modules/sublayers/local_mean.py", "modeling_lazyformer.py"}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}, target


def test_the_index_has_every_page():
    linked = set(re.findall(r"^\| \[[\w.]+\]\(([\w.]+)\)", PAGES["docs/README.md"], re.MULTILINE))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("page", PAGES)
def test_python_files_that_a_page_names_are_there(page):
    there = [f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
    for name in set(re.findall(r"\w[\w/]*\.py\b", PAGES[page])) - MADE_BY_READERS:
        assert any(path.endswith(f"/{name}") for path in there), name


@pytest.mark.parametrize("page", PAGES)
def test_files_and_folders_that_a_page_names_are_there(page):
    named = set(re.findall(r"(?<![\w/.-])(?:scripts|configs|docs|tests|lazyformer_fairseq)/[\w./-]*\w", PAGES[page]))
    in_package = set(re.findall(r"`((?:patterns|modules|models|data|tasks|reliability)/[\w./]+\w)`", PAGES[page]))
    for path in named | {f"lazyformer_fairseq/{path}" for path in in_package}:
        assert (ROOT / path).exists() or path in MADE_BY_READERS, path


def test_the_tree_in_contributing_is_the_packages():
    tree = PAGES["CONTRIBUTING.md"].split("```")[1]
    named = set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))
    assert named == {path.parent.name for path in (ROOT / "lazyformer_fairseq").glob("*/__init__.py")}


def test_the_readme_is_short():
    assert len(PAGES["README.md"].split()) < 1000
