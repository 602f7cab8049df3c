"""Extracts paragraphs from wiki markup, that is, the running text that a reader of the article sees.

As in BERT's recipe, headings, lists, tables, captions and references are removed. Templates whose text is part of a
sentence, such as {{convert|5|km}}, are rendered; all other templates are removed. The first part of the module is
specific to the English Wikipedia; ``wiki_words.py`` contains the keywords that differ between Wikipedias.

The run time is linear in a page's length, whatever the page contains. Brackets are matched in one pass with a stack,
and their content is rendered from the inside out, up to DEEPEST levels. No pattern looks further than the next bracket
or tag.
"""

import re
from collections.abc import Callable
from typing import Optional, Union

from lazyformer_fairseq.corpus.clean_text import ENTITY, decode_entity, tags
from lazyformer_fairseq.corpus.steps import Document, DocumentStep
from lazyformer_fairseq.corpus.wiki_words import DISAMBIGUATION, LEFT_OUT_NAMESPACES, plain

TEMPLATE_NAME = re.compile(r"\{\{\s*+([^{}|\n]{1,60}+)\s*+(?=\||\}\})")
DISAMBIGUATION_TEMPLATE = re.compile(r"[\w -]*disambig(?:uation)?|dab|hndis|geodis|mil-?unit-?dis|schooldis|numberdis")
DISAMBIGUATION_TITLE = "(disambiguation)"
DISAMBIGUATION_OPENING = re.compile(
    r"[^\n]{,200}\b(?:may|can|could|might) (?:also |either )*refer to(?: the following)?:"
)

FORMULA_WORD = "formula"  # replaces a formula, so that the sentence around it remains complete

Arguments = list[str]  # the unnamed arguments of a template, in order
Text = Union[str, Callable[[Arguments], str]]  # has {} for the first argument, or is a function of all arguments


def _second(arguments: Arguments) -> str:
    if arguments:
        return arguments[min(1, len(arguments) - 1)]
    return ""


BETWEEN_NUMBERS = frozenset(("to", "and", "or", "by", "x", "×", "-", "–", "to(-)", "+/-"))


def _measure(arguments: Arguments) -> str:
    """Render {{convert|5|km|mi}} or {{convert|5|to|10|km}} with only the first unit."""
    words = arguments[:2]
    while len(arguments) >= len(words) + 2 and words[-1] in BETWEEN_NUMBERS:
        words = arguments[: len(words) + 2]
    return " ".join(words).replace(" - ", "–").replace(" – ", "–")


def _fraction(arguments: Arguments) -> str:
    """Render {{frac|2}}, {{frac|1|2}} or {{frac|3|1|2}}."""
    whole: Arguments = []
    parts = arguments
    if len(arguments) == 3:
        whole = arguments[:1]
        parts = arguments[1:]
    if len(parts) == 1:
        parts = ["1", *parts]
    return " ".join([*whole, "/".join(parts)])


# Templates whose text is part of a sentence, with names in lower case and `_` for a space; the others are dropped.
# `lang-` stands for {{lang-fr|mot}}, {{lang-de|Wort}} and so on.
TEXTS_OF_TEMPLATES: tuple[tuple[Text, str], ...] = (
    (
        "{}",
        "nowrap nobr nbr small smaller big larger em strong angbr vanchor sc sc2 smallcaps keypress key mvar math sic "
        "abbr tooltip nihongo nihongo2 ill val num gaps su sub sup flag flagcountry noitalic shy chem2 lang- "
        "interlanguage_link not_a_typo as_written",
    ),
    (_second, "lang transl transliteration longitem rtl-lang script"),
    (_measure, "convert cvt"),
    (_fraction, "frac sfrac fraction"),
    ("\n\n{}\n\n", "quote cquote blockquote quotation block_quote rquote"),
    (" – ", "snd spaced_ndash spnd snds spaced_en_dash"),
    ("–", "ndash en_dash –"),
    ("—", "mdash em_dash —"),
    ("'", "' -' '-"),
    ('"', '" -" "-'),
    (" ", "nbsp space sp thinsp hair_space · dot bull •"),
    ("c. {}", "circa c."),
    ("US${}", "us$ usd"),
    ("£{}", "gbp £"),
    ("€{}", "euro €"),
    ("₹{}", "inr"),
    ("As of {}", "as_of"),
    ("fl. {}", "floruit"),
    ("'s", "'s"),
    ("=", "="),
    ("π", "pi"),
    ("".join, "chem"),
    (lambda arguments: " ".join(arguments[:2]), "ship"),
    *((f"{prefix} {{}}", prefix.lower()) for prefix in "USS HMS HMAS HMCS SS RMS MV USCGC".split()),
)
INLINE_TEMPLATES = {name.replace("_", " "): text for text, names in TEXTS_OF_TEMPLATES for name in names.split()}


DEEPEST = 20  # levels of nested brackets; deeper ones are removed
LONGEST_ELEMENT = 30_000  # characters; an end tag further away probably belongs to another element

