"""Makes paragraphs from wiki markup: what a reader of the article would call its text.

As in BERT's recipe, headings, lists, tables, captions and references go. wikiextractor parses the markup; before it
sees a page, this module takes out what it gets wrong: it drops links such as [[Alien: Covenant]] for their colon,
writes italics as quotes, makes a paragraph of each line, loses what templates such as {{convert|5|km}} say, and lets a
`}}` inside of a formula end a template. First come the facts of one language's Wikipedia, here English.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Optional, Union

from lazyformer_fairseq.corpus.steps import Document, DocumentStep
from lazyformer_fairseq.errors import UserError

# Links into these show a picture, or only sort the page; the text between the brackets is not part of the sentence.
LEFT_OUT_NAMESPACES = frozenset("file image media category".split())

DISAMBIGUATION_TEMPLATE = re.compile(
    r"\{\{\s*(?:[\w -]*disambig(?:uation)?|dab|hndis|geodis|mil-?unit-?dis|schooldis|numberdis)"
    r"\s*(?:\||\}\})",
    re.IGNORECASE,
)
DISAMBIGUATION_TITLE = "(disambiguation)"
DISAMBIGUATION_OPENING = re.compile(
    r"[^\n]{,200}\b(?:may|can|could|might) (?:also |either )*refer to(?: the following)?:"
)

FORMULA_WORD = "formula"  # stands for a formula, so that its sentence stays whole

Arguments = list[str]  # those without a name, in order
Text = Union[str, Callable[[Arguments], str]]  # with {} for the first argument, or a function of all


def _second(arguments: Arguments) -> str:
    return arguments[min(1, len(arguments) - 1)] if arguments else ""


BETWEEN_NUMBERS = frozenset(("to", "and", "or", "by", "x", "×", "-", "–", "to(-)", "+/-"))


def _measure(arguments: Arguments) -> str:
    """{{convert|5|km|mi}}, {{convert|5|to|10|km}}: the first unit alone."""
    words = arguments[:2]
    while len(arguments) >= len(words) + 2 and words[-1] in BETWEEN_NUMBERS:
        words = arguments[: len(words) + 2]
    return " ".join(words).replace(" - ", "–").replace(" – ", "–")


def _fraction(arguments: Arguments) -> str:
    """{{frac|2}}, {{frac|1|2}}, {{frac|3|1|2}}."""
    whole, parts = (arguments[:1], arguments[1:]) if len(arguments) == 3 else ([], arguments)
    return " ".join([*whole, "/".join(parts if len(parts) != 1 else ["1", *parts])])


# Templates whose text is part of a sentence, by their names in lower case; all others are dropped.
INLINE_TEMPLATES: dict[str, Text] = {
    **dict.fromkeys(
        "nowrap nobr nbr small smaller big larger em strong angbr vanchor sc sc2 smallcaps keypress key mvar math sic "
        "abbr tooltip nihongo nihongo2 ill val num gaps su sub sup flag flagcountry noitalic shy chem2".split(),
        "{}",
    ),
    **dict.fromkeys(("interlanguage link", "not a typo", "as written"), "{}"),
    **dict.fromkeys("lang transl transliteration longitem rtl-lang script".split(), _second),
    **dict.fromkeys(("convert", "cvt"), _measure),
    **dict.fromkeys(("frac", "sfrac", "fraction"), _fraction),
    **dict.fromkeys(("quote", "cquote", "blockquote", "quotation", "block quote", "rquote"), "\n\n{}\n\n"),
    **dict.fromkeys(("snd", "spaced ndash", "spnd", "snds", "spaced en dash"), " – "),
    **dict.fromkeys(("ndash", "en dash", "–"), "–"),
    **dict.fromkeys(("mdash", "em dash", "—"), "—"),
    **dict.fromkeys(("'", "-'", "'-"), "'"),
    **dict.fromkeys(('"', '-"', '"-'), '"'),
    **dict.fromkeys(("nbsp", "space", "sp", "thinsp", "hair space", "·", "dot", "bull", "•"), " "),
    **dict.fromkeys(("circa", "c."), "c. {}"),
    **dict.fromkeys(("us$", "usd"), "US${}"),
    **dict.fromkeys(("gbp", "£"), "£{}"),
    **dict.fromkeys(("euro", "€"), "€{}"),
    "inr": "₹{}",
    "as of": "As of {}",
    "floruit": "fl. {}",
    "'s": "'s",
    "=": "=",
    "pi": "π",
    "chem": "".join,
    "ship": lambda arguments: " ".join(arguments[:2]),
    **{prefix.lower(): f"{prefix} {{}}" for prefix in "USS HMS HMAS HMCS SS RMS MV USCGC".split()},
    "lang-": "{}",  # {{lang-fr|mot}}, {{lang-de|Wort}}, ...
}


# Lengths are bounded where what is not closed would be searched for up to the page's end, again and again.
REDIRECT = re.compile(r"\s*#\s?\w+\s*:?\s*\[\[")  # the word is the wiki's own: #REDIRECT, #WEITERLEITUNG
COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
LEFT_OUT = re.compile(
    r"<(ref|gallery|timeline|syntaxhighlight|source|pre|imagemap|score|graph|mapframe|hiero|templatestyles|references)\b"
    r"(?:[^<>]*?/>|[^<>]*>.{,30000}?</\1\s*>)",
    re.DOTALL | re.IGNORECASE,
)
FORMULA = re.compile(r"<(math|chem|ce)\b[^<>]*>.{,5000}?</\1\s*>", re.DOTALL | re.IGNORECASE)
STRAY_TAG = re.compile(r"</?(?:code|onlyinclude|ref|math|gallery)\b[^<>]*>", re.IGNORECASE)
UNCLOSED_TAG = re.compile(r"<(?=/?[a-zA-Z][^<>]*(?:<|\Z))")
INNERMOST_TEMPLATE = re.compile(r"\{\{([^{}]*)\}\}")
INNERMOST_LINK = re.compile(r"\[\[([^\[\]]*(?:\](?!\])[^\[\]]*|\[(?!\[)[^\[\]]*)*)\]\]")
PIPE_OUTSIDE_OF_LINKS = re.compile(r"\|(?![^\[\]]{,300}\]\])")
NAMED_ARGUMENT = re.compile(r"\s*[\w -]{1,30}=")
NUMBERED_ARGUMENT = re.compile(r"\s*\d\s*=")
LANGUAGE_LINK = re.compile(r"\s*(?:[a-z]{2,3}|simple)(?:-[a-z-]+)?:(?!\s)")  # but not CSI: Miami, Re:Zero
APOSTROPHE_IN_ITALICS = re.compile(r"(?<=\w)'''(?=s\b)")  # ''La Stampa'''s
QUOTE_MARKUP = re.compile(r"'''''|'''|''")
INDENT = re.compile(r"^ +(?=[^\s|!{}*#:;\[<])", re.MULTILINE)
DEEPEST = 20  # templates in templates

# Brackets whose content was a template: "Albedo ()", "Aristotle (; 384 BC)", "bitumen (,)".
EMPTY_BRACKETS = re.compile(r" ?\([\s,;:]*\)| ?\[\s*\]")
AFTER_OPENING = re.compile(r"\([\s,;:]+(?=\w)")
BEFORE_CLOSING = re.compile(r"[\s,;]+\)")
TWO_MARKS = re.compile(r"([,;])(?:\s*[,;])+")
LINE_OF_MARKUP = re.compile(r"[|!{}].*|.*[{}]\Z|\W*")
LIST_MARKS = "*#;:"
INDENTED = "\0"  # a mark of our own, which XML cannot hold
NOT_PROSE = LIST_MARKS + "\t=|!{}<_-"  # first characters of lines that stand alone
SHORT_LINE = 100  # characters


class ExtractWikiMarkup(DocumentStep):
    """Pages of a MediaWiki dump become paragraphs, one a line; documents of other formats pass as they are.

    Dropped: redirects, pages that are not articles, disambiguation pages, and what has no text left.

    Raises:
        UserError: the package wikiextractor is not installed.
    """

    name = "wiki markup"

    def process(self, document: Document) -> Optional[str]:
        page = document.metadata
        if page["format"] != "mediawiki":
            return None
        if page.get("is_redirect") or REDIRECT.match(document.text):
            return "redirect"
        if page.get("namespace", "0") != "0" or page.get("model", "wikitext") != "wikitext":
            return "not an article"
        is_titled = page.get("title", "").endswith(DISAMBIGUATION_TITLE)
        if is_titled or "__DISAMBIG__" in document.text or DISAMBIGUATION_TEMPLATE.search(document.text):
            return "disambiguation"
        document.text = self.paragraphs(document.text)
        if not document.text:
            return "no text"
        if DISAMBIGUATION_OPENING.fullmatch(document.text):
            return "disambiguation"
        return None

    def paragraphs(self, markup: str) -> str:
        """Plain text of a page, one paragraph a line."""
        text = load_extractor().clean_text(simplify(markup), expand_templates=False, html_safe=False)
        return "\n".join(filter(None, (_mend(line) for part in text for line in part.split("\n"))))


@lru_cache(maxsize=1)
def load_extractor():
    """wikiextractor's; loaded once per process."""
    try:
        from wikiextractor.extract import Extractor
    except ImportError:
        raise UserError("reading MediaWiki dumps needs wikiextractor: pip install lazyformer_fairseq[corpus]") from None
    return Extractor(0, "", "", "", [], keepSections=False)


