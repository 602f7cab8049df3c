"""Text that is at hand without a network, and a small task made of held-out text; for the demo and for reproductions.

``python -m lazyformer_fairseq.experiments.demo.text FOLDER SHARE`` writes both, the task as GLUE's CoLA.

The text is English prose that every CPython carries: the topics of ``help()``, docstrings and comments of the standard
library, some 1.4 MB. The modules are parsed, never imported. What is not prose (code, tables, headings, lists of names)
is left out, paragraph by paragraph.

The task is in CoLA's layout: real sentences against sentences with their words shuffled. ``train.tsv`` and ``dev.tsv``
have no header; columns: source, label (1 acceptable), ``*`` where not, sentence.
"""

import ast
import json
import random
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from inspect import cleandoc
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple, Optional, Union

from lazyformer_fairseq.corpus.duplicates import draw
from lazyformer_fairseq.corpus.sentences import SentenceSplitter
from lazyformer_fairseq.corpus.stages import clean_documents
from lazyformer_fairseq.corpus.steps import Document
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import atomic_file, atomic_folder

PROSE = "prose.jsonl"
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
WORDS_OF_PROSE = 6

COMMENT = re.compile(r"(?:^[ \t]*#(?:[ \t].*)?\n)+", re.MULTILINE)
COMMENT_MARK = re.compile(r"^[ \t]*# ?", re.MULTILINE)
LIST_MARK = re.compile(r"^\s*(?:[*+-]|\(?\d+[.)]|\(?[a-z]\))\s+")
CODE_LINE = re.compile(r"^\s*(?:>>>|\.\.\.( |$)|\.\. |:\w+.*:|#|\$ |@\w+|\||\+[-=]|[-=~*^_]{3,}\s*$|[-=]{3,} )")
INLINE_ROLE = re.compile(r":(?:\w+:)?\w+:`~?([^`]*)`")
INLINE_LITERAL = re.compile(r"``?([^`\n]+)``?")
EMPHASIS = re.compile(r"(?<!\w)(\*{1,2})(\w(?:[^*\n]*\w)?)\1(?!\w)")
CODE_SIGNS = re.compile(r"::=|->|==|!=|\w\(.*,.*\)|[{}\\|]|[=<>+*/&^%]\s|__\w+__\s*=|\w=\w|\s=\s")
FUNCTION_WORD = re.compile(
    r"\b(?:the|a|an|is|are|was|be|of|to|in|on|for|if|it|that|this|which|when|and|or|not|with|from|by|as|can|will)\b"
)
NOT_FOR_READERS = re.compile(r"\b(?:XXX|TODO|FIXME|Copyright|Licensed)\b")
PLAIN_WORD = re.compile(r"^[\"'(\[]*[A-Za-z]+(?:['’-][A-Za-z]+)*[\"'.,:;!?)\]]*$")


class Prose(NamedTuple):
    """What a topic or a module says, in paragraphs."""

    name: str
    paragraphs: tuple[str, ...]


def python_prose() -> Iterator[Prose]:
    """One document a topic, then one a module, each paragraph once: the same on every run of one Python version."""
    seen: set[str] = set()
    for name, texts in _sources():
        paragraphs = []
        for paragraph in (paragraph for text in texts for paragraph in paragraphs_of_prose(text)):
            if paragraph not in seen:
                seen.add(paragraph)
                paragraphs.append(paragraph)
        if paragraphs:
            yield Prose(name, tuple(paragraphs))


def write_prose(path: Path) -> Path:
    """Writes the documents as JSON lines, unless the file is there. Returns `path`."""
    if not path.exists():
        with atomic_file(path) as file:
            for prose in python_prose():
                file.write((json.dumps({"text": "\n".join(prose.paragraphs)}) + "\n").encode())
    return path


def _sources() -> Iterator[tuple[str, list[str]]]:
    for name in sorted(topics):
        yield f"topic:{name}", [topics[name]]
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        place = file.relative_to(library)
        if not SKIPPED_FOLDERS & set(place.parts):
            yield f"module:{place.as_posix()}", texts_of_module(file)


def texts_of_module(file: Path) -> list[str]:
    """The docstrings, then the comments of a module, each in order of place; none of a file that is not Python."""
    try:
        source = file.read_text(encoding="utf-8")
        return docstrings(source) + [COMMENT_MARK.sub("", comment) for comment in COMMENT.findall(source)]
    except (OSError, SyntaxError, ValueError):
        return []


