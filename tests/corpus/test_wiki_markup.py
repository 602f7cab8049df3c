"""Paragraphs of wiki markup."""

import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.steps import Document
from lazyformer_fairseq.corpus.wiki_markup import ExtractWikiMarkup, load_extractor
from lazyformer_fairseq.errors import UserError


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
        ("[[:Category:X|Y]]", "Y"),
        ("[[Help:IPA|[a]]] x", "[a] x"),
        ("[[File:a.jpg|thumb|A [[picture|view]] [http://a.b of] {{lang|fr|x}}]]Text.", "Text."),
        ("Text.\n\n[[Category:A|B]]\n[[de:Titel]]\n[[Image:x.png]]", "Text."),
        ("See [http://a.b/c the site] and http://d.e.", "See the site and http://d.e."),
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
        ("A {{open.\n\nB [[open.\n\nC.", "A {{open.\nB [[open.\nC."),
        ("A.<ref>open\n\nB {| open.", "A.open\nB {| open."),
        ("__NOTOC__\nA.\n<onlyinclude>\nB.\n</onlyinclude>", "A.\nB."),
    ],
)
def test_paragraphs(step, markup, text):
    assert step.paragraphs(markup) == text


@pytest.mark.parametrize(
    ("document", "reason"),
    [
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
    ],
)
def test_reasons(step, document, reason):
    assert step.process(document) == reason


def test_other_formats_pass(step):
    document = Document("#REDIRECT [[A]] {{b}}", "a", metadata={"format": "text"})
    assert step.process(document) is None
    assert document.text == "#REDIRECT [[A]] {{b}}"


MARKS = "{{ }} [[ ]] {| |} | a. b <ref> </ref> <math> </math> <!-- --> '' ''' ( ) == * : = \n".split(" ")


@given(st.lists(st.sampled_from(MARKS)))
def test_any_markup_makes_clean_lines(step, parts):
    text = step.paragraphs("".join(parts))
    assert all(line and line == " ".join(line.split()) for line in text.split("\n")) or not text


def test_is_quiet(step, caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        step.paragraphs("{{#expr:1/0}} {{a|{{b}}}} [[[[c]]")
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_without_wikiextractor(monkeypatch):
    load_extractor.cache_clear()
    monkeypatch.setitem(sys.modules, "wikiextractor.extract", None)
    with pytest.raises(UserError, match=r"pip install lazyformer_fairseq\[corpus\]"):
        ExtractWikiMarkup().process(page("Text."))
