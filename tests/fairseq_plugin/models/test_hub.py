import shutil

import pytest
import torch
from helpers import ROOT, assert_equal_state

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import match_classification_heads
from lazyformer_fairseq.modules.networks.heads import HEADS, ClassificationHead, LinearHead, SpanHead

TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2x2 --criterion masked_lm_accuracy --batch-size 16"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def trained(data_folder, run_folder, fairseq_train):
    """A folder of checkpoints of a model that has learned the toy language a little."""
    if not (run_folder / "checkpoint_last.pt").exists():
        options = f"{TINY} --encoder-embed-dim 64 --lr 1e-2 --max-update 150 --dropout 0 --disable-validation"
        fairseq_train(data_folder, options, run_folder)
    return run_folder


def test_fill_mask_from_raw_text(trained):
    hub = LazyFormerModel.from_pretrained(trained)
    answers = hub.fill_mask("The <mask> of Anna is behind the old garden.", topk=3)
    assert len(answers) == 3
    assert [answer.probability for answer in answers] == sorted(
        (answer.probability for answer in answers), reverse=True
    )
    things = ["house", "garden", "river", "letter", "window", "bridge", "market", "forest", "island", "mirror"]
    assert answers[0].word in things, "it should have learned what can stand there"
    assert answers[0].text == f"the {answers[0].word} of anna is behind the old garden."
    everything = hub.fill_mask("Anna <mask> Ben near the river.", topk=len(hub.tokenizer.dictionary))
    assert sum(answer.probability for answer in everything) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("text", ["no mask at all", "<mask> and <mask>"])
def test_fill_mask_wants_one_mask(trained, text):
    with pytest.raises(UserError, match="<mask> in the text, must be once"):
        LazyFormerModel.from_pretrained(trained).fill_mask(text)


def test_features_of_a_text_do_not_depend_on_its_batch(trained):
    hub = LazyFormerModel.from_pretrained(str(trained), "checkpoint_last.pt")
    short, long = (
        "Anna sees Ben near the house.",
        "Anna and Ben walk to the river together, Cara and Dan to the market.",
    )
    alone = hub.extract_features(short)
    together = hub.extract_features(short, long)
    assert alone.shape == (1, len(hub.tokenizer.build_input(short)), 64)
    torch.testing.assert_close(together[:1, : alone.size(1)], alone)


def test_padding_on_the_left_changes_nothing(trained):
    model = (hub := LazyFormerModel.from_pretrained(trained)).model
    model.register_classification_head("cola", 2)
    ids, longer = hub.encode("Anna sees Ben."), hub.encode("Anna and Ben walk to the river together.")
    missing = longer.size(1) - ids.size(1)
    batch = torch.cat([torch.nn.functional.pad(ids, (missing, 0), value=hub.tokenizer.dictionary.pad()), longer])
    torch.testing.assert_close(model(batch)[0][:1, missing:], model(ids)[0])
    heads = {"classification_head_name": "cola"}
    torch.testing.assert_close(model(batch, **heads)[0], torch.cat([model(each, **heads)[0] for each in (ids, longer)]))


def test_a_list_of_texts_is_taken_and_no_text_refused_in_a_line(trained):
    hub = LazyFormerModel.from_pretrained(trained)
    texts = ["Anna sees Ben.", "The house."]
    assert torch.equal(hub.extract_features(texts), hub.extract_features(*texts))
    for wrong in ((), ([],)):
        with pytest.raises(UserError, match=r"no text: give one or more, as in extract_features\('One"):
            hub.extract_features(*wrong)
    for wrong in (("Anna", 3), (["Anna", None],), (b"Anna",)):
        with pytest.raises(UserError, match="(3|None|b'Anna') is no text: give strings"):
            hub.extract_features(*wrong)
    with pytest.raises(UserError, match="takes one text at a time"):
        hub.fill_mask(["The <mask>.", "A <mask>."])


def test_a_checkpoint_may_be_given_instead_of_its_folder(trained):
    by_name = LazyFormerModel.from_pretrained(trained, "checkpoint_last.pt")
    by_file = LazyFormerModel.from_pretrained(str(trained / "checkpoint_last.pt"))
    assert torch.equal(by_file.extract_features("The house."), by_name.extract_features("The house."))
    with pytest.raises(UserError, match=r"^\S*absent.pt: no such file or folder"):
        LazyFormerModel.from_pretrained(trained / "absent.pt")


def test_text_longer_than_the_model_is_cut(trained):
    hub = LazyFormerModel.from_pretrained(trained)
    assert hub.extract_features("Anna sees Ben. " * 400).size(1) == hub.model.max_positions() == 512
    with pytest.raises(UserError, match="no classification head 'cola'; the checkpoint has: none"):
        hub.predict("cola", "Anna sees Ben.")