def docstrings(source: str) -> list[str]:
    """Docstrings of a module, its classes and functions in order of place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the library's own source, such as invalid escapes
        tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for text in map(ast.get_docstring, nodes) if text]


def paragraphs_of_prose(text: str) -> Iterator[str]:
    """The paragraphs of English sentences in reStructuredText-like ``text``, unwrapped and without inline markup."""
    for block in _blocks(cleandoc(text).splitlines()):
        paragraph = _unwrapped(block)
        if paragraph is not None and _reads_like_english(paragraph):
            yield paragraph


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """Runs of lines between blank lines; an item of a list starts a new one."""
    block: list[str] = []
    for line in [*lines, ""]:
        if block and (not line.strip() or LIST_MARK.match(line)):
            yield block
            block = []
        if line.strip():
            block.append(line)


def _unwrapped(block: list[str]) -> Optional[str]:
    """The block as one line, or None where it is code, a table, a heading or of uneven indentation."""
    first, rest = LIST_MARK.sub("", block[0]), block[1:]
    indents = {len(line) - len(line.lstrip()) for line in rest}
    if len(indents) > 1 or any(CODE_LINE.match(line) for line in (first, *rest)):
        return None
    text = " ".join(" ".join((first, *rest)).split())
    text = INLINE_ROLE.sub(r"\1", text)
    text = INLINE_LITERAL.sub(r"\1", text)
    return EMPHASIS.sub(r"\2", text)


def _reads_like_english(paragraph: str) -> bool:
    words = paragraph.split()
    if (
        len(words) < WORDS_OF_PROSE
        or not re.match(r"[\"'(]?[A-Z]", paragraph)
        or not re.search(r"[.?!][\"')]*$", paragraph)
    ):
        return False
    if CODE_SIGNS.search(paragraph) or NOT_FOR_READERS.search(paragraph) or not FUNCTION_WORD.search(paragraph):
        return False
    return sum(bool(PLAIN_WORD.match(word)) for word in words) >= 0.8 * len(words)


# --- The task

FEWEST_WORDS, MOST_WORDS = 5, 25
FINAL_MARK = re.compile(r"[.?!]+$")
BRACKETS = ("()", "[]")
TRIES = 100
FEWEST_EXAMPLES = 20


def write_acceptability_task(
    documents: Iterable[Document],
    folder: Union[str, Path],
    valid_share: float,
    seed: int,
    train_size: int = 2000,
    dev_size: int = 500,
) -> dict[str, int]:
    """Writes ``folder/train.tsv`` and ``folder/dev.tsv``, whole or not at all, from held-out documents.

    Half of each file is real; a sentence appears once, as it is or shuffled, never as both. Where the text does not
    suffice, both files shrink in proportion.

    Args:
        documents: clean and with their fingerprints, see :func:`~lazyformer_fairseq.corpus.stages.clean_documents`.
        valid_share, seed: those of the corpus: what it trains on is left out here.

    Returns:
        the number of rows by split.

    Raises:
        UserError: too little text held out, or a folder that exists.
    """
    sentences = held_out_sentences(documents, valid_share, seed)
    if len(sentences) < FEWEST_EXAMPLES:
        raise UserError(
            f"acceptability task: only {len(sentences)} sentences of {FEWEST_WORDS} to {MOST_WORDS} words are held out "
            f"and {FEWEST_EXAMPLES} are needed; give more text, and a new folder for it"
        )
    chance = random.Random(seed)
    chance.shuffle(sentences)
    fits = min(1.0, len(sentences) / (train_size + dev_size))
    sizes = {"train": int(train_size * fits) // 2 * 2, "dev": int(dev_size * fits) // 2 * 2}
    with atomic_folder(Path(folder)) as unfinished:
        for split, size in sizes.items():
            chosen, sentences = sentences[:size], sentences[size:]
            half = len(chosen) // 2
            rows = [f"prose\t1\t\t{sentence}\n" for sentence in chosen[:half]]
            rows += [f"prose\t0\t*\t{shuffle_words(sentence, chance)}\n" for sentence in chosen[half:]]
            chance.shuffle(rows)
            (unfinished / f"{split}.tsv").write_text("".join(rows), encoding="utf-8")
    return sizes


def held_out_sentences(documents: Iterable[Document], valid_share: float, seed: int) -> list[str]:
    """Sentences of 5 to 25 words that stand in held-out documents alone, each once, in order of place."""
    split_sentences = SentenceSplitter()
    trained_on, held_out = set(), {}
    for document in documents:
        sentences = [sentence for paragraph in document.text.split("\n") for sentence in split_sentences(paragraph)]
        if draw(document.metadata["fingerprint"], seed) < valid_share:
            held_out.update(dict.fromkeys(sentences))
        else:
            trained_on.update(sentences)
    return [sentence for sentence in held_out if sentence not in trained_on and _is_usable(sentence)]


def shuffle_words(sentence: str, chance: random.Random) -> str:
    """The sentence with its words in another order; the final mark stays, and so does a capital at the start.

    Raises:
        UserError: no other order was found (one word, repeated).
    """
    bare = FINAL_MARK.sub("", sentence)
    words = bare.split()
    if words[0][1:].islower():  # no name of capitals and no "I": its capital comes from its place alone
        words[0] = words[0].lower()
    for _ in range(TRIES):
        shuffled = chance.sample(words, len(words))
        if shuffled != words and shuffled[-1][-1] not in ",;:":  # ",." at the end would give the answer away
            return shuffled[0][0].upper() + " ".join(shuffled)[1:] + sentence[len(bare) :]
    raise UserError(f"the words of {sentence!r} cannot be shuffled: {TRIES} tries gave no other order")


def _is_usable(sentence: str) -> bool:
    bare = FINAL_MARK.sub("", sentence)
    words = bare.split()
    return (
        bare != sentence
        and FEWEST_WORDS <= len(words) <= MOST_WORDS
        and len({word.lower() for word in words}) >= FEWEST_WORDS
        and sentence[0].isupper()
        and words[-1][-1] not in ",;:"
        and all(map(_has_its_marks_in_pairs, words))
        and "\t" not in sentence
    )


def _has_its_marks_in_pairs(word: str) -> bool:
    """Whether no quote or bracket of the word has its partner elsewhere: torn apart they would give the answer away."""
    in_single_quotes = word.startswith("'") == word.rstrip(",;:").endswith("'")
    return in_single_quotes and word.count('"') % 2 == 0 and all(word.count(a) == word.count(b) for a, b in BRACKETS)


if __name__ == "__main__":
    folder, share = Path(sys.argv[1]), float(sys.argv[2])
    written, task = write_prose(folder / PROSE), folder / "glue" / "CoLA"
    if not task.exists():
        write_acceptability_task(clean_documents([str(written)]), task, share, seed=1)