def simplify(markup: str) -> str:
    """Markup without comments, references, templates, internal links, formulas and quote marks for bold and italics."""
    text = COMMENT.sub("", markup)
    text = INDENT.sub(INDENTED, text)
    text = FORMULA.sub(FORMULA_WORD, text)
    text = LEFT_OUT.sub("", text)
    text = UNCLOSED_TAG.sub("", STRAY_TAG.sub("", text))  # it costs wikiextractor quadratic time
    text = _repeat(INNERMOST_TEMPLATE, _template_text, text)
    text = _repeat(INNERMOST_LINK, _link_text, text)
    text = APOSTROPHE_IN_ITALICS.sub("'", text)
    return _join_lines(QUOTE_MARKUP.sub("", text))


def _join_lines(text: str) -> str:
    """A line after a line continues its paragraph; short lines that begin with a space are code or drawings."""
    lines: list[str] = []
    goes_on = False
    for line in text.split("\n"):
        line = "" if line.startswith(INDENTED) and len(line) < SHORT_LINE else line.strip(" " + INDENTED)
        is_prose = line != "" and line[0] not in NOT_PROSE
        if goes_on and is_prose:
            lines[-1] += " " + line
        else:
            lines.append(line)
        goes_on = is_prose
    return "\n".join(lines).replace(INDENTED, " ")


