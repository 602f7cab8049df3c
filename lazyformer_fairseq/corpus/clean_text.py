"""Cleans documents line by line (a line is a paragraph), and drops lines and documents that are not prose.

The first part of the module contains the rules that replace parts of a line: remnants of wiki and HTML markup, links,
and odd characters. Every rule runs in time linear in the length of the line, whatever the text. To ensure this, each
repetition in a pattern either stops at the character that the pattern starts with, or is possessive (``++``), or
matches only at the start of a run.
"""

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Optional, Union

from lazyformer_fairseq.corpus.readers.formats import FORMATS
from lazyformer_fairseq.corpus.steps import Document, DocumentStep, has_words, length_in_letters
from lazyformer_fairseq.corpus.wiki_words import LEFT_OUT_NAMESPACES, PICTURE_OPTIONS, SMALL_PICTURE

Replacement = Union[str, Callable[[re.Match], str]]


@dataclass(frozen=True)
class Rule:
    """A pattern and its replacement.

    Attributes:
        label: the name under which replacements are counted.
        hints: plain strings, which are faster to test; every text that the pattern matches contains one of them.
        gate: a faster pattern, which matches every text that `pattern` matches.
    """

    label: str
    hints: tuple[str, ...]
    pattern: re.Pattern
    replacement: Replacement
    gate: Optional[re.Pattern] = None

    def applies(self, text: str) -> bool:
        """Return whether the pattern may match a text, judging by the rule's hints and gate."""
        for hint in self.hints:  # any() with a generator would take three times as long
            if hint in text:
                return self.gate is None or self.gate.search(text) is not None
        return False


# Characters -----------------------------------------------------------------------------------------------------------

# Control characters, soft hyphens, zero-width characters, direction marks, private-use characters, lone surrogates and
# non-characters, none of which are printable. Persian and the languages of India use the zero-width joiner and
# non-joiner in spelling, so these two are kept between letters of their scripts.
INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"
    "\ud800-\uf8ff\ufdd0-\ufdef\ufeff\ufff0-\ufffb\ufffe\uffff\U000e0000-\U000e007f\U000f0000-\U0010ffff]"
    "|(?<![\u0600-\u1cff])[\u200c\u200d]|[\u200c\u200d](?![\u0600-\u1cff])"
)
UNDECODABLE = "\ufffd"  # readers substitute it for bytes that they cannot decode

# Markup ---------------------------------------------------------------------------------------------------------------

BLOCK_TAGS = (
    "br p div hr li ul ol dl dd dt tr td th table tbody thead caption h1 h2 h3 h4 h5 h6 blockquote center poem pre"
)
INLINE_TAGS = (
    "a abbr b bdi bdo big cite code del dfn em font gallery html body head i img ins kbd link mark math meta nobr "
    "noinclude includeonly onlyinclude nowiki q references ref rp rt ruby s samp script section small source span "
    "strike strong style sub sup svg syntaxhighlight templatestyles timeline title tt u var wbr"
)
CITATIONS_AND_CODE = "ref script style math gallery timeline"


ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")


def decode_entity(entity: re.Match) -> str:
    """Return the character that an entity such as ``&amp;`` stands for."""
    return html.unescape(entity[0])


def tags(names: str) -> re.Pattern:
    """Return a pattern that matches opening and closing tags with these names."""
    return re.compile(rf"</?(?:{'|'.join(names.split())})(?:\s[^<>]*+|/)?>", re.IGNORECASE)


def _keep_caption(link: re.Match) -> str:
    return link[1].rpartition("|")[2]


def _without_paired(quotes: re.Match) -> str:
    """Remove wiki markup for bold and italics, which comes in pairs; keep a single ``''``, which opens a quotation.

    An example of such a quotation is ``''Tis so,'``.
    """
    runs = list(re.finditer("'{2,}", quotes[0]))
    if len(runs) % 2 == 0 and "``" not in quotes[0]:
        return re.sub("'{2,}", "", quotes[0])
    return quotes[0]


