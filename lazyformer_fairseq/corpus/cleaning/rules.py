"""The rules that replace parts of a line: left-overs of wiki and HTML markup, links, odd characters.

Each rule takes time in proportion to the line, whatever its text: a pattern that repeats something either stops at the
character that it starts with, or takes all it can and gives nothing back (``++``), or starts only where a run starts.
"""

import html
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional, Union

Replacement = Union[str, Callable[[re.Match], str]]


@dataclass(frozen=True)
class Rule:
    """A pattern and what takes its place.

    Attributes:
        label: the name of the count of replacements.
        hints: plain strings, one of which is in every text that the pattern matches: a much quicker test.
        gate: a quick pattern that is found wherever the pattern is.
    """

    label: str
    hints: tuple[str, ...]
    pattern: re.Pattern
    replacement: Replacement
    gate: Optional[re.Pattern] = None

    def applies(self, text: str) -> bool:
        for hint in self.hints:  # a loop: any() of a generator takes three times as long
            if hint in text:
                return self.gate is None or self.gate.search(text) is not None
        return False


# Characters -----------------------------------------------------------------------------------------------------------

# Control, soft hyphen, zero-width, direction marks, private use, lone surrogates, non-characters: none is printable.
# The zero-width (non-)joiner is spelling in Persian and the scripts of India: it stays between their letters.
INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"
    "\ud800-\uf8ff\ufdd0-\ufdef\ufeff\ufff0-\ufffb\ufffe\uffff\U000e0000-\U000e007f\U000f0000-\U0010ffff]"
    "|(?<![\u0600-\u1cff])[\u200c\u200d]|[\u200c\u200d](?![\u0600-\u1cff])"
)
UNDECODABLE = "\ufffd"  # a reader puts it in place of bytes that are not UTF-8

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


def _tags(names: str) -> re.Pattern:
    return re.compile(rf"</?(?:{'|'.join(names.split())})(?:\s[^<>]*+|/)?>", re.IGNORECASE)


def _keep_caption(link: re.Match) -> str:
    return link[1].rpartition("|")[2]


def _without_paired(quotes: re.Match) -> str:
    """Wiki's bold and italic come in pairs; a single ``''`` opens a quotation with an apostrophe (''Tis so,')."""
    runs = list(re.finditer("'{2,}", quotes[0]))
    return re.sub("'{2,}", "", quotes[0]) if len(runs) % 2 == 0 and "``" not in quotes[0] else quotes[0]


def _without_empty(brackets: re.Match) -> str:
    """Takes out every balanced pair of round brackets that holds nothing but such pairs, spaces and separators."""
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
    return re.sub("(?<! ) ++(?=[,;])", "", rest.rstrip() if after in tuple(".:!?)") else rest)


# The rules for English: MediaWiki's names of namespaces, image options and notes.
ENGLISH = (
    Rule("wiki links", ("[[",), re.compile(r"\[\[ ?:?(?:File|Image|Media|Category):[^\[\]]*+\]\]", re.IGNORECASE), ""),
    Rule("image options", ("thumb|", "thumbnail|", "px|"), re.compile(
        r"\b(?:thumb(?:nail)?|\d{1,4}(?:x\d{1,4})?px)\|"
        r"(?:(?:left|right|cent(?:er|re)|none|frame(?:less)?|border|thumb(?:nail)?|upright(?:=[\d.]{1,5})?|\d{1,4}px)\|)*+"
    ), ""),
    Rule("editors' notes", ("[",), re.compile(
        r" ?\[(?:edit|(?:citation|clarification|page|year|verification) needed|(?:who|when|where|which|by whom|why)\?"
        r"|dubious[^\[\]]{0,30})\]", re.IGNORECASE), ""),
)  # fmt: skip

MARKUP = (
    Rule("entities", ("&",), re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});"),
         lambda entity: html.unescape(entity[0])),
    Rule("comments", ("<!--",), re.compile(r"<!--(?:(?!<!--|-->).)*+-->", re.DOTALL), ""),
    Rule("citations and code", ("</",), re.compile(
        rf"<({'|'.join(CITATIONS_AND_CODE.split())})(?:\s[^<>]*+)?>[^<>]*+</\1>", re.IGNORECASE), ""),
    Rule("tags", ("<",), _tags(BLOCK_TAGS), " "),
    Rule("tags", ("<",), _tags(INLINE_TAGS), ""),
    Rule("templates", ("{{",), re.compile(r"\{\{[^{}]*+\}\}"), ""),
    *ENGLISH,
    Rule("wiki links", ("[[",), re.compile(r"\[\[([^\[\]]*+)\]\]"), _keep_caption),
    Rule("wiki links", ("[http", "[ftp", "[//"), re.compile(
        r"\[(?:(?:https?|ftp):)?//[^\s\[\]]++ ([^\[\]]*+)\]"), r"\1"),
    Rule("wiki quotes", ("''",), re.compile(r".*''.*", re.DOTALL), _without_paired),
    Rule("placeholders", ("formula_", "codice_"), re.compile(r"(?<=[^\W_])(?=(?:formula|codice)_\d)"), " "),
    Rule("placeholders", ("formula_",), re.compile(r"formula_\d++"), "formula"),
    Rule("placeholders", ("codice_",), re.compile(r"codice_\d++"), "code"),
    Rule("emphasis", ("_",), re.compile(r"(?<!\w)_(?=[^\s_])([^_]*+)(?<=\S)_(?!\w)"), r"\1"),
    Rule("bullets", ("* ", "• "), re.compile(r"^(?:[*•]+ )++"), ""),
)  # fmt: skip

