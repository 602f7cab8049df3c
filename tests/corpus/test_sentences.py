"""Sentence boundaries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.sentences import SentenceSplitter
from lazyformer_fairseq.errors import UserError

split = SentenceSplitter()


@pytest.mark.parametrize(
    "sentences",
    [
        ["He left.", '"Come back," she said.', '"Now!" he cried.', "(She did.)", "Then it ended."],
        ["“Where?” asked Anna.", "‘Here.’", "They met."],
        ["Dr. Smith came, as in Fig. 2, at 5 p.m. exactly.", "See cf. the rule, e.g. os.path."],
        ["Call foo.Bar of 3.11.7 here.", "Wait... what?"],
        ["No. 5 is alive.", "He said no.", "Then he left."],
        ["One without an end"],
        [],
    ],
)
def test_boundaries(sentences):
    assert split(" ".join(sentences)) == sentences


@given(st.text("aB.?!\"'( )1\n", max_size=40))
def test_no_character_is_lost(text):
    assert "".join("".join(split(text)).split()) == "".join(text.split())


def test_missing_spacy_model():
    with pytest.raises(UserError, match="'xx_no_such': not installed"):
        SentenceSplitter("xx_no_such")
