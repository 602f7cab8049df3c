"""Wiki markup to paragraphs; what becomes of a line, what goes; duplicates; documents that are held out."""

import random
from collections import Counter
from operator import eq

import numpy as np
import pytest
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.corpus import duplicates
from lazyformer_fairseq.corpus.clean_text import CleanText
from lazyformer_fairseq.corpus.duplicates import bands, draw, find_duplicates, fingerprint, threshold
from lazyformer_fairseq.corpus.steps import Document
from lazyformer_fairseq.corpus.wiki_markup import ExtractWikiMarkup

PROSE = "This is a sentence of some words that any cleaning leaves as it is, whatever it does to others."


def clean(text: str, **settings) -> tuple[str, Counter, str | None]:
    """The cleaned text, the step's counts, and why the document was dropped."""
    step = CleanText(**{"min_document_characters": 0, **settings})
    document = Document(text=text, id="file:1")
    reason = step.process(document)
    return document.text, step.counts, reason


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Nous (, ), sometimes called intellect, is (, ) it.", "Nous, sometimes called intellect, is it."),
        ("Rand (; born 1905) and theory (AT; ) of it.", "Rand (born 1905) and theory (AT) of it."),
        ("The root, (), meaning work (( ) , ()) is old.", "The root, meaning work is old."),
        ("Call main() and f(x), he said (to Emma,) twice.", "Call main() and f(x), he said (to Emma,) twice."),
        ("A man [[Moral character|of]] [[honour]] he was.", "A man of honour he was."),
        ("[[File:x.jpg|thumb|A [[cat]] here]]He was a man.", "He was a man."),
        ("thumb|right|250px|The bridge stands over the river.", "The bridge stands over the river."),
        ("It is '''bold''' and ''italic'' to say so.", "It is bold and italic to say so."),
        ("''Tis so,' said the Duchess, 'and so it is.'", "''Tis so,' said the Duchess, 'and so it is.'"),
        ("He said ``yes'' and then ``no'' to us.", "He said ``yes'' and then ``no'' to us."),
        ("It fell{{cite|a={{b}}|c}} in the year<ref name=x/> 2001<ref>A. B.</ref>.", "It fell in the year 2001."),
        ("One<br>two <i>three</i> <nowiki>[</nowiki>four]<!-- five --> six.", "One two three [four] six."),
        ("Fish&nbsp;&amp; chips &amp;lt;br&amp;gt; are eaten &c; here.", "Fish & chips are eaten &c; here."),
        ("If 1 < 2 and 3 > 2 then <unk> <M> stay here.", "If 1 < 2 and 3 > 2 then <unk> <M> stay here."),
        ("The sky is blue[edit] and wide [citation needed].", "The sky is blue and wide."),
        ("Where formula_12 and codice_3 are, xformula_4 is.", "Where formula and code are, x formula is."),
        ("_She_ was _not quite_ sure of snake_case_names there.", "She was not quite sure of snake_case_names there."),
        ("See (https://a.org/b_(c)?d=e#f). And ftp://x.net/y, too.", "See (<url>). And <url>, too."),
        ("It is at <http://a.org> or at www.b.com, he wrote.", "It is at <url> or at <url>, he wrote."),
        ("Is it at wiki.org/wiki/X, not Amazon.com or U.S./Canada?", "Is it at <url>, not Amazon.com or U.S./Canada?"),
        ("Write to <jo.b+c@x.ac.uk> or to jo@home or jo@x.org.", "Write to <email> or to jo@home or <email>."),
        (r"Open /usr/share/x.txt, C:\dir\a.b or readme.txt now.", "Open <file>, <file> or <file> now."),
        ("Either and/or 1/2, km/h, Node.js, .NET and ver.2.", "Either and/or 1/2, km/h, Node.js, .NET and ver.2."),
        ("So\u00adft \ufeffzero\u200bwidth\x07 \u00a0 wide\u3000\tspace  here.", "Soft zerowidth wide space here."),
        ("The cafe\u0301 costs 10² and a caf\ufffd more than that.", "The café costs 10² and a caf more than that."),
        ("می\u200cشود و این یک جمله است. a\u200cb", "می\u200cشود و این یک جمله است. ab"),
    ],
)  # fmt: skip
def test_a_line_becomes(before, after):
    assert clean(before)[0] == after


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("<br> <!-- note -->", "empty"),
        ("== Early life of the man ==", "heading"),
        ("| 1988 || a || b", "table"),
        ('{| class="wikitable"', "table"),
        ("* * * * * * *", "few letters"),
        ("1988 – 1989, 2:1 (3:2), 14, 15, 16, 17", "few letters"),
        ("Chapter IV", "short, not a sentence"),
        ("a\ufffdb\ufffdc\ufffd is it a sentence.", "undecodable"),
        ("x" * 100_001, "too long"),
        ("&amp;" + "amp;" * 20 + " is a sentence.", "endless markup"),
    ],
)
def test_a_line_is_dropped(line, reason):
    text, counts, _ = clean(f"{PROSE}\n{line}\n{PROSE}")
    assert text == f"{PROSE}\n{PROSE}"
    assert counts[f"lines dropped: {reason}"] == 1 and counts["lines in"] == 3 and counts["lines out"] == 2


