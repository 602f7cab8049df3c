"""The tables of the pages are held to the code that they describe; links and names of files lead somewhere."""

import re
import shlex
from argparse import SUPPRESS
from dataclasses import MISSING, fields
from importlib.metadata import version

import pytest
import yaml
from click.testing import CliRunner
from fairseq.dataclass import FairseqDataclass
from helpers import PAGES, ROOT, count_parameters
from omegaconf import MISSING as REQUIRED

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import ContinuedMaskedLMConfig
from lazyformer_fairseq.fairseq_plugin.models.config import CausalLMConfig, MaskedLMConfig
from lazyformer_fairseq.fairseq_plugin.optim.optimizers import FusedAdamConfig, MuonConfig, NvLambConfig
from lazyformer_fairseq.fairseq_plugin.optim.schedules import PolynomialWarmupConfig, WarmupConfig, WSDConfig
from lazyformer_fairseq.fairseq_plugin.reliability.options import ReliabilityConfig
from lazyformer_fairseq.fairseq_plugin.tasks.finetuning import GlueConfig, SquadConfig
from lazyformer_fairseq.fairseq_plugin.tasks.full_sentences_masked_lm import (
    FullSentencesMaskedLMConfig,
    MaskedPermutedLMConfig,
)
from lazyformer_fairseq.fairseq_plugin.tasks.stream_language_modeling import StreamLanguageModelingConfig
from lazyformer_fairseq.patterns import attention_variants
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import expand
from lazyformer_fairseq.patterns.kinds import kinds


def rows_of(page: str, columns: int) -> list[list[str]]:
    """The cells of a page's table rows of so many columns."""
    rows = (re.split(r"(?<!\\)\|", line.strip("|")) for line in PAGES[page].splitlines() if line.startswith("|"))
    return [[cell.strip(" `") for cell in row] for row in rows if len(row) == columns]


@pytest.mark.slow
def test_the_table_of_architectures_is_the_one_in_the_code():
    named = {**ARCHITECTURES, **CAUSAL_ARCHITECTURES}
    written = {cells[0]: cells[1:] for cells in rows_of("docs/patterns.md", columns=5) if cells[0] in named}
    assert written.keys() == {name for name in named if not name.endswith("_tiny")}
    for name, cells in written.items():
        row = named[name]
        sizes, half = row.options(), "encoder" if name in ARCHITECTURES else "decoder"
        sizes = [str(sizes[f"{half}_{size}"]) for size in ("ffn_embed_dim", "embed_dim", "attention_heads")]
        of_characters = name in CAUSAL_ARCHITECTURES and not row.adaptive_softmax_cutoff
        counted = f"{count_parameters(name, 204 if of_characters else 0) / 1e6:.1f}M"
        assert cells == [row.sublayer_pattern, "/".join(sizes), counted, row.source], name


CONFIGS = {
    "Encoders": MaskedLMConfig,
    "Language models": CausalLMConfig,
    "Every task": ReliabilityConfig,
    "`--task full_sentences_masked_lm`": FullSentencesMaskedLMConfig,
    "`--task masked_permuted_lm`": MaskedPermutedLMConfig,
    "`--task glue`": GlueConfig,
    "`--task squad`": SquadConfig,
    "`--task stream_language_modeling`": StreamLanguageModelingConfig,
    "`--criterion continued_masked_lm`": ContinuedMaskedLMConfig,
    "`--optimizer fused_adam`": FusedAdamConfig,
    "`--optimizer nvlamb`": NvLambConfig,
    "`--optimizer muon`": MuonConfig,
    "`--lr-scheduler linear_warmup`": WarmupConfig,
    "`--lr-scheduler polynomial_warmup`": PolynomialWarmupConfig,
    "`--lr-scheduler wsd`": WSDConfig,
}
SET_BY_ARCH = {
    MaskedLMConfig: ARCHITECTURES["bert_base"].options(),
    CausalLMConfig: CAUSAL_ARCHITECTURES["transformer_xl_base"].options(),
}


def table_of_options(config: type[FairseqDataclass]) -> str:
    """As Markdown, of those that become flags and are not inherited: docs/options.md holds it to the letter."""
    others = [other for other in CONFIGS.values() if other in config.__mro__[1:]]
    inherited = {field.name for other in others for field in fields(other)}
    lines = []
    for field in fields(config):
        text = field.metadata.get("help", SUPPRESS)
        if text == SUPPRESS or field.default in (MISSING, REQUIRED) or field.name in inherited:
            continue
        default = "off" if field.default is False else "" if field.default is None else str(field.default)
        default = "the arch's" if field.name in SET_BY_ARCH.get(config, ()) else default
        text = text.replace("<", r"\<")
        lines.append(f"| `--{field.name.replace('_', '-')}` | {default} | {text} |")
    return "\n".join(lines)


@pytest.mark.parametrize(("section", "config"), CONFIGS.items())
def test_the_table_of_options_is_that_of_the_code(section, config):
    text = PAGES["docs/options.md"].split(f"## {section}\n")[1].split("\n## ")[0]
    written = "\n".join(line for line in text.splitlines() if line.startswith("| `--"))
    assert written == table_of_options(config)