# Left where wikiextractor took a template away: Nous (, ) is; Rand (; born 1905); Activity theory (AT; ).
BRACKETS = (
    Rule("empty brackets", ("(",), re.compile(r"(?: |^)\([ ,;]*+[()][ ,;()]*+"), _without_empty,
         gate=re.compile(r"\([ ,;()]")),
    Rule("empty brackets", ("[ ]", "[]"), re.compile(r"(?: |^)\[ ?\](?= |$)"), ""),
    Rule("separators in brackets", ("(",), re.compile(r"\( ?[,;][ ,;]*+"), "("),
    Rule("separators in brackets", (", )", "; )"), re.compile(
        r"(?<![,;])(?<![,;] ) ?[,;](?:[,;]| (?=[,;]))*+ \)"), ")"),
)  # fmt: skip

# Halves of pairs. Last of all: the pair around another pair shows only once the inner one is gone.
HALVES = (
    Rule("comments", ("<!--",), re.compile("<!--"), ""),
    Rule("templates", ("{{", "}}"), re.compile(r"\{\{+|\}\}+"), ""),
    Rule("wiki links", ("[[", "]]"), re.compile(r"\[\[+|\]\]+"), ""),
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
    """``token`` in the place of a link, with the link's own angle brackets gone and no letter glued to it."""

    def replace(link: re.Match) -> str:
        found, text = link[0], link.string
        rest = ""
        if not found.startswith("<"):
            bare = found.rstrip(AFTER_A_LINK)
            rest = found[len(bare) :]
            if rest.startswith(")") and bare.count("(") > bare.count(")"):
                rest = rest[1:]  # of a title such as Mercury_(planet)
        before = text[link.start() - 1 : link.start()]
        after = rest[:1] or text[link.end() : link.end() + 1]
        return f"{' ' if before.isalnum() else ''}{token}{' ' if after.isalnum() else ''}{rest}"

    return replace


def _bare_or_bracketed(pattern: str, flags: int = 0) -> re.Pattern:
    return re.compile(rf"<(?:{pattern})>|{pattern}", flags)


ADDRESS = r"[^\W_][^\s<>\"“”\[\]]*+"

RARE_LINKS = (  # with one of the characters @ \ <
    Rule("<email>", ("@",), _bare_or_bracketed(
        r"(?<![\w.+%-])[\w.+%-]++@[\w-]++(?:\.[\w-]++)*\.(?:(?!\d)\w){2,24}+(?![\w@-])"), _replaced_by("<email>")),
    Rule("<file>", (":\\",), re.compile(r"(?<!\w)[A-Za-z]:\\[^\s<>\"“”|*?,;()\[\]]*+"), _replaced_by("<file>")),
)  # fmt: skip
LINKS = (
    Rule("<url>", ("://",), _bare_or_bracketed(
        rf"(?:https?|ftps?|sftp|file|gopher|irc|git|ssh|telnet|rtsp):///?{ADDRESS}", re.IGNORECASE),
         _replaced_by("<url>")),
    Rule("<url>", ("www.", "WWW."), _bare_or_bracketed(
        rf"(?<![\w.])www\.[\w-]++\.{ADDRESS}", re.IGNORECASE), _replaced_by("<url>")),
    # A bare Amazon.com is a name; with a path it is an address.
    Rule("<url>", ("/",), re.compile(
        rf"(?<![\w./@-])(?:[\w-]++\.)+{SITE}(?::\d{{1,5}})?/[^\s<>\"“”\[\]]*+"), _replaced_by("<url>"),
        gate=re.compile(rf"\.{SITE}(?::\d{{1,5}})?/")),
    Rule("<file>", ("/",), re.compile(rf"(?<![\w./<~-])/{ROOTS}/[\w.+@%~/-]*+"), _replaced_by("<file>")),
    Rule("<file>", (".",), re.compile(
        rf"(?<![\w./\\~+@-])[\w./\\~+-]*\w\.{EXTENSION}(?!\w)(?!\.\w)", re.IGNORECASE), _replaced_by("<file>"),
        gate=re.compile(rf"\.{EXTENSION}(?!\w)", re.IGNORECASE)),
)  # fmt: skip

RARE_CHARACTERS = re.compile(r"[&<{}\[\]|_@\\*•]")
PLAIN_RULES = (*BRACKETS, *LINKS)  # the only ones that can change a line with no rare character and no ''
ALL_RULES = (*MARKUP, *BRACKETS, *RARE_LINKS, *LINKS)


def rules_for(line: str) -> tuple[Rule, ...]:
    return ALL_RULES if RARE_CHARACTERS.search(line) or "''" in line else PLAIN_RULES