def _without_empty(brackets: re.Match) -> str:
    """Remove balanced parentheses that contain nothing but other such pairs, spaces and separators."""
    kept: list[str] = []
    open_places: list[int] = []
    for character in brackets[0]:
        kept.append(character)
        if character == "(":
            open_places.append(len(kept) - 1)
        elif character == ")" and open_places:
            del kept[open_places.pop() :]
    rest = "".join(kept)
    if rest == brackets[0]:
        return rest
    before = brackets.string[brackets.start() - 1 : brackets.start()]
    after = brackets.string[brackets.end() : brackets.end() + 1]
    if before in (",", ";") and rest.lstrip()[:1] in (",", ";"):
        rest = f" {rest.lstrip(' ,;')}"
    if after in tuple(".:!?)"):
        rest = rest.rstrip()
    return re.sub("(?<! ) ++(?=[,;])", "", rest)


def _any_of(words: frozenset[str]) -> str:
    """Return a pattern that matches any of these words, trying the longest first."""
    ordered = sorted(words, key=lambda word: (-len(word), word))
    alternatives = [re.escape(word).replace(r"\ ", "[ _]") for word in ordered]
    return f"(?:{'|'.join(alternatives)})"


SIZE = r"\d{1,4}(?:x\d{1,4})?(?:px|пкс)"
OPTION = rf"(?:{_any_of(SMALL_PICTURE | PICTURE_OPTIONS)}(?:[=_ ][\d.]{{1,5}})?|{SIZE})"


def _rule(
    label: str,
    pattern: Union[str, re.Pattern],
    replacement: Replacement,
    *hints: str,
    gate: Optional[str] = None,
) -> Rule:
    return Rule(label, hints, re.compile(pattern), replacement, gate and re.compile(gate))


# Language-dependent rules: names of MediaWiki's namespaces and image options in all languages, and editors' notes in
# English.
OF_LANGUAGES = (
    _rule("wiki links", rf"(?i)\[\[ ?:?{_any_of(LEFT_OUT_NAMESPACES)}:[^\[\]]*+\]\]", "", "[["),
    _rule("image options", rf"(?i)\b(?:{_any_of(SMALL_PICTURE)}|{SIZE})\|(?:{OPTION}\|)*+", "", "|"),
    _rule(
        "editors' notes",
        r"(?i) ?\[(?:edit|(?:citation|clarification|page|year|verification) needed"
        r"|(?:who|when|where|which|by whom|why)\?"
        r"|dubious[^\[\]]{0,30})\]",
        "",
        "[",
    ),
)

MARKUP = (
    _rule("entities", ENTITY, decode_entity, "&"),
    _rule("comments", r"(?s)<!--(?:(?!<!--|-->).)*+-->", "", "<!--"),
    _rule(
        "citations and code",
        rf"(?i)<({'|'.join(CITATIONS_AND_CODE.split())})(?:\s[^<>]*+)?>[^<>]*+</\1>",
        "",
        "</",
    ),
    _rule("tags", tags(BLOCK_TAGS), " ", "<"),
    _rule("tags", tags(INLINE_TAGS), "", "<"),
    _rule("templates", r"\{\{[^{}]*+\}\}", "", "{{"),
    *OF_LANGUAGES,
    _rule("wiki links", r"\[\[([^\[\]]*+)\]\]", _keep_caption, "[["),
    _rule("wiki links", r"\[(?:(?:https?|ftp):)?//[^\s\[\]]++ ([^\[\]]*+)\]", r"\1", "[http", "[ftp", "[//"),
    _rule("wiki quotes", r"(?s).*''.*", _without_paired, "''"),
    _rule("placeholders", r"(?<=[^\W_])(?=(?:formula|codice)_\d)", " ", "formula_", "codice_"),
    _rule("placeholders", r"formula_\d++", "formula", "formula_"),
    _rule("placeholders", r"codice_\d++", "code", "codice_"),
    _rule("emphasis", r"(?<!\w)_(?=[^\s_])([^_]*+)(?<=\S)_(?!\w)", r"\1", "_"),
    _rule("bullets", r"^(?:[*•]+ )++", "", "* ", "• "),
)