REDIRECT = re.compile(r"\s*+#\s?\w++\s*+(?::\s*+)?\[\[")  # the keyword differs by wiki: #REDIRECT, #WEITERLEITUNG
COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
FORMULAS = "math chem ce"
LEFT_OUT = (
    "ref references gallery timeline syntaxhighlight source pre imagemap score graph mapframe hiero templatestyles "
    "noinclude includeonly small table ul ol dl select inputbox categorytree"
)
NAMES = "|".join(f"{FORMULAS} {LEFT_OUT}".split())
ELEMENT = re.compile(rf"<(?:/({NAMES})\s*+|({NAMES})\b([^<>]*+))>", re.IGNORECASE)
BRACES = re.compile(r"\{\{|\}\}")
SQUARE_BRACKETS = re.compile(r"\[\[|\]\]")
TABLE_MARKS = re.compile(r"\{\||\|\}")
PIPE_OUTSIDE_OF_LINKS = re.compile(r"\|(?![^\[\]]{,300}\]\])")
NAMED_ARGUMENT = re.compile(r"\s*+[\w -]{1,30}=")
NUMBERED_ARGUMENT = re.compile(r"\A\s*+\d\s*+=")
LANGUAGE_LINK = re.compile(r"\s*+(?:[a-z]{2,3}|simple)(?:-[a-z-]+)?:(?!\s)")  # but not CSI: Miami, Re:Zero
APOSTROPHE_IN_ITALICS = re.compile(r"(?<=\w)'''(?=s\b)")  # ''La Stampa'''s
QUOTE_MARKUP = re.compile(r"'''''|'''|''")
INDENT = re.compile(r"^ ++(?=[^\s|!{}*#:;\[<])", re.MULTILINE)

PARAGRAPH_BREAK = tags("p center h1 h2 h3 h4 h5 h6")

# Spaces and separators in parentheses from which a template was removed: "Aristotle (; 384 BC)".
AFTER_OPENING = re.compile(r"(?<=\()[\s,;:]++(?=\w)|(?<=[\[(«]) ")
BEFORE_CLOSING = re.compile(r"(?<![\s,;])[\s,;]++(?=\))| (?=[,:\]»]|\.(?!\w))|(?<=\.) (?=\.)")
LINE_OF_MARKUP = re.compile(r"[|!{}].*|.*[{}]|\(.*\)|\W*")
LIST_MARKS = "*#;:"
INDENTED = "\0"  # our own mark, which cannot occur in XML
NOT_PROSE = LIST_MARKS + "\t=|!{}<_-"  # a line that begins with one of these does not continue a paragraph
SHORT_LINE = 100  # characters


class ExtractWikiMarkup(DocumentStep):
    """The step that converts pages of a MediaWiki dump to paragraphs, one per line.

    It drops redirects, pages that are not articles, disambiguation pages, and pages with no text left. Documents in
    other formats are passed on unchanged.
    """

    name = "wiki markup"

    def process(self, document: Document) -> Optional[str]:  # noqa: PLR0911  (a list of rules)
        """Render a page as paragraphs, or drop it if it is not an article."""
        page = document.metadata
        if page["format"] != "mediawiki":
            return None
        if page.get("is_redirect") or REDIRECT.match(document.text):
            return "redirect"
        if page.get("namespace", "0") != "0" or page.get("model", "wikitext") != "wikitext":
            return "not an article"
        if page.get("title", "").endswith(DISAMBIGUATION_TITLE) or is_disambiguation(document.text):
            return "disambiguation"
        own_names = page.get("left_out_namespaces", ())
        document.text = self.paragraphs(document.text, LEFT_OUT_NAMESPACES.union(own_names))
        if not document.text:
            return "no text"
        if DISAMBIGUATION_OPENING.fullmatch(document.text):
            return "disambiguation"
        return None

    def paragraphs(self, markup: str, left_out_namespaces: frozenset[str] = LEFT_OUT_NAMESPACES) -> str:
        """Return the plain text of a page, one paragraph per line.

        Args:
            markup: the wiki markup of the page.
            left_out_namespaces: namespaces in lowercase. A link into one of them shows an image or adds the page to a
                category, so its text is not part of the sentence.
        """

        def link_text(content: str) -> str:
            title, _, label = content.partition("|")
            namespace, colon, _ = title.partition(":")
            if colon and plain(namespace) in left_out_namespaces:
                return ""
            if not label and LANGUAGE_LINK.match(title):  # a link to the same article in another language
                return ""
            return (label or title.removeprefix(":")).strip()

        text = COMMENT.sub("", markup)
        text = INDENT.sub(INDENTED, text)
        text = replace_elements(text)
        text = replace_nested(text, BRACES, template_text)
        text = replace_nested(text, SQUARE_BRACKETS, link_text)
        text = APOSTROPHE_IN_ITALICS.sub("'", text)
        text = join_lines(QUOTE_MARKUP.sub("", text))
        text = replace_nested(text, TABLE_MARKS, lambda _content: "")
        text = ENTITY.sub(decode_entity, PARAGRAPH_BREAK.sub("\n", text))
        lines = map(clean_rendered_line, text.split("\n"))
        return "\n".join(filter(None, lines))


