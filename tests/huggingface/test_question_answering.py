"""Answers of exported and of imported models are ours, down to the characters of a real paragraph."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from exports import code_in, export_custom, some_ids, tiny_model
from helpers import ROOT
from tiny_berts import save_tiny
from trained_encoders import write_encoder

from lazyformer_fairseq.data.datasets.question_windows import WindowSettings
from lazyformer_fairseq.data.squad import Paragraph, SquadFile, read_squad
from lazyformer_fairseq.evaluation.inference import TrainedModel
from lazyformer_fairseq.evaluation.loading import load
from lazyformer_fairseq.huggingface.export import export_to_huggingface
from lazyformer_fairseq.huggingface.forms import BERT, CUSTOM
from lazyformer_fairseq.huggingface.importing import import_to
from lazyformer_fairseq.huggingface.models import heads

CHECKPOINT = ROOT / "tests/fixtures/checkpoints/encoder"
LONGEST = 500  # tokens of an input
LONGEST_ANSWER = 30


@pytest.fixture(scope="module")
def paragraphs(real_data) -> SquadFile:
    """Three of several articles, as much of them as one window of letters holds, with a question each."""
    file = read_squad(real_data / "squad" / "train-v1.1.part.json")
    some = [each for each in file.paragraphs[::900] if each.qas][:3]
    return SquadFile(file.path, [Paragraph(each.context[:300], each.qas[:1]) for each in some])


def our_answers(hub: TrainedModel, file: SquadFile) -> list[str]:
    sizes = {"settings": WindowSettings(LONGEST, 128, 128), "longest_answer": LONGEST_ANSWER}
    return [hub.answer(each.qas[0].question, each.context, **sizes)[0].text for each in file.paragraphs]


def their_answers(folder: Path, model: torch.nn.Module, file: SquadFile) -> Iterator[str]:
    """The best ones with what transformers alone offers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for paragraph in file.paragraphs:
        how = {"return_offsets_mapping": True, "return_tensors": "pt"}
        encoded = tokenizer(paragraph.qas[0].question, paragraph.context, **how)
        offsets = encoded.pop("offset_mapping")[0].tolist()
        of_context = [part == 1 for part in encoded.sequence_ids(0)]
        found = model(**encoded)
        starts, ends = found.start_logits[0].tolist(), found.end_logits[0].tolist()
        spans = [
            (starts[first] + ends[last], first, last)
            for first in range(len(offsets))
            for last in range(first, min(first + LONGEST_ANSWER, len(offsets)))
            if all(of_context[place] and offsets[place][0] < offsets[place][1] for place in (first, last))
        ]
        _, first, last = max(spans)
        yield paragraph.context[offsets[first][0] : offsets[last][1]]


@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert"])
@torch.no_grad()
def test_an_imported_model_gives_the_answers_that_it_gave(family, paragraphs, tmp_path):
    theirs = save_tiny(tmp_path / "in", f"{family}ForQuestionAnswering", max_position_embeddings=512)
    notes = import_to(tmp_path / "in", tmp_path / "out")
    assert any("the model's qa_outputs became the span head 'squad'" in note for note in notes)
    hub = load(tmp_path / "out")
    ids = hub.encode("the cat sat on the mat .", "the dog ran")
    text = ids.ne(hub.tokenizer.special.pad)
    found, _ = hub.model(ids, classification_head_name="squad")
    expected = theirs(ids, attention_mask=text.long())
    for ours, logits in zip(found.unbind(-1), (expected.start_logits, expected.end_logits), strict=True):
        torch.testing.assert_close(ours[text], logits[text], atol=1e-5, rtol=0)
    if family == "Bert":  # the others' tiny vocabularies know few letters
        answers = list(their_answers(tmp_path / "in", theirs, paragraphs))
        assert our_answers(hub, paragraphs) == answers and len(set(answers)) == 3


@pytest.mark.parametrize("form", [BERT, CUSTOM])
@torch.no_grad()
def test_a_bert_comes_back_with_its_span_head(form, paragraphs, tmp_path):
    theirs = save_tiny(tmp_path / "in", "BertForQuestionAnswering", max_position_embeddings=512)
    import_to(tmp_path / "in", tmp_path / "ours", head_name="spans")
    assert export_to_huggingface(tmp_path / "ours", tmp_path / "back", form=form) == form
    back = transformers.BertForQuestionAnswering if form == BERT else heads.LazyFormerForQuestionAnswering
    model = back.from_pretrained(tmp_path / "back")
    answers = [their_answers(tmp_path / name, each, paragraphs) for name, each in (("in", theirs), ("back", model))]
    assert list(answers[0]) == list(answers[1])
    card = (tmp_path / "back" / "README.md").read_text()
    for known in (
        "pipeline_tag: question-answering",
        "AutoModelForQuestionAnswering",
        "| span head | spans: the start",
    ):
        assert known in card


@torch.no_grad()
def test_a_model_of_ours_gives_its_answers_in_transformers(paragraphs, tmp_path):
    write_encoder(tmp_path / "ours", CHECKPOINT, "sflf", "squad", 2, "span", seed=2, max_positions=512)
    hub = load(tmp_path / "ours")
    assert export_to_huggingface(tmp_path / "ours", tmp_path / "out") == CUSTOM
    exported = heads.LazyFormerForQuestionAnswering.from_pretrained(tmp_path / "out")
    answers = list(their_answers(tmp_path / "out", exported, paragraphs))
    assert our_answers(hub, paragraphs) == answers and len(set(answers)) == 3


@torch.no_grad()
def test_spans_and_their_loss_are_exact_wherever_padding_stands(tmp_path):
    model = tiny_model("span", encoder_normalize_before=True)
    code = code_in(export_custom(model, tmp_path))
    exported, loading = code.LazyFormerForQuestionAnswering.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    ids = some_ids(left=2, right=3)
    text = ids.ne(1)
    first, last = torch.tensor([2, 4, 3]), torch.tensor([5, 4, 99])  # the last answer's end was cut off
    found = exported(ids, attention_mask=text.long(), start_positions=first, end_positions=last)
    starts, ends = model(ids, classification_head_name="cola")[0].unbind(-1)
    torch.testing.assert_close(found.start_logits[text], starts[text], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.end_logits[text], ends[text], atol=1e-5, rtol=1e-5)
    loss = torch.nn.functional.cross_entropy(starts, first) / 2
    loss += torch.nn.functional.cross_entropy(ends[:2], last[:2]) / 2
    torch.testing.assert_close(found.loss, loss, atol=1e-5, rtol=1e-5)
    _, loading = code.LazyFormerForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]


def test_an_output_for_other_than_two_places_is_left_out(tmp_path):
    save_tiny(tmp_path / "in", "BertForQuestionAnswering", num_labels=3)
    notes = import_to(tmp_path / "in", tmp_path / "out")
    assert any("not imported: qa_outputs.bias, qa_outputs.weight" in note for note in notes)