def test_short_dialogue_stays():
    dialogue = '"Oh!"\nYes.\n"Very."\n“Why?”\nNo…\nHe had gone away without it'
    assert clean(dialogue)[0] == dialogue


def test_documents_are_dropped_for_a_reason():
    assert clean(PROSE, min_document_characters=200)[2] == "too short"
    assert clean(f"{PROSE}\n" + "1 2 3 4 5 6 7 8 9 10 11\n" * 20)[2] == "few letters"
    assert clean(PROSE)[2] is None
    step = CleanText()
    assert [*step.run([Document(text="x" * 200_000, id="book.txt:1")])] == []  # without a space
    assert step.notes.dropped == {"too short": ["book.txt:1"]}
    assert step.counts["lines dropped: too long"] == 1


def test_a_book_of_one_line_stays_whole():
    book = " ".join([PROSE] * 5000)
    text, counts, reason = clean(book)
    assert reason is None and text.replace("\n", " ") == book
    assert counts["lines in"] == counts["lines out"] > 1 and max(map(len, text.split("\n"))) <= 100_000
    assert all(line.endswith("others.") for line in text.split("\n"))


PIECES = st.sampled_from(
    """( ) [ ] [[ ]] { {{ }} | ' '' ''' < > <br> </i> <ref> </ref> <!-- --> &amp; &lt; &gt; &nbsp; lt; amp; # &#0; &#10;
    _ __ , ; . : * • == = {| |} http:// https://a.b/c www. www.a.b @ a@b.cd .txt a.txt /usr/ / \\ C:\\ <url> <email>
    formula_1 codice_2 formula_ thumb| 5px| [edit] File: Category: é
    \u0301 \u200d \u200c \ufeff \xad \ufffd \u0627 \x00 \ud800
    \u00a0 \u212b a bc Word`` !! ! ? 12""".split()
) | st.sampled_from([" ", "\n", " ", "  "])


@settings(max_examples=120)
@given(st.lists(PIECES | st.text(max_size=3), max_size=25).map("".join))
def test_cleaning_again_changes_nothing(text):
    once, counts, reason = clean(text)
    dropped = sum(number for name, number in counts.items() if name.startswith("lines dropped: "))
    assert counts["lines in"] == counts["lines out"] + dropped == text.count("\n") + 1
    if reason is None:
        assert clean(once)[::2] == (once, None) or not once
        once.encode()


@pytest.fixture(scope="module")
def step():
    return ExtractWikiMarkup()