def example_of(setting: attention_variants.Setting) -> object:
    return setting.default or (setting.choices or (f"{setting.low:g}",))[0]


def test_the_tables_of_letters_and_of_settings_are_those_in_the_code():
    lines = PAGES["docs/patterns.md"].splitlines()
    rows = [f"| `{kind.letter}` | {kind.name} | {kind.help} | {kind.source} |" for kind in kinds()]
    assert [line for line in lines if re.match(r"\| `.` \|", line)] == rows
    of_kinds = [
        f"| `{kind.letter}[{setting.name}={example_of(setting)}]` | {setting.unit} | {setting.help} |"
        for kind in kinds()
        for setting in kind.settings
        if setting not in attention_variants.SETTINGS
    ]
    assert [line for line in lines if re.match(r"\| `.\[", line)] == of_kinds
    rows = []
    for each in attention_variants.SETTINGS:
        values = ", ".join(filter(None, [each.unit, *each.choices]))
        rows.append(f"| {each.name} | {values} | {each.default or 'none'} | {each.help} |")
    lines = PAGES["docs/patterns.md"].splitlines()
    start = lines.index("| setting | values | default | meaning |")
    assert lines[start + 2 : start + 2 + len(rows)] == rows


def test_patterns_become_what_the_page_says():
    text = PAGES["docs/patterns.md"].split("| pattern | meaning |")[1].split("\n\n")[0]
    patterns = [re.findall("`(.*?)`", line) for line in text.splitlines() if line.startswith("| `")]
    assert len(patterns) >= 6
    for first, *others in patterns:
        assert {expand(first)} >= {expand(other) for other in others}


# --- what a reader sees

SAME_EVERYWHERE = ("lazyformer pattern show ", "lazyformer plan ")
SHOWN = [
    (command.replace("\\\n", " "), shown)
    for page in sorted(PAGES.keys() - {"docs/add_a_kind.md"})
    for command, shown in re.findall(r"^```bash\n([^`]*)\n```\n\n```\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)
    if command.startswith(SAME_EVERYWHERE)
]


# A plan measures batches of full size.
SHOWN = [pytest.param(*row, marks=[pytest.mark.slow] * ("plan" in row[0]), id=row[0][11:40]) for row in SHOWN]


@pytest.mark.parametrize(("command", "shown"), SHOWN)
def test_what_is_shown_below_a_command_is_what_it_prints(command, shown):
    result = CliRunner().invoke(main, shlex.split(command)[1:], catch_exceptions=False)
    assert result.stdout.rstrip() == shown.rstrip()


@pytest.mark.parametrize("page", [page for page in PAGES if re.match("docs/[a-z]", page)])
def test_a_page_begins_with_a_command_and_what_it_prints(page):
    head = r"# [^\n]+\n\n(## [^\n]+\n\n)?```bash\n[^`]+\n```\n\n```\n[^`]+"
    assert re.match(head, PAGES[page]), PAGES[page][:300]


# --- links and names of files

# docs/add_a_kind.md walks through the one, a command writes the other.
MADE_BY_READERS = {"my_kinds/local_mean.py", "my_kinds/__init__.py", "modeling_lazyformer.py"}


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


def test_the_index_has_every_page_and_python_files_that_pages_name_are_there():
    linked = set(re.findall(r"^\| \[[\w.]+\]\(([\w.]+)\)", PAGES["docs/README.md"], re.MULTILINE))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    roots = (ROOT / name for name in ("lazyformer_fairseq", "scripts", "tests"))
    there = ["/setup.py", *(f"/{path.relative_to(ROOT)}" for root in roots for path in root.rglob("*.py"))]
    for page, text in PAGES.items():
        for name in set(re.findall(r"\w[\w/]*\.py\b", text)) - MADE_BY_READERS:
            assert any(path.endswith(f"/{name}") for path in there), (page, name)


@pytest.mark.parametrize("page", PAGES)
def test_files_and_folders_that_a_page_names_are_there(page):
    named = set(re.findall(r"(?<![\w/.-])(?:scripts|configs|docs|tests|lazyformer_fairseq)/[\w./-]*\w", PAGES[page]))
    folders = "patterns|modules|fairseq_plugin|data|finetuning|experiments|measure|storage"
    in_package = set(re.findall(rf"`((?:{folders})/[\w./]+\w)`", PAGES[page]))
    for path in named | {f"lazyformer_fairseq/{path}" for path in in_package}:
        assert (ROOT / path).exists() or path in MADE_BY_READERS, path


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    required = {"cff-version", "message", "title", "authors"}
    assert citation.keys() >= required and citation["version"] == version("lazyformer_fairseq")


def test_the_tree_in_contributing_is_the_packages():
    tree = PAGES["CONTRIBUTING.md"].split("```")[1]
    named = set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))
    assert named == {path.parent.name for path in (ROOT / "lazyformer_fairseq").glob("*/__init__.py")}
