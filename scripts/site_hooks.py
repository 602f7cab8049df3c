"""mkdocs hooks for the documentation site, which mkdocs.yml configures.

They add the pages that are not in docs/: the reference, which is generated from the code, and the pages in the root of
the repository. Links between pages work as on GitHub; links to other files lead to the repository.
"""

import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import lazyformer_fairseq
from lazyformer_fairseq import huggingface
from lazyformer_fairseq.cli import main

ROOT = Path(__file__).parent.parent
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
PACKAGE = "lazyformer_fairseq"

PYTHON = [
    "evaluation.inference.TrainedModel",
    "evaluation.inference.Filling",
    "evaluation.inference.Prediction",
    "data.datasets.question_windows.FoundAnswer",
    "data.masked_text.MaskedText",
    "errors.UserError",
]
MODULES = [
    "modules.networks.encoder.Encoder",
    "modules.networks.encoder.init_bert_weights",
    "modules.networks.masked_lm.MaskedLM",
    "modules.networks.causal_lm.CausalLM",
    "modules.networks.causal_decoder.CausalDecoder",
    "modules.sublayers.interface.Sublayer",
    "modules.sublayers.interface.SublayerOptions",
    "modules.sublayers.interface.Context",
    "patterns.grammar.PlannedSublayer",
    "patterns.kinds.Kind",
    "patterns.kinds.register",
    "patterns.attention_variants.Setting",
]
OBJECTIVES = [
    "training.objectives.interface.Objective",
    "training.objectives.interface.Scalar",
    "training.objectives.masked_lm.MaskedLMObjective",
    "training.objectives.permuted_lm.PermutedLMObjective",
    "training.objectives.stream_lm.StreamLMObjective",
    "training.objectives.labelled_texts.LabelledTextsObjective",
    "training.objectives.tags.TagsObjective",
    "training.objectives.spans.SpansObjective",
]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages in the root of the repository and the reference pages."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    public = {name: module for name, module in lazyformer_fairseq.PUBLIC.items() if module != "huggingface"}
    pages = {
        "python": [
            "# Python",
            f"Importing `{PACKAGE}` is fast, because each name is loaded when it is first used.",
            *lazy_names(PACKAGE, {**public, "register": "fairseq_plugin.registration"}),
            *map(docstring, PYTHON),
        ],
        "modules": [
            "# Modules",
            "These torch modules can be used in [your own model](../patterns.md#in-your-own-model), or to implement "
            "[a kind of sublayer](../add_a_kind.md).",
            *map(docstring, MODULES),
        ],
        "objectives": [
            "# Objectives",
            "An objective defines a training task: it builds the model, yields batches, and returns loss and metrics.",
            *map(docstring, OBJECTIVES),
        ],
        "huggingface": [
            "# Hugging Face classes",
            "These are models, a Trainer and a collator for transformers. For examples, see "
            "[Hugging Face](../huggingface.md) and [training without fairseq](../trainers.md).",
            *lazy_names(f"{PACKAGE}.huggingface", huggingface.PARTS),
        ],
        "command_line": command_parts(click.Context(main, info_name="lazyformer")),
    }
    for name, parts in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content="\n\n".join(parts)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Rewrite a page's links so that they lead to other pages of the site or to files in the repository."""
    uri = page.file.src_uri
    if uri.startswith("reference/"):
        return markdown
    path = uri if uri in ROOT_PAGES else f"docs/{uri}"

    def rewritten(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link["target"]))
        place = f"{config.repo_url}/blob/HEAD/{target}"
        if target in ROOT_PAGES or target.startswith("docs/"):
            place = posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(uri))
        return f"]({place}{link['anchor']})"

    return re.sub(r"\]\((?!https?:|#)(?P<target>[^)#\s]+)(?P<anchor>[^)\s]*)\)", rewritten, markdown)


def on_page_content(html: str, **_: object) -> str:
    """Remove the roles of docstrings, such as ``:func:``, so that only the name is shown."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):<code>~?", "<code>", html)


def docstring(path: str, shown: str = "") -> str:
    """Return the directive that mkdocstrings replaces with an object's docstring.

    Args:
        path: module and name of the object, within the package.
        shown: the path to import it from, if different.
    """
    shown = shown or f"{PACKAGE}.{path}"
    name = path.rpartition(".")[2]
    return f'::: {PACKAGE}.{path}\n    options: {{heading: "{shown}", toc_label: "{name}"}}'


def lazy_names(package: str, modules: dict[str, str]) -> Iterator[str]:
    """Yield the directives for a package's public names, given the modules that define them."""
    subpackage = package.removeprefix(PACKAGE).removeprefix(".")
    for name, module in modules.items():
        path = ".".join(filter(None, [subpackage, module, name]))
        yield docstring(path, shown=f"{package}.{name}")


def command_parts(context: click.Context) -> Iterator[str]:
    """Yield a command's heading, usage, help and options in Markdown, then the same for its subcommands."""
    command = context.command
    yield f"{'#' * (1 + context.command_path.count(' '))} `{context.command_path}`"
    yield f"```\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```"
    for paragraph in inspect.cleandoc(command.help).split("\n\n"):
        _, keeps_lines, lines = paragraph.rpartition("\b\n")
        yield f"```\n{lines}\n```" if keeps_lines else escaped(paragraph)
    sections: dict[str, list[str]] = {}
    for option in command.get_params(context):
        if isinstance(option, click.Option) and "--help" not in option.opts:
            flags, text = option.get_help_record(context)
            item = f"- `{flags}`: {escaped(text)}"
            sections.setdefault(getattr(option, "section", "Options"), []).append(item)
    for title, items in sections.items():
        yield f"**{title}**"
        yield "\n".join(items)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from command_parts(click.Context(command.commands[name], info_name=name, parent=context))


def escaped(text: str) -> str:
    """Return a help text as Markdown, in which only backticks are special."""
    return re.sub(r"(`[^`]*`)|([*_<\[])", lambda found: found[1] or f"&#{ord(found[2])};", text)