def page(text, **metadata):
    return Document(text, "dump.xml:1", metadata={"format": "mediawiki", "title": "T", "namespace": "0"} | metadata)


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        # A paragraph is what blank lines divide; headings, lists and code go.
        ("One line\nand another.\n\nNext.", "One line and another.\nNext."),
        ("A.\n== Part ==\nB.\n=== Section ===\nC.\n== Empty ==\n", "A.\nB.\nC."),
        ("Some:\n* one\n** two\n# three\n; term : what\n:indented\nMore.", "Some:\nindented\nMore."),
        ("Code:\n  x = 1\n  y = 2\n", "Code:"),
        # Marks and entities.
        ("'''Bold''' and ''italic'' and '''''both''''', ''L'Aurore'''s.", "Bold and italic and both, L'Aurore's."),
        ("a&nbsp;b &amp; c &lt; d &mdash; e", "a b & c < d — e"),
        ("one<br />two<sup>2</sup> <span class='x'>three</span> <code>4</code><!-- five\n -->", "one two2 three 4"),
        # Links.
        ("[[A]], [[a b|c]]s, [[Alien: Covenant]], [[wikt:word|word]]", "A, cs, Alien: Covenant, word"),
        ("[[CSI: Miami]], [[Re:Zero]]; [[de:A]][[simple:A]][[zh-min-nan:A]]x", "CSI: Miami, Re:Zero; x"),
        ("[[:Category:X|Y]]", "Y"),
        ("[[Help:IPA|[a]]] x", "[a] x"),
        ("[[File:a.jpg|thumb|A [[picture|view]] [http://a.b of] {{lang|fr|x}}]]Text.", "Text."),
        ("Text.\n\n[[Category:A|B]]\n[[de:Titel]]\n[[Image:x.png]]", "Text."),
        ("See [http://a.b/c the site] and http://d.e.", "See the site and <url>."),
        # References, tables, formulas.
        ("A.<ref>See {{cite|a=b}} [[x]]</ref> B.<ref name=a/> C<ref name='a/b' />.", "A. B. C."),
        ("A.\n{| class='x'\n! h\n|-\n| b {{c}} || [[d]]\n{| \n| nested\n|}\n|}\nB.", "A.\nB."),
        ("If <math>x^{2}</math> is\n\n<math>\\frac{{a}}{b}</math>\n\nso.", "If formula is\nso."),
        ("<gallery>\nFile:a.jpg|b\n</gallery>A.<syntaxhighlight lang='c'>x</syntaxhighlight>", "A."),
        # Templates: out, but for those that say part of a sentence.
        ("{{Infobox\n| a = {{b|c}}\n| d = [[e]]\n}}\n'''X''' is.", "X is."),
        ("It is {{convert|5|km|mi}} or {{convert|5|to|10|m|abbr=on}} off.", "It is 5 km or 5 to 10 m off."),
        ("{{lang|fr|mot}}, {{lang-la|[[verbum|v]]}}, {{nowrap|a {{snd}} b}}, {{frac|1|2}}", "mot, v, a – b, 1/2"),
        ("{{quote|Said [[he|him]].|source=x}}", "Said him."),
        ("{{as of|2008}} the {{USS|Hornet|CV-12|6}} {{circa|1900}}", "As of 2008 the USS Hornet c. 1900"),
        ("{{chem|NH|4|+}} has {{formatnum:1234}} {{unknown|x}}parts", "NH4+ has 1234 parts"),
        # What templates leave behind.
        ("'''Albedo''' ({{IPAc-en|a}}), or ''x'' ({{a}}; born {{b}} 1900, {{c}}) is.", "Albedo, or x (born 1900) is."),
        ("A ({{a}}, {{b}}) b ({{c}}, d) e ( f, ) g", "A b (d) e (f) g"),
        # What is not closed harms nothing else.
        ("A {{open.\n\nB [[open.\n\nC.", "A open.\nB open.\nC."),
        ("A.<ref>open\n\nB {| open.", "A.open\nB {| open."),
        ("A.\n<onlyinclude>\nB.\n</onlyinclude>", "A.\nB."),
    ],
)
def test_paragraphs(step, markup, text):
    """Cleaning follows, which takes out tags, links and what empty brackets leave."""
    assert clean(step.paragraphs(markup), min_line_words=0, min_line_letters=0)[0] == text


