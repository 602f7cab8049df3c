"""``lazyformer export --to huggingface``, from checkpoints to what transformers loads: its own BERT, or our code."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from every_variant import EXAMPLES
from exports import WORDS, code_in, export_custom, some_ids, source_of, tiny_model
from helpers import ROOT, head_logits
from in_process import invoke, refusal
from local_mean import LOCAL_MEAN, registered

from lazyformer_fairseq import huggingface, load
from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface import forms
from lazyformer_fairseq.huggingface.code import LIBRARIES, code_files, write_code
from lazyformer_fairseq.huggingface.export import AUTO, choose_form, export_to_huggingface
from lazyformer_fairseq.huggingface.forms import BERT, CUSTOM, MODERN, why_not_bert, why_not_modernbert, write_bert
from lazyformer_fairseq.huggingface.models import heads
from lazyformer_fairseq.huggingface.models.configuration import LazyFormerConfig
from lazyformer_fairseq.huggingface.models.encoder import AUTO_CLASSES
from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, read_options
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.attention_variants import ATTENTION_VARIANTS
from lazyformer_fairseq.patterns.kinds import ENCODER, Kind

CHECKPOINTS = ROOT / "tests/fixtures/checkpoints"


def test_a_pre_trained_model(tmp_path):
    printed = invoke("export", CHECKPOINTS / "encoder", tmp_path / "out", "--to", "huggingface")
    assert "a custom model with its own code" in printed
    ours = load(CHECKPOINTS / "encoder")
    model = heads.LazyFormerForMaskedLM.from_pretrained(tmp_path / "out")
    ids = ours.encode("anna sees ben near the house.", "the house of anna")
    with torch.no_grad():
        wanted, _ = ours.model(ids)
        found = model(ids).logits
    torch.testing.assert_close(found[ids.ne(1)], wanted[ids.ne(1)], atol=1e-5, rtol=1e-5)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["sublayer_pattern"] == "sflf sf" and config["auto_map"].keys() == AUTO_CLASSES.keys()
    assert [config[f"{name}_token_id"] for name in ("bos", "pad", "eos", "mask")] == [0, 1, 2, 99]


def test_a_fine_tuned_model_and_its_card(tmp_path):
    invoke("export", CHECKPOINTS / "fine_tuned", tmp_path / "out", "--to", "huggingface", "--head", "cola")
    ours = load(CHECKPOINTS / "fine_tuned")
    model = heads.LazyFormerForSequenceClassification.from_pretrained(tmp_path / "out")
    texts = ("anna sees ben", "the house near the river is old")
    ids = ours.encode(*texts)
    torch.testing.assert_close(model(ids).logits, head_logits(ours, "cola", *texts), atol=1e-5, rtol=1e-5)
    card = (tmp_path / "out" / "README.md").read_text()
    for known in ("`CoLA`", "30 and then 90", "`sflf sf`", "pre-norm", "cola: 0, 1", "trust_remote_code=True"):
        assert known in card
    assert "license: unknown\n" in card.split("---")[1]
    assert card.count("To be filled in: ") == 3, "training data, evaluation and licence are left to the user"
    letters = re.findall(r"^\| `(.)` \|", card, re.MULTILINE)
    assert letters == ["s", "f", "l"] and "LazyFormer, section 2" in card


def test_a_causal_language_model_generates_there(tmp_path):
    printed = invoke("export", CHECKPOINTS / "language_model", tmp_path / "out", "--to", "huggingface")
    assert "a LazyFormerForCausalLM from lazyformer_fairseq, which supports generate" in printed
    state = torch.load(CHECKPOINTS / "language_model" / "checkpoint_last.pt", weights_only=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weights = model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in state["model"].items() if "sha256" not in name)
    ids = torch.tensor([[5, 6, 7]])
    network = CausalLM(read_options(CausalLMOptions, dict(options_in(state))), model.config.vocab_size).eval()
    network.load_state_dict(weights)
    assert torch.equal(model(ids).logits, network(ids)[0])
    assert model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None).shape == (1, 7)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "A causal language model trained with" in card
    assert "import lazyformer_fairseq.huggingface" in card
    assert not list((tmp_path / "out").glob("*.py"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    dictionary = load_dictionary(CHECKPOINTS / "language_model" / "data" / "dict.txt")
    words = dictionary.symbols[4:12]
    ids = tokenizer(f"{' '.join(words)} \n neverseen", return_tensors="pt")
    assert ids["input_ids"].tolist() == [[2, *range(4, 12), 2, 3]]
    assert tokenizer.decode(ids["input_ids"][0, 1:]) == f"{' '.join(words)}\n<unk>"
    assert model.generate(**ids, max_new_tokens=2, do_sample=False, eos_token_id=None).shape == (1, 13)
    assert 'AutoTokenizer.from_pretrained("out")' in card


@pytest.mark.parametrize("where", ["nowhere", "another dictionary", "beside", "in training"])
def test_a_causal_export_has_the_tokenizer_of_its_own_dictionary_or_says_that_it_has_none(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CHECKPOINTS / "language_model", "lm", ignore=shutil.ignore_patterns("data"))
    lines = (CHECKPOINTS / "language_model" / "data" / "dict.txt").read_text().splitlines()
    folder = Path("lm/data" if where == "in training" else "lm")  # as the checkpoint has it
    folder.mkdir(exist_ok=True)
    if where == "another dictionary":
        lines.append("another 1")
    if where != "nowhere":
        (folder / "dict.txt").write_text("\n".join(lines) + "\n")
    printed = invoke("export", "lm", "out", "--to", "huggingface")
    is_there = where in ("beside", "in training")
    assert Path("out/tokenizer.json").is_file() == is_there
    assert ("To add one, copy the dict.txt" in printed) != is_there
    assert ("There is no tokenizer" in Path("out/README.md").read_text()) != is_there


def test_the_cards_tokenizer_loads_without_a_question_about_code(tmp_path, warm_python):
    """The lines of an export's card load its tokenizer without trust in code, of encoders and of language models."""
    code = []
    for name in ("encoder", "language_model"):
        invoke("export", CHECKPOINTS / name, tmp_path / name, "--to", "huggingface")
        card = (tmp_path / name / "README.md").read_text()
        ((load_lines),) = re.findall("```python\n(.*)\nmodel = ", card, re.DOTALL)
        assert "trust_remote_code" not in load_lines
        code += [load_lines, "print(tokenizer('the'))"]
    run = subprocess.run(
        [warm_python / "python", "-c", "\n".join(code)],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        input="",
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "custom code" not in run.stdout + run.stderr
    assert run.stdout.count("input_ids") == 2


def options_in(state: dict) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in state["cfg"]["model"].items() if name != "_name")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("encoder --as bert", "--as requires --to huggingface or --to hub"),
        ("encoder --to huggingface --as bert", "this model is not a BERT, because its pattern is sflf sf"),
        ("encoder --to huggingface --head cola", "no classification head 'cola'"),
        ("fine_tuned --to huggingface --head coal", "did you mean cola"),
        ("language_model --to huggingface --as bert", "causal language model, which supports neither --as nor --head"),
        ("nowhere --to huggingface", "no such file or folder"),
        ("encoder --to huggingface", "already exists"),
    ],
)
def test_what_cannot_be_is_refused_in_words_and_nothing_is_written(words, message, tmp_path):
    if message == "already exists":
        (tmp_path / "out" / "mine").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    from_, *options = words.split()
    assert message in refusal("export", CHECKPOINTS / from_, tmp_path / "out", *options)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    def other_weights(weights, *others, save=forms.save_file):
        save({name: weight + (name == "lm_head.decoder.bias") for name, weight in weights.items()}, *others)

    monkeypatch.setattr(forms, "save_file", other_weights)
    with pytest.raises((UserError, ValueError), match="do not match the hashes in config.json"):
        export_to_huggingface(CHECKPOINTS / "encoder", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# Importing lazyformer_fairseq.huggingface makes the auto classes find ours, whichever is imported first.

OURS, THEIRS = "import lazyformer_fairseq.huggingface", "from transformers import AutoConfig, AutoModel"


def printed(*code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    python = [sys.executable, "-c", "; ".join(code)]
    return subprocess.run(python, capture_output=True, text=True, env=environment, check=True).stdout.strip()


def test_all_auto_classes_know_ours():
    huggingface.register_when_transformers_is_loaded()  # it is
    for auto, name in AUTO_CLASSES.items():
        if auto != "AutoConfig":
            config = LazyFormerConfig(sublayer_pattern="sf", vocab_size=9, hidden_size=12)
            model = getattr(transformers, auto).from_config(config)
            assert type(model) is getattr(huggingface, name)
    assert isinstance(transformers.AutoConfig.for_model("lazyformer"), LazyFormerConfig)


@pytest.mark.slow
@pytest.mark.parametrize("first", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours first", "theirs first"])
def test_auto_classes_find_ours_without_trust(first, tmp_path):
    folder = export_custom(tiny_model(), tmp_path / "export")
    found = printed(*first, f"print(type(AutoModel.from_pretrained({str(folder)!r})).__module__)")
    assert found == "lazyformer_fairseq.huggingface.models.encoder"


def test_the_package_loads_transformers_no_sooner_than_needed():
    loaded = "[name in sys.modules for name in ('transformers', 'torch')]"
    assert printed(OURS, "import sys", f"print({loaded})") == "[False, False]"


# The code: complete, alone, the same each time


def test_transformers_finds_all_files_and_they_need_no_other_library(tmp_path):
    pattern = "".join(f"s[{EXAMPLES[row.name][-1]}]" for row in ATTENTION_VARIANTS if not row.why_not_encoder)
    write_code(f"{pattern}slkfcr", tmp_path)
    files = set(tmp_path.iterdir())
    dynamic = transformers.dynamic_module_utils
    modeling = tmp_path / "modeling_lazyformer.py"
    assert set(map(Path, dynamic.get_relative_import_files(modeling))) == files - {modeling}
    named = set(dynamic.get_relative_imports(modeling))
    assert named == {file.stem for file in files - {modeling}}, "transformers copies those that this one names"
    for file in files:
        assert set(dynamic.get_imports(file)) <= LIBRARIES | sys.stdlib_module_names


# Interpreters that have other versions of transformers or sentence-transformers, divided by colons.
PYTHONS = [python for python in os.environ.get("LAZYFORMER_HF_PYTHONS", "").split(":") if python]
WITHOUT_PACKAGE = """
import sys
from importlib.util import find_spec
sys.modules["lazyformer_fairseq"] = None
sys.modules["fairseq"] = None
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast, pipeline
import torch
trust = {"trust_remote_code": True}
for folder in ("out", "again"):
    model = AutoModelForMaskedLM.from_pretrained(folder, **trust)
    tokenizer = PreTrainedTokenizerFast.from_pretrained("out")
    inputs = tokenizer("anna sees ben near the house.", return_tensors="pt")
    print(model(**inputs).logits.double().sum().item())
    features = AutoModel.from_pretrained(folder, **trust)(**inputs).last_hidden_state
    model.save_pretrained("again")
tokenizer.save_pretrained("again")
if find_spec("sentence_transformers"):
    from sentence_transformers import SentenceTransformer, models
    parts = {"model_kwargs": trust, "config_kwargs": trust, "processor_kwargs": trust}
    pooling = models.Pooling(features.size(2), pooling_mode="mean")
    encoder = SentenceTransformer(modules=[models.Transformer("again", **parts), pooling])
    found = torch.tensor(encoder.encode(["anna sees ben near the house."]))
    torch.testing.assert_close(found, features.mean(1).detach(), atol=1e-5, rtol=1e-5)
print(len(pipeline("fill-mask", model="again", **trust)(f"the {tokenizer.mask_token} of anna", top_k=3)))
"""


@pytest.mark.parametrize("python", ["this one", *(pytest.param(each, marks=pytest.mark.slow) for each in PYTHONS)])
def test_an_export_loads_and_is_saved_again_in_a_process_that_lacks_the_package(python, tmp_path, warm_python):
    """transformers alone loads an export, saves it again and fills masks with it, as our model would."""
    export_to_huggingface(CHECKPOINTS / "encoder", tmp_path / "out")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    command = [warm_python / "python" if python == "this one" else python, "-c", WITHOUT_PACKAGE]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    first, second, fillings = run.stdout.split()
    assert first == second
    ours = load(CHECKPOINTS / "encoder")
    with torch.no_grad():
        wanted = ours.model(ours.encode("anna sees ben near the house."))[0].double().sum().item()
    assert float(first) == pytest.approx(wanted, rel=1e-5)
    assert fillings == "3"


def test_a_kind_of_somebody_is_copied_from_its_own_package(tmp_path):
    with registered(LOCAL_MEAN), torch.no_grad():
        model = tiny_model(sublayer_pattern="sfmf")
        exported = code_in(export_custom(model, tmp_path)).LazyFormerForMaskedLM.from_pretrained(tmp_path)
        torch.testing.assert_close(exported(some_ids()).logits, model(some_ids())[0], atol=1e-5, rtol=1e-5)


def test_a_kind_that_cannot_be_copied_is_refused_by_name():
    class Mine:
        pass

    mine = Kind("m", "mine", "", "", {ENCODER: Mine})
    with registered(mine), pytest.raises(UserError, match="mine \\(m\\) cannot be exported"):
        code_files("sfm")


# A plain (sf)xN is a BERT of transformers; what is none is told why


PLAIN = {"sublayer_pattern": "(sf)x3", "relative_position_buckets": 0}
PAIRS = {**PLAIN, "token_types": 2}
IMPORTED = {**PLAIN, "activation_fn": "gelu_tanh", "head_activation_fn": "gelu_tanh", "layer_norm_eps": 1e-12}


def our_outputs(model, head, ids, given) -> dict[str, torch.Tensor]:
    """By their names in transformers."""
    words, _ = model(ids, **given)
    if not head:
        return {"logits": words}
    found, _ = model(ids, classification_head_name="cola" if head in ("dense", "span", "tags") else head, **given)
    return {
        "dense": {"logits": found},
        "pooler": {"pooler_output": found},
        "next_sentence": {"prediction_logits": words, "seq_relationship_logits": found},
        "span": {"start_logits": found[..., 0], "end_logits": found[..., -1]},
        "tags": {"logits": found},
    }[head]


@pytest.mark.parametrize(
    ("head", "options", "classes"),  # the first one is that of the folder, the others find all their weights too
    [
        ("", PLAIN, "BertForMaskedLM"),
        ("", {"arch": "bert_base_absolute_tiny"}, "BertForMaskedLM"),
        ("", {"arch": "distilbert_tiny"}, "BertForMaskedLM"),
        ("dense", PLAIN, "BertForSequenceClassification BertForMaskedLM BertModel"),
        ("pooler", {**IMPORTED, "token_types": 1}, "BertForMaskedLM BertModel"),
        ("next_sentence", PAIRS, "BertForPreTraining BertForMaskedLM"),
        ("span", PAIRS, "BertForQuestionAnswering"),
        ("tags", PLAIN, "BertForTokenClassification"),
    ],
)
@torch.no_grad()
def test_outputs_and_hidden_states_are_exact(head, options, classes, tmp_path):
    model, names = tiny_model(head, **options), classes.split()
    source = source_of(model)
    assert (choose_form(source, AUTO), choose_form(source, CUSTOM)) == (BERT, CUSTOM)
    assert write_bert(source, tmp_path) is getattr(transformers, names[0])
    for name in names:
        bert, loading = getattr(transformers, name).from_pretrained(tmp_path, output_loading_info=True)
        assert not loading["missing_keys"] and not loading["mismatched_keys"]
        assert not loading["unexpected_keys"] or name != "BertForPreTraining"
        if name == ("BertModel" if head == "pooler" else names[0]):
            theirs = bert
    ids = some_ids(right=3)
    text, types = ids.ne(1), torch.arange(11).gt(5).long().expand(3, -1)
    given, same = ({"token_types": types}, {"token_type_ids": types}) if options.get("token_types") == 2 else ({}, {})
    found = theirs(ids, attention_mask=text.long(), output_hidden_states=True, **same)
    for name, wanted in our_outputs(model, head, ids, given).items():
        of_text = text if wanted.shape[:2] == text.shape else slice(None)
        torch.testing.assert_close(found[name][of_text], wanted[of_text], atol=1e-5, rtol=1e-5)
    states = model(ids, features_only=True, return_all_hiddens=True, **given)[1]["inner_states"]
    for one, other in zip(found.hidden_states, states[::2], strict=True):
        torch.testing.assert_close(one[text], other[text], atol=1e-5, rtol=1e-5)
    config = theirs.config
    assert (config.pad_token_id, config.vocab_size) == (1, WORDS)
    assert config.layer_norm_eps == options.get("layer_norm_eps", 1e-5)
    assert head != "dense" or config.id2label == {0: "0", 1: "1"}


@pytest.mark.parametrize(
    ("options", "head", "why"),
    [
        ({"sublayer_pattern": "sflf"}, "", "its pattern is sflf"),
        ({"sublayer_pattern": "fs"}, "", "its pattern is fs"),
        ({"sublayer_pattern": "(s[window=3]f)x2"}, "", "its pattern is"),
        ({"relative_position_buckets": 8}, "", "--relative-position-buckets is 8, whereas a BERT has 0"),
        ({"encoder_normalize_before": True}, "", "--encoder-normalize-before is True"),
        ({"no_token_positional_embeddings": True}, "", "--no-token-positional-embeddings"),
        ({"activation_fn": "relu"}, "", "--head-activation-fn is gelu, whereas a BERT has relu"),
        ({"activation_dropout": 0.1}, "", "--activation-dropout is 0.1"),
        ({"sublayer_pattern": "sf[gate=gelu]"}, "", "its pattern is"),
        ({"norm": "rms"}, "", "--norm is rms"),
        ({"no_norm_bias": True}, "", "--no-norm-bias"),
        ({"no_linear_bias": True}, "", "--no-linear-bias"),
        ({"plain_lm_head": True}, "", "--plain-lm-head"),
        ({"untied_lm_head": True}, "", "--untied-lm-head"),
        ({}, "linear", "classification head cola is linear"),
    ],
    ids=str,
)
def test_what_is_no_bert_is_told_why(options, head, why):
    source = source_of(tiny_model(head, **{**PLAIN, **options}))
    assert why in why_not_bert(source)
    assert choose_form(source, AUTO) == choose_form(source, CUSTOM) == CUSTOM
    with pytest.raises(UserError, match=f"this model is not a BERT, because .*{why}"):
        choose_form(source, BERT)


MODERN_OPTIONS = {
    **dict.fromkeys(("encoder_normalize_before", "embedding_norm", "no_token_positional_embeddings"), True),
    **dict.fromkeys(("no_norm_bias", "no_linear_bias"), True),
    "relative_position_buckets": 0,
    "sublayer_pattern": "s[rope=9]f[gate=gelu] (s[window=4,rope=7]f[gate=gelu])x2",
}


@pytest.mark.parametrize(
    ("options", "head", "why"),
    [
        ({}, "", ""),
        ({"sublayer_pattern": "s[rope=9]f[gate=silu]", "no_linear_bias": False}, "", ""),
        ({"sublayer_pattern": "(s[window=2,rope=9]f[gate=relu])x2"}, "", ""),
        (ARCHITECTURES["modernbert_tiny"].options(), "", ""),
        (ARCHITECTURES["lazy_modernbert_tiny"].options(), "", "its pattern"),
        ({"sublayer_pattern": "(sf)x2"}, "", "its pattern is (sf)x2, whereas ModernBERT's consists of"),
        ({"sublayer_pattern": "s[rope=9]f"}, "", "its pattern"),
        ({"sublayer_pattern": "s[rope=9]f[gate=gelu]s[rope=9]"}, "", "its pattern"),
        ({"sublayer_pattern": "s[rope=9]f[gate=gelu]s[rope=8]f[gate=gelu]"}, "", "its pattern"),
        ({"sublayer_pattern": "s[rope=9]f[gate=gelu]s[rope=9]f[gate=silu]"}, "", "its pattern"),
        ({"sublayer_pattern": "s[rope=9]f[gate=gelu]lf[gate=gelu]"}, "", "its pattern"),
        ({"embedding_norm": False}, "", "--embedding-norm"),
        ({"no_token_positional_embeddings": False}, "", "--no-token-positional-embeddings is False"),
        ({"norm": "rms"}, "", "--norm is rms, whereas a ModernBERT has layer"),
        ({"untied_lm_head": True}, "", "--untied-lm-head is True"),
        ({}, "dense", "no counterpart to its head cola"),
    ],
)
def test_what_is_a_modernbert_and_what_is_told_why_not(options, head, why):
    source = source_of(tiny_model(head, **{**MODERN_OPTIONS, **options}))
    assert choose_form(source, AUTO) == (CUSTOM if why else MODERN)
    assert why in why_not_modernbert(source) and bool(why) == bool(why_not_modernbert(source))
    if why:
        with pytest.raises(UserError, match=f"this model is not a ModernBERT, because .*{re.escape(why)}"):
            choose_form(source, MODERN)