def _repeat(pattern: re.Pattern, replacement, text: str) -> str:
    """From the inside out; what is not closed stays, and harms nothing else."""
    for _ in range(DEEPEST):
        text, count = pattern.subn(replacement, text)
        if not count:
            break
    return text


def _template_text(match: re.Match) -> str:
    name, _, rest = match.group(1).partition("|")
    name = name.strip().replace("_", " ").lower()
    if name.startswith("formatnum:"):
        return name.removeprefix("formatnum:").strip()
    render = INLINE_TEMPLATES.get("lang-" if name.startswith("lang-") else name)
    if render is None:
        return ""
    arguments = PIPE_OUTSIDE_OF_LINKS.split(rest) if rest else []
    arguments = [NUMBERED_ARGUMENT.sub("", argument) for argument in arguments]
    unnamed = [argument.strip() for argument in arguments if not NAMED_ARGUMENT.match(argument)]
    return render(unnamed) if callable(render) else render.format(unnamed[0] if unnamed else "")


def _link_text(match: re.Match) -> str:
    title, _, label = match.group(1).partition("|")
    prefix, colon, _ = title.partition(":")
    if colon and prefix.strip().lower() in LEFT_OUT_NAMESPACES:
        return ""
    if not label and LANGUAGE_LINK.match(title):  # the same article in another language
        return ""
    return (label or title.removeprefix(":")).strip()


def _mend(line: str) -> str:
    """A line of wikiextractor's output, without what templates left behind; empty if it is not prose."""
    if line[:1] and line[0] in LIST_MARKS:
        return ""
    if "(" in line or "[" in line:
        line = EMPTY_BRACKETS.sub("", line)
        line = AFTER_OPENING.sub("(", line)
        line = BEFORE_CLOSING.sub(")", line)
    line = " ".join(TWO_MARKS.sub(r"\1", line).split())
    return "" if LINE_OF_MARKUP.fullmatch(line) or line == FORMULA_WORD else line
