"""Training text that needs no download, and a small task built from its held-out part, for the demo and reproductions.

``python -m lazyformer_fairseq.experiments.prose FOLDER SHARE`` writes both to FOLDER, where SHARE is the fraction of
documents to hold out. The task takes the place of GLUE's CoLA, in ``FOLDER/glue/CoLA``.

The text is the English prose that ships with every CPython: the ``help()`` topics and the standard library's docstrings
and comments, about 1.4 MB in total. The modules are parsed, never imported. Paragraphs that are not prose, such as
code, tables, headings and lists of names, are skipped.

The task is to distinguish real sentences from sentences whose words have been shuffled. The files have the same layout
as CoLA's: ``train.tsv`` and ``dev.tsv`` have no header, and their columns are the source, the label (1 for acceptable),
``*`` if the sentence is unacceptable, and the sentence.
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
    """The paragraphs of prose in one help topic or one module."""

    name: str
    paragraphs: tuple[str, ...]


def python_prose() -> Iterator[Prose]:
    """Yield one document per help topic, then one per module, without duplicate paragraphs.

    The documents depend only on the Python version.
    """
    seen: set[str] = set()
    for name, texts in _sources():
        paragraphs = []
        for text in texts:
            for paragraph in paragraphs_of_prose(text):
                if paragraph not in seen:
                    seen.add(paragraph)
                    paragraphs.append(paragraph)
        if paragraphs:
            yield Prose(name, tuple(paragraphs))


def write_prose(path: Path) -> Path:
    """Write the documents as JSON lines unless the file already exists, and return `path`."""
    if not path.exists():
        with atomic_file(path) as file:
            for prose in python_prose():
                document = {"text": "\n".join(prose.paragraphs)}
                line = json.dumps(document) + "\n"
                file.write(line.encode())
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
    """Return a module's docstrings followed by its comments, or an empty list if the module cannot be parsed."""
    try:
        source = file.read_text(encoding="utf-8")
        return docstrings(source) + [COMMENT_MARK.sub("", comment) for comment in COMMENT.findall(source)]
    except (OSError, SyntaxError, ValueError):
        return []


