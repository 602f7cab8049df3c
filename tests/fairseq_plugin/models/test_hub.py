"""Models from folders and files: used from raw text, with heads, and refused in a line where something is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from helpers import ROOT

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel
from lazyformer_fairseq.fairseq_plugin.models.export import export
from lazyformer_fairseq.fairseq_plugin.models.hub import LazyFormerHub
from lazyformer_fairseq.fairseq_plugin.reliability.options import backend_of

OLD = ROOT / "tests/fixtures/checkpoints_of_2026_11/encoder"
POSITIONS = "encoder.sentence_encoder.embed_positions.weight"


@pytest.fixture
def hub() -> LazyFormerHub:
    return LazyFormerModel.from_pretrained(OLD)


def test_all_words_that_may_stand_for_a_mask_are_the_likeliest_first(hub):
    answers = hub.fill_mask("The <mask> of Anna is behind the old garden.", topk=len(hub.tokenizer.dictionary))
    probabilities = [answer.probability for answer in answers]
    assert probabilities == sorted(probabilities, reverse=True) and sum(probabilities) == pytest.approx(1, abs=1e-4)
    assert answers[0].text == f"the {answers[0].word} of anna is behind the old garden."


def test_features_of_a_text_do_not_depend_on_its_batch(hub):
    short, long = (
        "Anna sees Ben near the house.",
        "Anna and Ben walk to the river together, Cara and Dan to the market.",
    )
    alone, together = hub.extract_features(short), hub.extract_features(short, long)
    assert alone.shape == (1, len(hub.tokenizer.build_input(short)), 16)
    torch.testing.assert_close(together[:1, : alone.size(1)], alone)
    assert torch.equal(hub.extract_features([short, long]), together)


def test_padding_on_the_left_changes_nothing(hub):
    model = hub.model
    model.register_classification_head("cola", 2)
    ids, longer = hub.encode("Anna sees Ben."), hub.encode("Anna and Ben walk to the river together.")
    missing = longer.size(1) - ids.size(1)
    batch = torch.cat([torch.nn.functional.pad(ids, (missing, 0), value=hub.tokenizer.dictionary.pad()), longer])
    torch.testing.assert_close(model(batch)[0][:1, missing:], model(ids)[0])
    heads = {"classification_head_name": "cola"}
    torch.testing.assert_close(model(batch, **heads)[0], torch.cat([model(each, **heads)[0] for each in (ids, longer)]))


def test_texts_that_are_none_and_what_the_model_lacks_are_refused_in_a_line(hub):
    for wrong in ((), ([],)):
        with pytest.raises(UserError, match=r"no text: give one or more, as in extract_features\('One"):
            hub.extract_features(*wrong)
    for wrong in (("Anna", 3), (["Anna", None],), (b"Anna",)):
        with pytest.raises(UserError, match="(3|None|b'Anna') is no text: give strings"):
            hub.extract_features(*wrong)
    for text in ("no mask at all", "<mask> and <mask>"):
        with pytest.raises(UserError, match="<mask> in the text, must be once"):
            hub.fill_mask(text)
    with pytest.raises(UserError, match="takes one text at a time"):
        hub.fill_mask(["The <mask>.", "A <mask>."])
    with pytest.raises(UserError, match="no classification head 'cola'; the checkpoint has: none"):
        hub.predict("cola", "Anna sees Ben.")
    assert hub.extract_features("Anna sees Ben. " * 400).size(1) == hub.model.max_positions() == 64, "it is cut"


def test_a_checkpoint_may_be_given_instead_of_its_folder_and_missing_and_foreign_files_are_named(tmp_path):
    by_name = LazyFormerModel.from_pretrained(str(OLD), "checkpoint_last.pt")
    by_file = LazyFormerModel.from_pretrained(str(OLD / "checkpoint_last.pt"))
    assert torch.equal(by_file.extract_features("The house."), by_name.extract_features("The house."))
    with pytest.raises(UserError, match=r"^\S*absent.pt: no such file or folder"):
        LazyFormerModel.from_pretrained(OLD / "absent.pt")
    with pytest.raises(UserError, match="holds no checkpoint_best.pt or checkpoint_last.pt or model.pt"):
        LazyFormerModel.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds no other.pt"):
        LazyFormerModel.from_pretrained(OLD, "other.pt")
    torch.save({"model": {}}, tmp_path / "model.pt")
    with pytest.raises(UserError, match="tokenizer"):
        LazyFormerModel.from_pretrained(tmp_path)
    shutil.copytree(OLD / "tokenizer", tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"model\.pt: .*no(t a)? checkpoint"):
        LazyFormerModel.from_pretrained(tmp_path)


def changed(folder: Path, change: Callable[[dict], object]) -> Path:
    """A folder with an old checkpoint in which something is another."""
    folder.mkdir(exist_ok=True)
    shutil.copytree(OLD / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    state = torch.load(OLD / "checkpoint_last.pt")
    change(state)
    torch.save(state, folder / "checkpoint_last.pt")
    return folder


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda state: state["model"][POSITIONS][3].fill_(torch.nan), "embed_positions.weight holds NaN or Inf"),
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
    with pytest.raises(UserError, match=words):
        LazyFormerModel.from_pretrained(changed(tmp_path, spoil))


def backend_in(folder: Path) -> str:
    return LazyFormerModel.from_pretrained(folder).model.encoder.sentence_encoder.attention_backend


def test_attention_backend_has_been_called_lazy_backend(tmp_path):
    """In checkpoints, exports and settings of version 0.1.0 it still is; as an option too."""

    def as_it_was(state: dict) -> None:
        state["cfg"]["model"].pop("attention_backend", None)
        state["cfg"]["model"]["lazy_backend"] = "recompute"

    assert backend_in(changed(tmp_path / "old", as_it_was)) == "recompute"
    exported = tmp_path / "exported"
    export(OLD, exported)
    config = json.loads((exported / "config.json").read_text())
    assert config["model"].pop("attention_backend") == "auto" and "lazy_backend" not in config["model"]
    config["model"]["lazy_backend"] = "eager"
    (exported / "config.json").write_text(json.dumps(config))
    assert backend_in(exported) == "eager"
    for given, expected in (
        ({}, ""),
        ({"attention_backend": "auto", "lazy_backend": None}, "auto"),
        ({"attention_backend": "auto", "lazy_backend": "eager"}, "eager"),
        ({"attention_backend": "fused", "lazy_backend": "eager"}, "fused"),
        ({"lazy_backend": "recompute"}, "recompute"),
    ):
        assert backend_of(SimpleNamespace(**given)) == expected
    for name in ("--attention-backend", "--lazy-backend"):
        parser = options.get_training_parser("full_sentences_masked_lm")
        words = f"data --task full_sentences_masked_lm --arch lazyformer_m2x6_s_tiny {name} recompute"
        given = options.parse_args_and_arch(parser, words.split())
        assert backend_of(convert_namespace_to_omegaconf(given).model) == "recompute"