PICTURES = {
    "en": "[[File:A.jpg|thumb|left|{}]]",
    "de": "[[Datei:A.jpg|mini|links|hochkant=1.2|{}]]",
    "de, old": "[[Bild:A.jpg|miniatur|rechts|{}]]",
    "fr": "[[Fichier:A.jpg|vignette|gauche|{}]]",
    "es": "[[Archivo:A.jpg|miniaturadeimagen|izquierda|{}]]",
    "ru": "[[Файл:A.jpg|мини|слева|200пкс|{}]]",
    "ja": "[[ファイル:A.jpg|サムネイル|左|{}]]",
    "vi": "[[Tập tin:A.jpg|nhỏ|trái|{}]]",
    "fi": "[[Tiedosto:A.jpg|pienoiskuva|vasen|{}]]",
}
CATEGORIES = "Category:A Kategorie:A|B Catégorie:A Categoría:A Категория:A カテゴリ:A Thể_loại:A Luokka:A".split()


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_pictures_and_categories_of_other_wikipedias_are_no_text(step, picture):
    caption = "A picture of the [[city]] in the year 1900, taken from the river."
    markup = picture.format(caption) + "\n'''Berlin''' is the capital of it.\n\n"
    markup += "\n".join(f"[[{category}]]" for category in CATEGORIES)
    assert step.paragraphs(markup) == "Berlin is the capital of it."
    left_over = picture.format("").removeprefix("[[").removesuffix("]]").partition("|")[2]
    assert clean(f"{left_over}The bridge stands over the river.")[0] == "The bridge stands over the river."
    assert clean(f"{picture.format('Here.')}{PROSE} [[{CATEGORIES[1]}]]")[0] == PROSE


def test_a_word_that_is_an_option_too_stays_where_no_picture_is():
    line = "He saw links|rechts in the table of that day."
    assert clean(line)[0] == line


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (page("'''A''' steht für:\n* [[B]]\n{{Begriffsklärung}}"), "disambiguation"),
        (page("'''A'''\n{{ Homonymie | x}}"), "disambiguation"),
        (page("#REDIRECT [[A]]"), "redirect"),
        (page("#weiterleitung: [[A]]"), "redirect"),
        (page("Text.", is_redirect=True), "redirect"),
        (page("Text.", namespace="10"), "not an article"),
        (page("Text.", model="css"), "not an article"),
        (page("'''A''' may refer to:\n* [[B]]\n* [[C]]"), "disambiguation"),
        (page("'''A''' is a letter.\n* [[B]]\n{{Letter disambig|x}}"), "disambiguation"),
        (page("'''A''' is a letter.", title="A (disambiguation)"), "disambiguation"),
        (page("{{Infobox}}\n* a list\n"), "no text"),
        (page(""), "no text"),
        (page("A may refer to: B. That is why.\n\nMore."), None),
        (page("{{Other uses|Dab (disambiguation)}} {{dablink|x}} Text."), None),
        (page("#REDIRECT [[A]] {{b}}", format="text"), None),  # not of a wiki
    ],
)
def test_reasons(step, document, reason):
    assert step.process(document) == reason


MARKS = "{{ }} [[ ]] {| |} | a. b <ref> </ref> <math> </math> <!-- --> '' ''' ( ) == * : = \n".split(" ")


@given(st.lists(st.sampled_from(MARKS)))
def test_any_markup_makes_clean_lines(step, parts):
    text = step.paragraphs("".join(parts))
    assert all(line and line == " ".join(line.split()) for line in text.split("\n")) or not text


def test_case_spacing_and_punctuation_make_no_difference():
    one = "It's late,\nsaid the “Émigré” - twice."
    for other in ('it’s LATE — said the\n"émigré" ... twice!', " It s late said the ÉMIGRÉ\u00a0twice"):
        assert fingerprint(one) == fingerprint(other)
        assert bands(one.replace("'", " ")) == bands(other.replace("’", " "))
    assert fingerprint(one) != fingerprint(one.replace("late", "later"))
    assert fingerprint("10 men") != fingerprint("11 men")
    assert len({fingerprint(text) for text in ("", "?", "!", "— —")}) == 4