def docstrings(source: str) -> list[str]:
    """Return the docstrings of a module, its classes and its functions in source order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as those about invalid escapes in the standard library
        tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for text in map(ast.get_docstring, nodes) if text]


def paragraphs_of_prose(text: str) -> Iterator[str]:
    """Yield the paragraphs of English prose in a reStructuredText document, unwrapped and without inline markup."""
    for block in _blocks(cleandoc(text).splitlines()):
        paragraph = _unwrapped(block)
        if paragraph is not None and _reads_like_english(paragraph):
            yield paragraph


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """Yield blocks of lines. A block ends at a blank line or before the next list item."""
    block: list[str] = []
    for line in [*lines, ""]:
        if block and (not line.strip() or LIST_MARK.match(line)):
            yield block
            block = []
        if line.strip():
            block.append(line)


def _unwrapped(block: list[str]) -> Optional[str]:
    """Return the block as one line, or None if it is code, a table or a heading, or is unevenly indented."""
    rest = block[1:]
    lines = [LIST_MARK.sub("", block[0]), *rest]
    indents = {len(line) - len(line.lstrip()) for line in rest}
    if len(indents) > 1 or any(CODE_LINE.match(line) for line in lines):
        return None
    words = " ".join(lines).split()
    text = " ".join(words)
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

FEWEST_WORDS = 5
MOST_WORDS = 25
FINAL_MARK = re.compile(r"[.?!]+$")
BRACKETS = ("()", "[]")
TRIES = 100
FEWEST_EXAMPLES = 20


def write_acceptability_task(
    documents: Iterable[Document],
    folder: Union[str, Path],
    valid_share: float,
    seed: int,
    sizes: tuple[int, int] = (2000, 500),
) -> dict[str, int]:
    """Write the acceptability task's ``train.tsv`` and ``dev.tsv`` atomically.

    The sentences come from held-out documents. In each file, half of the sentences are unchanged and half are shuffled.
    Each sentence appears only once. If there is too little text, both files shrink proportionally.

    Args:
        documents: clean documents with their fingerprints, as
            :func:`~lazyformer_fairseq.corpus.stages.clean_documents` yields them.
        folder: the task's folder, which is created.
        valid_share: the fraction of documents that the corpus holds out. Only these documents supply sentences.
        seed: the corpus's seed, which determines which documents are held out.
        sizes: the maximum number of rows in ``train.tsv`` and in ``dev.tsv``.

    Returns:
        The number of rows, by the name of the split.

    Raises:
        UserError: too little text is held out, or the folder exists.
    """
    sentences = held_out_sentences(documents, valid_share, seed)
    if len(sentences) < FEWEST_EXAMPLES:
        raise UserError(
            f"acceptability task: only {len(sentences)} sentences of {FEWEST_WORDS} to {MOST_WORDS} words are held "
            f"out, but {FEWEST_EXAMPLES} are needed; use more text and a new folder"
        )
    chance = random.Random(seed)
    chance.shuffle(sentences)
    fits = min(1.0, len(sentences) / sum(sizes))
    written = {}
    for split, size in zip(("train", "dev"), sizes, strict=True):
        per_label = int(size * fits) // 2
        written[split] = 2 * per_label
    with atomic_folder(Path(folder)) as unfinished:
        for split, size in written.items():
            chosen = sentences[:size]
            sentences = sentences[size:]
            half = len(chosen) // 2
            rows = [f"prose\t1\t\t{sentence}\n" for sentence in chosen[:half]]
            rows += [f"prose\t0\t*\t{shuffle_words(sentence, chance)}\n" for sentence in chosen[half:]]
            chance.shuffle(rows)
            (unfinished / f"{split}.tsv").write_text("".join(rows), encoding="utf-8")
    return written


def held_out_sentences(documents: Iterable[Document], valid_share: float, seed: int) -> list[str]:
    """Return, in order, the distinct sentences of 5 to 25 words that occur only in held-out documents."""
    split_sentences = SentenceSplitter()
    trained_on: set[str] = set()
    held_out: dict[str, None] = {}
    for document in documents:
        sentences = [sentence for paragraph in document.text.split("\n") for sentence in split_sentences(paragraph)]
        if draw(document.metadata["fingerprint"], seed) < valid_share:
            held_out.update(dict.fromkeys(sentences))
        else:
            trained_on.update(sentences)
    return [sentence for sentence in held_out if sentence not in trained_on and _is_usable(sentence)]


def shuffle_words(sentence: str, chance: random.Random) -> str:
    """Shuffle the words of a sentence, keeping the initial capital and the final punctuation.

    Raises:
        UserError: no different order was found, for example because the sentence repeats a single word.
    """
    bare = FINAL_MARK.sub("", sentence)
    words = bare.split()
    if words[0][1:].islower():  # neither an acronym nor "I", so capitalized only because it comes first
        words[0] = words[0].lower()
    for _ in range(TRIES):
        shuffled = chance.sample(words, len(words))
        if shuffled != words and shuffled[-1][-1] not in ",;:":  # ",." at the end would give the answer away
            text = " ".join(shuffled)
            final_mark = sentence[len(bare) :]
            return text[0].upper() + text[1:] + final_mark
    raise UserError(f"the words of {sentence!r} cannot be shuffled: no other order was found in {TRIES} tries")


def _is_usable(sentence: str) -> bool:
    bare = FINAL_MARK.sub("", sentence)
    words = bare.split()
    return (
        bare != sentence
        and FEWEST_WORDS <= len(words) <= MOST_WORDS
        and len({word.lower() for word in words}) >= FEWEST_WORDS
        and sentence[0].isupper()
        and words[-1][-1] not in ",;:"
        and all(map(_has_balanced_marks, words))
        and "\t" not in sentence
    )


def _has_balanced_marks(word: str) -> bool:
    """Return whether all quotes and brackets in the word are balanced.

    Shuffling would separate an unbalanced mark from its counterpart in another word and so give the answer away.
    """
    single_quotes_match = word.startswith("'") == word.rstrip(",;:").endswith("'")
    double_quotes_match = word.count('"') % 2 == 0
    brackets_match = all(word.count(opening) == word.count(closing) for opening, closing in BRACKETS)
    return single_quotes_match and double_quotes_match and brackets_match


if __name__ == "__main__":
    _folder = Path(sys.argv[1])
    _prose = write_prose(_folder / PROSE)
    if not (_folder / "glue" / "CoLA").exists():
        _documents = clean_documents([str(_prose)])
        write_acceptability_task(_documents, _folder / "glue" / "CoLA", valid_share=float(sys.argv[2]), seed=1)
