"""What may be given as DATA: a corpus, its shards, folders of binarised data."""

import re

import pytest
from helpers import build_toy_corpus

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.tasks.full_sentences_masked_lm import data_folders, tokenizer_of


def test_a_corpus_stands_for_its_shards_in_order(tmp_path):
    for number in (10, 2, 0):
        (tmp_path / "corpus" / f"shard{number}").mkdir(parents=True)
    (tmp_path / "corpus" / "shards").mkdir()
    (tmp_path / "plain").mkdir()
    corpus, plain = str(tmp_path / "corpus"), str(tmp_path / "plain")
    shards = [f"{corpus}/shard{number}" for number in (0, 2, 10)]
    assert data_folders(corpus) == shards
    assert data_folders(f"{corpus}:{plain}") == [*shards, plain]
    assert data_folders(shards[1]) == [shards[1]]
    with pytest.raises(UserError, match="missing is no folder"):
        data_folders(f"{corpus}:missing")


def test_the_tokenizer_of_a_corpus_and_of_a_shard(tmp_path):
    build_toy_corpus(tmp_path / "corpus", 160)
    (shard,) = data_folders(str(tmp_path / "corpus"))
    assert tokenizer_of(shard) == tokenizer_of(str(tmp_path / "corpus")) == tmp_path / "corpus" / "tokenizer"


@pytest.mark.parametrize("given", ["corpus", pytest.param("shards", marks=pytest.mark.slow)])
def test_pretraining_takes_a_shard_an_epoch(given, tmp_path, fairseq_train, caplog):
    corpus = tmp_path / "corpus"
    build_toy_corpus(corpus, 160, shards=2)
    data = corpus if given == "corpus" else f"{corpus}/shard0:{corpus}/shard1"
    options = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 8"
    with caplog.at_level("INFO"):
        fairseq_train(data, f"{options} --max-epoch 3", tmp_path / "run")
    read = re.findall(r"shard(\d)/train: \d+ items packed", "\n".join(caplog.messages))
    assert read[:3] == ["0", "1", "0"]  # fairseq reads one ahead
    assert (tmp_path / "run" / "tokenizer").is_dir()
