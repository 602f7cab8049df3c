"""The whole way with a tokenizer that came with another model: corpus, pre-training, GLUE, use, export."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.tasks import setup_task
from helpers import head_logits, mostly_slow, toy_texts, updates_of, write_toy_glue
from in_process import parsed
from other_tokenizers import write_bert_files, write_roberta_files

from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.corpus.steps import Document
from lazyformer_fairseq.corpus.words import NormaliseWords
from lazyformer_fairseq.data.prepared_folder import PreparedTask
from lazyformer_fairseq.data.text.library_tokenizer import adopt_tokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer, tokenizer_hashes
from lazyformer_fairseq.evaluation.export import export
from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel
from lazyformer_fairseq.finetuning.tasks.glue import GridSettings, prepare_tasks
from lazyformer_fairseq.storage.indexed_format import MappedItems

WRITERS = {"bert": write_bert_files, "roberta": write_roberta_files}
TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2"


@pytest.fixture(scope="module", params=mostly_slow(WRITERS, "bert"))
def corpus(request, tmp_path_factory) -> Path:
    """A corpus of toy text and of texts that hold symbols, made by the tokenizer of a BERT or a RoBERTa."""
    folder = tmp_path_factory.mktemp(request.param)
    source = WRITERS[request.param](folder / "source")
    rows = 160 if request.param == "bert" else 340
    adopt_tokenizer(source, folder / "tokenizer", rows)
    odd = "A [MASK] or <mask> here, [CLS] and <s> there, are words of a text about masked models."
    (folder / "text.txt").write_text("\n\n".join([*toy_texts(80), *[f"{odd} Ben sees it in {n}." for n in range(5)]]))
    settings = CorpusSettings(valid_share=0.1, tokenizer=str(folder / "tokenizer"), unit_megabytes=0.002)
    manifest = build_corpus([str(folder / "text.txt")], folder / "data", settings)
    assert manifest["settings"]["vocab_size"] == rows
    return folder / "data"


@pytest.fixture
def pretrained(corpus, fairseq_train) -> Path:
    """A folder of checkpoints after two updates."""
    folder = corpus.parent / "checkpoints"
    if not (folder / "checkpoint_last.pt").exists():
        arguments = f"{TINY} --criterion masked_lm_accuracy --batch-size 4 --max-update 2"
        state = fairseq_train(corpus, arguments, folder)
        assert updates_of(state) == 2
    return folder


def test_ids_of_the_corpus_are_those_of_its_sentences(corpus):
    """Nothing is unknown for being rare, nothing is masked, and no text ends but where a sentence does."""
    tokenizer = load_tokenizer(corpus / "tokenizer")
    library = tokenizer._library
    found = set()
    for split in ("train", "valid"):
        items = MappedItems(corpus / "shard0" / split)
        for index in range(len(items)):
            ids = items[index].tolist()
            assert ids[-1] == tokenizer.special.eos
            assert not {*ids[:-1]} & {tokenizer.special[role] for role in (0, 1, 2, 4)}
            found.add(tuple(ids[:-1]))
    sentences = [f"{sentence}." for text in toy_texts(80) for sentence in text.split(".") if sentence]
    wanted = {tuple(library.encode(sentence.strip(), add_special_tokens=False).ids) for sentence in sentences}
    assert wanted <= found
    manifest = json.loads((corpus / "manifest.json").read_text())
    assert manifest["settings"]["word_coverage"] == 1
    assert manifest["vocabulary"]["dropped_tokens_share"] == 0


def test_masking_takes_the_special_symbols_from_the_dictionary(corpus):
    tokenizer = load_tokenizer(corpus / "tokenizer")
    own = f"{TINY} --task full_sentences_masked_lm --criterion masked_lm_accuracy --tokens-per-sample 32 --no-save"
    task = setup_task(parsed([str(corpus), *own.split(), "--save-dir", ""]).task)
    task.load_dataset("train")
    dataset = task.dataset("train")
    bos, pad, eos, unk, mask = tokenizer.special
    drawn = set()
    for epoch in range(1, 6):
        dataset.set_epoch(epoch)
        for index in range(len(dataset)):
            example, block = dataset[index], torch.from_numpy(dataset.block(index))
            source, target = example["source"], example["target"]
            assert (source[0], source[-1]) == (bos, eos)
            predicted = target != pad
            assert torch.equal(target[predicted], block[predicted])
            assert not np.isin(target[predicted], (bos, eos, unk, mask)).any()
            assert torch.equal(source[~predicted], block[~predicted])
            drawn |= {*source[predicted & (source != block)].tolist()}
    assert mask in drawn
    assert not drawn & {bos, pad, eos, unk}
    assert max(drawn) >= len(tokenizer.symbols) - 10  # rows without a symbol too
    batch = dataset.collater([dataset[index] for index in range(len(dataset))])
    tokens = batch["net_input"]["src_tokens"]
    assert (tokens == pad).sum() == tokens.numel() - batch["ntokens"]


def test_pretrained_and_used(pretrained, tmp_path):
    hub = LazyFormerModel.from_pretrained(pretrained)
    tokenizer = hub.tokenizer
    embedding = hub.model.encoder.sentence_encoder.embed_tokens
    assert embedding.padding_idx == tokenizer.special.pad
    assert embedding.num_embeddings == len(tokenizer.symbols)
    for text in (f"Anna sees the {tokenizer.mask_word}.", "Anna sees the <mask>."):
        answers = hub.fill_mask(text, topk=len(tokenizer.symbols))
        assert sum(answer.probability for answer in answers) == pytest.approx(1, abs=1e-4)
        assert "sees the" in answers[0].text
    ids = hub.encode("Anna.", "Anna sees the old garden.")
    assert ids[0, -1] == tokenizer.special.pad
    alone, together = hub.extract_features("Anna."), hub.extract_features("Anna.", "Anna sees the old garden.")
    assert torch.allclose(together[:1, : alone.size(1)], alone, atol=1e-5)
    export(pretrained, tmp_path / "model")
    again = LazyFormerModel.from_pretrained(tmp_path / "model")
    assert again.fill_mask("Anna <mask>.", topk=1) == hub.fill_mask("Anna <mask>.", topk=1)


def test_glue_is_prepared_as_its_own_files_give_it_and_fine_tuned(corpus, pretrained, fairseq_train, tmp_path):
    tokenizer = load_tokenizer(pretrained / "tokenizer")
    data = write_toy_glue(tmp_path / "glue", train=40, valid=10)
    places = {"data": data, "tokenizer": pretrained / "tokenizer", "output": tmp_path / "out"}
    for prepared in prepare_tasks(GridSettings(**places, max_length=14, tasks=("CoLA", "RTE"))):
        bos, _, eos, *_ = tokenizer.special
        examples = PreparedTask.load(prepared.folder).read("train", None, eos)
        ends = [int((examples.inputs[index] == eos).sum()) for index in range(len(examples.inputs))]
        is_pair = prepared.task.is_pair
        assert set(ends) == {1 + tokenizer.separators if is_pair else 1}
        assert all(examples.inputs[index][0] == bos for index in range(len(ends)))
        assert prepared.manifest["tokenizer"] == tokenizer_hashes(pretrained / "tokenizer")
        own = f"{TINY} --task glue --glue-task {prepared.task.name} --criterion glue --tokens-per-sample 14"
        words = [data / prepared.task.folder, *own.split(), "--tokenizer-folder", pretrained / "tokenizer"]
        read = setup_task(parsed(list(map(str, words))).task)
        read.load_dataset("train")
        for index in range(8):
            assert read.dataset("train")[index]["source"].tolist() == examples.inputs[index].tolist()
        if not is_pair:
            assert examples.inputs[0].tolist() == tokenizer.build_input("anna sees the house")
            assert prepared.manifest["splits"]["train"]["words"] >= 4 * 40
        arguments = f"{TINY} --criterion glue --batch-size 16 --max-update 2 --tokens-per-sample 14"
        arguments += f" --finetune-from-model {pretrained / 'checkpoint_last.pt'}"
        save_dir = tmp_path / prepared.task.name
        state = fairseq_train(prepared.folder, arguments, save_dir, task=f"glue --glue-task {prepared.task.name}")
        assert updates_of(state) == 2
        head = prepared.task.name.lower()
        hub = LazyFormerModel.from_pretrained(save_dir)
        assert head_logits(hub, head, "Anna sees the house.").shape == (1, 2)


@pytest.mark.parametrize("writer", WRITERS)
def test_wikitext_s_unknown_words_stay_unknown(writer, tmp_path):
    tokenizer = adopt_tokenizer(WRITERS[writer](tmp_path / "source"), tmp_path / "ours")
    step = NormaliseWords(pickle.loads(pickle.dumps(tokenizer.settings)))

    def normalised(text: str, format: str) -> str:
        document = Document(text=text, id="a:1", metadata={"format": format})
        assert step.process(document) is None
        return document.text

    for format, unknown in (("wikitext", 1), ("text", 0)):
        sentence, other = normalised("Anna sees <unk> here.\nThe <mask>.", format).split("\n")
        assert sentence.split(" ").count(tokenizer.symbols[tokenizer.special.unk]) == unknown
        assert tokenizer.mask_index not in tokenizer.encode_normalised(other)
        if unknown:
            assert tokenizer.special.unk in tokenizer.encode_words(sentence.split(" "))[0]
            assert "" not in normalised("<unk><unk> <unk>  a <unk>", format).split(" ")