# Parentheses from which an extractor removed a template: Nous (, ) is; Rand (; born 1905); Activity theory (AT; ).
BRACKETS = (
    _rule("empty brackets", r"(?: |^)\([ ,;]*+[()][ ,;()]*+", _without_empty, "(", gate=r"\([ ,;()]"),
    _rule("empty brackets", r"(?: |^)\[ ?\](?= |$)", "", "[ ]", "[]"),
    _rule("separators in brackets", r"\( ?[,;][ ,;]*+", "(", "("),
    _rule("separators in brackets", r"(?<![,;])(?<![,;] ) ?[,;](?:[,;]| (?=[,;]))*+ \)", ")", ", )", "; )"),
)

# Unpaired delimiters. These rules come last, because an outer pair can be recognized only once the inner one is gone.
HALVES = (
    _rule("comments", "<!--", "", "<!--"),
    _rule("templates", r"\{\{+|\}\}+", "", "{{", "}}"),
    _rule("wiki links", r"\[\[+|\]\]+", "", "[[", "]]"),
)

# Links ----------------------------------------------------------------------------------------------------------------

AFTER_A_LINK = ".,;:!?'\"’”»…)]}*_"
SITE = r"(?:com|org|net|edu|gov|mil|int|info|(?:co|ac|org|gov)\.[a-z]{2})"
EXTENSION = (
    r"(?:txt|pdf|docx?|xlsx?|pptx?|rtf|odt|epub|jpe?g|png|gif|svg|bmp|tiff?|zip|rar|7z|tar|tgz|t?gz|bz2|xz|exe|dll|msi|dmg|"
    r"iso|html?|xml|json|yaml|csv|tsv|sql|cfg|conf|ini|bat|sys|log|mp3|mp4|avi|mov|mkv|wav|ogg|flac|php|asp|jsp|cgi|java|cpp|"
    r"hpp|tex|bib|md5)"
)
ROOTS = r"(?:usr|etc|home|var|opt|bin|sbin|dev|tmp|lib|mnt|proc|sys|Users|Library|Applications|Volumes)"


def _replaced_by(token: str) -> Callable[[re.Match], str]:
    """Return a function that replaces a link and its angle brackets with ``token``, adding a space next to letters."""

    def replace(link: re.Match) -> str:
        found = link[0]
        text = link.string
        rest = ""
        if not found.startswith("<"):
            bare = found.rstrip(AFTER_A_LINK)
            rest = found[len(bare) :]
            if rest.startswith(")") and bare.count("(") > bare.count(")"):
                rest = rest[1:]  # the parenthesis belongs to a title such as Mercury_(planet)
        before = text[link.start() - 1 : link.start()]
        after = rest[:1] or text[link.end() : link.end() + 1]
        space_before = " " if before.isalnum() else ""
        space_after = " " if after.isalnum() else ""
        return f"{space_before}{token}{space_after}{rest}"

    return replace


def _bare_or_bracketed(pattern: str) -> str:
    return rf"<(?:{pattern})>|{pattern}"


ADDRESS = r"[^\W_][^\s<>\"“”\[\]]*+"
PROTOCOL = "(?:https?|ftps?|sftp|file|gopher|irc|git|ssh|telnet|rtsp)"
HOST_OF_MAIL = r"[\w-]++(?:\.[\w-]++)*\.(?:(?!\d)\w){2,24}+(?![\w@-])"
_url = _replaced_by("<url>")
_file = _replaced_by("<file>")

