"""The table of attention variants: its rows, what readers learn of them, and what is refused."""

import pytest
from helpers import assert_refused

from lazyformer_fairseq.patterns.attention_variants import (
    ATTENTION_VARIANTS,
    CHOICES,
    SETTINGS,
    chosen_variants,
    with_defaults,
)
from lazyformer_fairseq.patterns.grammar import expand, plan
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER


@pytest.mark.parametrize("row", ATTENTION_VARIANTS, ids=lambda row: row.name)
def test_a_row_is_whole(row):
    assert row.choice in CHOICES and row.source
    assert row.load().__module__.startswith("lazyformer_fairseq.modules.sublayers.attention_variants.")
    assert row not in chosen_variants(with_defaults(()))
    assert set(dict(row.excludes)) <= {*CHOICES, *(other.name for other in ATTENTION_VARIANTS)} - {row.name, row.choice}


def test_settings_have_names_of_their_own_and_a_plain_s_chooses_nothing():
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    assert chosen_variants(plan("s")[0].values) == []


def test_settings_stand_in_the_tables_order_whatever_is_written():
    assert expand("( s[ window = 4 ] f )x2") == "s[window=4]fs[window=4]f"
    assert expand("s[synthesizer=dot + dense]") == "s[synthesizer=dense+dot]"  # one spelling for one meaning
    assert expand("s[ rope=10000 , qk_norm ]") == "s[qk_norm,rope=10000]"
    read = plan("s[entmax=1.5] s[entmax=learned]")
    assert [each.values["entmax"] for each in read] == [1.5, "learned"]


def test_a_reader_knows_whom_it_reads():
    window, lazy, _, plain, consumer = plan("s[window=3] l f s l")
    assert lazy.producer.values["window"] == 3 and window.consumers == ("distribution",)
    assert consumer.producer.settings == () and plain.consumers == ("distribution",)


@pytest.mark.parametrize(
    ("pattern", "under", "why"),
    [
        ("f s[window=0]", "0", "window must be 1 or more"),
        ("f s[window]", "window", "window needs a value, as in s[window=1]"),
        ("s[qk_norm=yes]", "=", "qk_norm takes no value: write s[qk_norm]"),
        ("s[buckets=4, qk_norm ]", "qk_norm", "qk_norm cannot be combined with buckets"),
        ("s[linformer=4,rope=10]", "rope", "rope cannot be combined with linformer"),
        ("s[synthesizer=random,rope=10]", "rope", "use a synthesizer with dot"),
        ("s[synthesizer=dense+dot,rope=10]", "rope", "and no dense term"),
        ("s[synthesizer=dense,qk_norm]", "qk_norm", "use a synthesizer with dot"),
        ("f s[windw=2]", "windw", "did you mean window?"),
        ("s[window=2,global=first]", "first", "global needs a whole number or given, not 'first'"),
        ("s[dilation=2]f", "dilation", "dilation needs window, as in s[window=...,dilation=...]"),
        ("s[window=2,dilated_heads=3]f", "dilated_heads", "dilated_heads needs a dilation"),
        ("s[window=2,global=1,persistent=3]", "global", "global cannot be combined with persistent"),
        ("s[strided=8,part=neither]", "neither", "part must be one of both, local, summary"),
        ("s[part=local]", "part", "part needs strided or fixed, as in s[strided=...,part=...]"),
        ("s[strided=8,summary=4]", "summary", "summary needs fixed"),
        ("s[strided=8,fixed=4]", "fixed", "strided and fixed both determine the mask"),
        ("s[fixed=8,part=local,summary=2]", "summary", "part=local sees no summaries"),
        ("s[fixed=8,part=local,heads=split]", "heads", "part=local leaves only one part"),
        ("s[fixed=4,summary=6]", "summary", "summary=6 is longer than the block of 4 positions: use summary=4 or less"),
        ("s[linformer=2,share=all]", "all", "share must be one of none, heads, kv, layers"),
        ("s[window=2,linformer=2]", "window", "window cannot be combined with linformer"),
        ("s[synthesizer=dence]", "dence", "synthesizer must be a sum of some of dense, random, fixed"),
        ("s[synthesizer=dot]", "synthesizer", "dot alone is the default of an s"),
        ("s[synthesizer=dense+dense]", "dense+dense", "contains a duplicate term"),
        ("s[synthesizer=dense,rank=4]", "rank", "rank applies only to factorised_random"),
        ("s[entmax=nan]", "nan", "entmax must be from 1.01 to 2"),
        ("s[window=2.5]", "2.5", "window needs a whole number, not '2.5'"),
        ("s[entmax=learnt]", "learnt", "entmax needs a number or learned, not 'learnt'"),
        ("s[buckets=5]", "buckets", "buckets must be even"),
        ("s[buckets=0]", "0", "buckets must be 2 or more"),
        ("c[form=dense]f", "dense", "form must be one of depthwise, lightweight, not 'dense'"),
        ("c[window=3]f", "window", "has no setting 'window'"),
        ("s[buckets=8,entmax=1.5]", "entmax", "entmax cannot be combined with buckets: the hashing rounds are"),
        ("s[buckets=8,persistent=4]", "persistent", "persistent cannot be combined with buckets: persistent vectors"),
    ],
)
def test_what_means_nothing_is_refused(pattern, under, why):
    assert_refused(pattern, under, why)


@pytest.mark.parametrize(
    ("pattern", "direction", "under", "why"),
    [
        ("f s[window=2, global=given]", CAUSAL, "global", "global=given is for encoders"),
        ("fs[linformer=2]", CAUSAL, "linformer", "linformer is not for causal models: each of its keys mixes all"),
        ("s[synthesizer=random,length=8]", ENCODER, "length", "--max-positions sets the maximum input"),
    ],
)
def test_what_means_nothing_in_one_direction_is_refused_there(pattern, direction, under, why):
    assert_refused(pattern, under, why, direction)
    plan(pattern, ENCODER if direction == CAUSAL else CAUSAL)