def is_disambiguation(markup: str) -> bool:
    """Return whether a page is marked as a disambiguation page, which only lists articles that share a name."""
    if "__DISAMBIG__" in markup:
        return True
    names = (plain(name) for name in TEMPLATE_NAME.findall(markup))
    return any(name in DISAMBIGUATION or DISAMBIGUATION_TEMPLATE.fullmatch(name) for name in names)


def replace_elements(text: str) -> str:
    """Remove HTML elements that are not prose, and replace each formula with a word.

    If an element is not closed or its end is far away, only its tag is removed, and its content is kept.
    """
    found = list(ELEMENT.finditer(text))
    waiting: dict[str, list[int]] = {}
    ends: dict[int, int] = {}
    for number, tag in enumerate(found):
        closes, opens, attributes = tag.groups()
        if opens and not attributes.endswith("/"):
            waiting.setdefault(opens.lower(), []).append(number)
        elif closes and waiting.get(closes.lower()):
            opening = waiting[closes.lower()].pop()
            ends[opening] = number

    kept: list[str] = []
    at = 0
    for number, tag in enumerate(found):
        if tag.start() < at:  # inside an element that was replaced
            continue
        kept.append(text[at : tag.start()])
        at = tag.end()
        end = None
        if number in ends:
            end = found[ends[number]]
        if end is not None and end.start() - at <= LONGEST_ELEMENT:
            if tag[2].lower() in FORMULAS.split():
                kept.append(FORMULA_WORD)
            at = end.end()
    return "".join(kept) + text[at:]


def replace_nested(text: str, delimiter: re.Pattern, render: Callable[[str], str]) -> str:
    """Replace each pair of brackets in a text with its rendered content, from the inside out.

    Unmatched brackets are kept and do not affect the rest.

    Args:
        text: the text with brackets.
        delimiter: matches an opening bracket, which begins with ``{`` or ``[``, or a closing one.
        render: returns the replacement of a pair of brackets, given its content.
    """
    parts: list[list[str]] = [[]]  # parts of the text outside all brackets, then of the content of each open bracket
    heights = [0]  # for each of these, the number of levels of nested brackets rendered in it
    openings: list[str] = []
    at = 0
    for found in delimiter.finditer(text):
        parts[-1].append(text[at : found.start()])
        at = found.end()
        mark = found[0]
        if mark[0] in "{[":
            openings.append(mark)
            parts.append([])
            heights.append(0)
        elif openings:
            openings.pop()
            content = "".join(parts.pop())
            height = heights.pop() + 1
            heights[-1] = max(heights[-1], height)
            if height <= DEEPEST:
                parts[-1].append(render(content))
        else:
            parts[-1].append(mark)
    parts[-1].append(text[at:])

    all_pieces: list[str] = []
    for opening, pieces in zip(["", *openings], parts, strict=True):
        all_pieces += [opening, *pieces]
    return "".join(all_pieces)


def template_text(content: str) -> str:
    """Return a template's text if it is part of a sentence, or else an empty string."""
    name, _, rest = content.partition("|")
    name = name.strip().replace("_", " ").lower()
    if name.startswith("formatnum:"):
        return name.removeprefix("formatnum:").strip()
    if name.startswith("lang-"):
        name = "lang-"
    render = INLINE_TEMPLATES.get(name)
    if render is None:
        return ""
    arguments = []
    if rest:
        arguments = PIPE_OUTSIDE_OF_LINKS.split(rest)
    arguments = [NUMBERED_ARGUMENT.sub("", argument) for argument in arguments]
    unnamed = [argument.strip() for argument in arguments if not NAMED_ARGUMENT.match(argument)]
    if callable(render):
        return render(unnamed)
    return render.format(unnamed[0] if unnamed else "")


def join_lines(text: str) -> str:
    """Join consecutive lines of prose into paragraphs.

    Short lines that start with a space are code or ASCII art, and are removed.
    """
    lines: list[list[str]] = []
    goes_on = False
    for written in text.split("\n"):
        is_code = written.startswith(INDENTED) and len(written) < SHORT_LINE
        line = ""
        if not is_code:
            line = written.strip(" " + INDENTED)
        is_prose = line != "" and line[0] not in NOT_PROSE
        if goes_on and is_prose:
            lines[-1].append(line)
        else:
            lines.append([line])
        goes_on = is_prose
    return "\n".join(map(" ".join, lines)).replace(INDENTED, " ")


def clean_rendered_line(line: str) -> str:
    """Clean up what templates left behind in a line; return "" for a heading, a list item or a line without prose."""
    line = line.strip().lstrip(":").lstrip()
    is_heading = line.startswith("==") and "==" in line[2:]
    if is_heading or line.startswith(tuple(LIST_MARKS)):
        return ""
    line = " ".join(line.split())
    line = BEFORE_CLOSING.sub("", AFTER_OPENING.sub("", line))
    if LINE_OF_MARKUP.fullmatch(line) or line == FORMULA_WORD:
        return ""
    return line