LINKS = (
    _rule("<email>", _bare_or_bracketed(rf"(?<![\w.+%-])[\w.+%-]++@{HOST_OF_MAIL}"), _replaced_by("<email>"), "@"),
    _rule("<file>", r"(?<!\w)[A-Za-z]:\\[^\s<>\"“”|*?,;()\[\]]*+", _file, ":\\"),
    _rule("<url>", "(?i)" + _bare_or_bracketed(rf"{PROTOCOL}:///?{ADDRESS}"), _url, "://"),
    _rule("<url>", "(?i)" + _bare_or_bracketed(rf"(?<![\w.])www\.[\w-]++\.{ADDRESS}"), _url, "www.", "WWW."),
    # A bare Amazon.com is a name; with a path, it is a URL.
    _rule(
        "<url>",
        rf"(?<![\w./@-])(?:[\w-]++\.)+{SITE}(?::\d{{1,5}})?/[^\s<>\"“”\[\]]*+",
        _url,
        "/",
        gate=rf"\.{SITE}(?::\d{{1,5}})?/",
    ),
    _rule("<file>", rf"(?<![\w./<~-])/{ROOTS}/[\w.+@%~/-]*+", _file, "/"),
    _rule(
        "<file>",
        rf"(?i)(?<![\w./\\~+@-])[\w./\\~+-]*\w\.{EXTENSION}(?!\w)(?!\.\w)",
        _file,
        ".",
        gate=rf"(?i)\.{EXTENSION}(?!\w)",
    ),
)

RULES = (*MARKUP, *BRACKETS, *LINKS)


PASSES = 8  # markup nested deeper than this is not prose
MOST_UNDECODABLE = 0.1  # fraction of a line's characters
ENDS_A_SENTENCE = re.compile(r"""[.!?…。！？।؟][ "'”’»)\]*_-]*$""")
FEW = 5  # number of characters other than letters and spaces that any line may have, as in "No!"
LETTER = re.compile(r"[^\W\d_]")
TABLE = re.compile(r"\{\||\||\!\s.*\!\!")
# Deleting these bytes from UTF-8 text leaves only ASCII digits and punctuation; everything else counts as letters.
LETTERS_AND_SPACE = bytes(c for c in range(256) if c >= 128 or chr(c).isalpha() or c == 32)
SENTENCE_END_OR_SPACE = (
    re.compile(r".*[.!?][\"'”’)\]]* |.*[。！？।]", re.DOTALL),
    re.compile(r".* ", re.DOTALL),
)
SELECTED = {name for name, row in FORMATS.items() if row.is_selected}
LOOKS = ("heading", "table", "few letters", "short, not a sentence")  # not reasons to drop hand-selected text