def test_missing_and_foreign_files_are_named(trained, tmp_path):
    with pytest.raises(UserError, match="holds no checkpoint_best.pt or checkpoint_last.pt or model.pt"):
        LazyFormerModel.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds no other.pt"):
        LazyFormerModel.from_pretrained(trained, "other.pt")
    torch.save({"model": {}}, tmp_path / "model.pt")
    with pytest.raises(UserError, match="tokenizer"):
        LazyFormerModel.from_pretrained(tmp_path)
    shutil.copytree(trained / "tokenizer", tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"model\.pt: .*no(t a)? checkpoint"):
        LazyFormerModel.from_pretrained(tmp_path)


POSITIONS = "encoder.sentence_encoder.embed_positions.weight"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda state: state["model"][POSITIONS][3].fill_(torch.nan), "embed_positions.weight holds NaN or Inf"),
        (lambda state: state["model"][POSITIONS][3].fill_(-torch.inf), "embed_positions.weight holds NaN or Inf"),
        (
            lambda state: state["model"].update({POSITIONS: state["model"][POSITIONS].int()}),
            "embed_positions.weight holds torch.int32, the model's torch.float32",
        ),
        (lambda state: state["cfg"]["model"].update(_name="bert_huge"), "its model 'bert_huge' is unknown here"),
        (lambda state: state["cfg"]["task"].update(_name="mine"), "its task 'mine' is unknown here"),
        (lambda state: state["cfg"]["model"].update(rotary=True, alibi=2), "no setting alibi, rotary"),
    ],
)
def test_what_cannot_be_right_is_refused(tmp_path, spoil, words):
    folder = ROOT / "tests/fixtures/checkpoints_of_2026_11/encoder"
    shutil.copytree(folder / "tokenizer", tmp_path / "tokenizer")
    state = torch.load(folder / "checkpoint_last.pt")
    spoil(state)
    torch.save(state, tmp_path / "checkpoint_last.pt")
    with pytest.raises(UserError, match=words):
        LazyFormerModel.from_pretrained(tmp_path)


def test_a_checkpoint_has_heads_of_every_kind(tmp_path):
    folder = ROOT / "tests/fixtures/checkpoints_of_2026_11/encoder"
    shutil.copytree(folder / "tokenizer", tmp_path / "tokenizer")
    model = LazyFormerModel.from_pretrained(folder).model
    model.register_classification_head("one", 3, "linear")
    model.register_classification_head("two", 3, "dense")
    model.register_classification_head("three", 2, "span")
    state = torch.load(folder / "checkpoint_last.pt")
    torch.save({**state, "model": model.state_dict()}, tmp_path / "checkpoint_last.pt")
    loaded = LazyFormerModel.from_pretrained(tmp_path).model
    kinds = {name: type(head) for name, head in loaded.classification_heads.items()}
    assert (kinds["one"], kinds["two"], kinds["three"]) == (LinearHead, ClassificationHead, SpanHead)
    assert_equal_state(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("theirs", "ours"), [("linear", "dense"), ("dense", "linear"), ("span", "linear"), ("dense", "span")]
)
def test_a_head_of_another_kind_starts_anew_as_a_whole(theirs, ours, caplog):
    def heads(kind: str) -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict({"rte": HEADS[kind](4, 2)})

    model, saved = heads(ours), heads(theirs)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    state = {f"classification_heads.{name}": weight for name, weight in saved.state_dict().items()}
    match_classification_heads(state, model)
    assert_equal_state({name.removeprefix("classification_heads."): weight for name, weight in state.items()}, before)
    assert (
        "classification head rte of the checkpoint is left out: it has another number of outputs, or of" in caplog.text
    )


def test_missing_and_extra_heads_are_said_and_start_anew(caplog):
    def head(outputs: int, value: float) -> torch.nn.Module:
        module = torch.nn.ModuleDict({"out_proj": torch.nn.Linear(2, outputs)})
        torch.nn.init.constant_(module["out_proj"].weight, value)
        return module

    ours = torch.nn.ModuleDict({"rte": head(2, 0.0), "stsb": head(1, 0.0), "cola": head(2, 0.0)})
    theirs = torch.nn.ModuleDict({"rte": head(2, 9.0), "stsb": head(3, 9.0), "mnli": head(3, 9.0)})
    state = {f"classification_heads.{name}": weight for name, weight in theirs.state_dict().items()}
    with caplog.at_level("INFO"):
        match_classification_heads(state, ours)
    ours.load_state_dict({name.removeprefix("classification_heads."): weight for name, weight in state.items()})
    assert ours["rte"]["out_proj"].weight.eq(9).all()
    assert ours["stsb"]["out_proj"].weight.eq(0).all() and ours["cola"]["out_proj"].weight.eq(0).all()
    assert "classification head mnli of the checkpoint is left out: it is none of this task's" in caplog.text
    assert "classification head stsb of the checkpoint is left out: it has another number of outputs" in caplog.text
    assert "classification head cola is not in the checkpoint and starts with fresh weights" in caplog.text