def test_values_are_the_same_on_every_machine():
    assert fingerprint("The same text, on another machine.") == (9503809916397271360, 736863472412280904)
    assert bands("The same text, on another machine.")[:2] == [6970235066902514239, 3581358794277364210]
    rows = np.array([[1, 2], [2**64 - 1, 2**63]], np.uint64)
    assert [draw(rows, seed).tolist() for seed in (1, -1)] == [
        [0.26787322187294205, 0.06921986494314858],
        [0.43449008027731306, 0.022775962831792507],
    ]


@pytest.mark.parametrize("similarity", [0.6, 0.7, 0.8, 0.9])
def test_similar_texts_share_a_band_as_often_as_computed_and_the_page_says_so(similarity):
    """Their sets of runs of 5 words have about this Jaccard similarity: both open alike, then differ."""
    chance = 1 - (1 - similarity**14) ** 18
    assert f"| {similarity} | {chance:.0%} |" in (ROOT / "docs" / "data.md").read_text()
    generator, found = random.Random(1), []
    shared = round(400 * 2 * similarity / (1 + similarity)) + 4
    for _ in range(150):
        first, ending = ([f"w{generator.getrandbits(64)}" for _ in range(400)] for _ in range(2))
        of_first, of_other = bands(" ".join(first)), bands(" ".join(first[:shared] + ending[shared:]))
        found.append(any(map(eq, of_first, of_other)))
    assert abs(sum(found) / 150 - chance) < 3.5 * (chance * (1 - chance) / 150) ** 0.5


U64 = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("valid_share", [0.005, 0.5])
@pytest.mark.parametrize("columns", [(0, 1), (1, 0)])
def test_share(valid_share, columns):
    counting = np.stack([np.zeros(100_000, np.uint64), np.arange(100_000, dtype=np.uint64)], axis=1)
    found = draw(counting[:, columns], seed=1) < valid_share
    assert abs(found.sum() - 100_000 * valid_share) < 4 * (100_000 * valid_share * (1 - valid_share)) ** 0.5


@given(st.lists(st.lists(st.tuples(U64, U64), max_size=5), max_size=3), st.sampled_from([0.0, 1e-9, 0.3, 1.0]))
def test_one_document_is_held_out_where_the_rule_holds_out_none(units, valid_share):
    draws = [draw(np.array(unit, dtype=np.uint64).reshape(-1, 2), 1) for unit in units]
    every = np.concatenate([np.array([]), *draws])
    held_out = every[every < threshold(draws, valid_share)]
    if (every < valid_share).any() or not valid_share or len(every) < 2:
        assert held_out.tolist() == every[every < valid_share].tolist()
    else:
        assert set(held_out) == {every.min()}


HASH = st.sampled_from([0, 1, 2, 2**32, 2**63, 2**63 + 1, 2**64 - 1])


def naive(documents):
    """[(fingerprint, bands)] -> decisions, with dicts."""
    seen, decisions = set(), []
    for own, of_bands in documents:
        keys = {*enumerate(of_bands)}
        is_near = bool(keys & seen)
        decision = duplicates.DUPLICATE if own in seen else duplicates.NEAR_DUPLICATE if is_near else duplicates.KEEP
        decisions.append(decision)
        seen |= {own, *keys}
    return decisions


DOCUMENTS = st.lists(st.lists(st.tuples(*[HASH] * 5), max_size=15), min_size=1, max_size=5)


@settings(max_examples=40)
@given(DOCUMENTS, st.integers(0, 3), st.integers(1, 50))
def test_is_what_dicts_find_however_divided(units, width, documents_at_once):
    arrays = [np.array(unit, dtype=np.uint64).reshape(-1, 5) for unit in units]
    fingerprints = [unit[:, :2] for unit in arrays]
    bands = [unit[:, 2 : 2 + (width if len(unit) else 0)] for unit in arrays]  # as a unit without documents is stored
    found = find_duplicates(fingerprints, bands, documents_at_once)
    assert list(map(len, found)) == list(map(len, units))
    documents = [((*numbers[:2], "f"), numbers[2 : 2 + width]) for unit in units for numbers in unit]
    assert np.concatenate(found).tolist() == naive(documents)