@dataclass
class CleanText(DocumentStep):
    """The step that removes markup, odd characters and extra spaces, and replaces links with ``<url>`` and the like.

    Both before and after this step, the text has one paragraph per line. The rules are applied to each line until none
    of them changes it, so cleaning is idempotent. Text is normalized to NFC, so that equivalent sequences of Unicode
    characters become equal; NFKC is not used, because it would turn 10² into 102. In the counts, ``lines in`` equals
    ``lines out`` plus the sum of all ``lines dropped: REASON``, while ``replaced: <url>``, ``removed: tags`` and the
    like count occurrences in the text.

    ``steps.py`` explains how words and characters are counted in different scripts. In formats with hand-selected text,
    no line or document is dropped because of its appearance.

    Args:
        min_line_words: a line with fewer words, such as a title, a caption or a list item, is dropped unless it ends
            in terminal punctuation.
        min_line_letters: a line is dropped if letters and spaces make up a smaller fraction of its characters.
        min_document_characters: a document with fewer characters left is dropped as too short. A document is also
            dropped if more than half of its characters were in lines with few letters.
        max_line_characters: a longer line is split after the last sentence that fits, or else at a space, and its parts
            count as lines. A line that cannot be split is dropped.
    """

    name = "clean"
    min_line_words: int = 5
    min_line_letters: float = 0.5
    min_document_characters: int = 100
    max_line_characters: int = 100_000

    def process(self, document: Document) -> Optional[str]:
        """Clean a document's lines, and drop the document if too little is left."""
        counts = self.counts
        is_selected = document.metadata.get("format") in SELECTED
        kept = []
        characters = 0
        characters_of_few_letters = 0
        paragraphs = document.text.split("\n")
        parts = chain.from_iterable(divided(paragraph, self.max_line_characters) for paragraph in paragraphs)
        for part in parts:
            line, reason = self._cleaned(part, counts)
            if is_selected and reason in LOOKS:
                reason = None
            characters += len(line)
            counts["lines in"] += 1
            if reason is None:
                kept.append(line)
                continue
            counts[f"lines dropped: {reason}"] += 1
            if reason == "few letters":
                characters_of_few_letters += len(line)

        counts["lines out"] += len(kept)
        document.text = "\n".join(kept)
        if is_selected and document.text:
            return None
        if characters_of_few_letters > characters / 2:
            return "few letters"
        if length_in_letters(document.text) < self.min_document_characters:
            return "too short"
        return None

    def _cleaned(self, line: str, counts: Counter[str]) -> tuple[str, Optional[str]]:
        """Return the cleaned line, and the reason to drop it (None to keep it)."""
        if UNDECODABLE in line and line.count(UNDECODABLE) > MOST_UNDECODABLE * len(line):
            return line, "undecodable"
        line = clean_characters(line, counts)
        for _ in range(PASSES):
            before = line
            line = replace_once(line, counts)
            if line == before:
                return line, self._reason_to_drop(line)
        return line, "endless markup"

    def _reason_to_drop(self, line: str) -> Optional[str]:  # noqa: PLR0911  (a list of rules)
        if not line:
            return "empty"
        if len(line) > self.max_line_characters:
            return "too long"
        if line.startswith("==") and line.endswith("=="):
            return "heading"
        if TABLE.match(line):
            return "table"
        others = len(line.encode().translate(None, LETTERS_AND_SPACE))
        most_others = max(FEW, (1 - self.min_line_letters) * len(line))
        if others > most_others or not LETTER.search(line):
            return "few letters"
        if not has_words(line, self.min_line_words) and not ENDS_A_SENTENCE.search(line[-16:]):
            return "short, not a sentence"
        return None


def clean_characters(line: str, counts: Counter[str]) -> str:
    """Normalize a line to NFC, remove invisible characters, and collapse spaces."""
    if UNDECODABLE in line:
        counts["removed: undecodable characters"] += line.count(UNDECODABLE)
        line = line.replace(UNDECODABLE, "")
    if not line.isprintable():
        line, number = INVISIBLE.subn("", line)
        if number:
            counts["removed: invisible characters"] += number
    if not line.isascii() and not unicodedata.is_normalized("NFC", line):
        line = unicodedata.normalize("NFC", line)
        counts["replaced: lines not in NFC"] += 1
    has_extra_space = "  " in line or line[:1] == " " or line[-1:] == " "
    if has_extra_space or not line.isprintable():
        line = " ".join(line.split())
    return line


def replace_once(line: str, counts: Counter[str]) -> str:
    """Apply every rule once to a line that has gone through :func:`clean_characters`, and return the result."""
    before = line
    for rules in (RULES, HALVES):
        for rule in rules:
            if rule.applies(line):
                replaced, number = rule.pattern.subn(rule.replacement, line)
                if replaced != line:
                    change = "replaced" if rule.label.startswith("<") else "removed"
                    counts[f"{change}: {rule.label}"] += number
                line = replaced
        if line != before:
            return clean_characters(line, counts)
    return line


def divided(line: str, most: int) -> Iterator[str]:
    """Split a line into parts of at most ``most`` characters, after a sentence if possible or else at a space.

    If there is neither within the limit, the rest of the line becomes one part.
    """
    start = 0
    while len(line) - start > most:
        for place in SENTENCE_END_OR_SPACE:
            cut = place.match(line, start, start + most)
            if cut:
                break
        else:
            break
        yield line[start : cut.end()]
        start = cut.end()
    yield line[start:]
