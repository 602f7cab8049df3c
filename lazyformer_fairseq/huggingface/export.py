"""``lazyformer export --to huggingface``: a folder that transformers loads, as a model of ours or as a real BERT.

A plain ``(sf)xN`` becomes a BERT of transformers, without code of its own. BERT counts positions from the left, padding
included, and sees all tokens without an attention mask: so the two agree on inputs that are padded on the right and
have one. The model's `dense` classification head is BERT's pooler and classifier, its head for next sentences BERT's
pooler and ``cls.seq_relationship``, its span head ``qa_outputs``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional, Union

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import BertConfig

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import PREFIX, pooler_in_checkpoint
from lazyformer_fairseq.huggingface.checkpoint import Source, head_weights, model_card, read_source
from lazyformer_fairseq.huggingface.exported import heads
from lazyformer_fairseq.huggingface.exported.checksums import HEADS, hash_weights
from lazyformer_fairseq.huggingface.exported.heads import (
    LazyFormerForMaskedLM,
    LazyFormerForQuestionAnswering,
    LazyFormerForSequenceClassification,
)
from lazyformer_fairseq.huggingface.exported.modelling import AUTO_CLASSES, CODE_FILE, LazyFormerConfig
from lazyformer_fairseq.huggingface.merge import merged_code
from lazyformer_fairseq.huggingface.tokenizer import write_tokenizer
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE
from lazyformer_fairseq.patterns.attention_kinds import SETTINGS, chosen_kinds
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import ENCODER
from lazyformer_fairseq.storage.atomic import atomic_folder, refuse_filled_folder

AUTO, BERT, CUSTOM = FORMS = ("auto", "bert", "custom")
WEIGHTS_FILE, CARD_FILE = "model.safetensors", "README.md"
CLOSE = 1e-6  # of numbers around 1, between two ways to compute the same in double precision


def export_to_huggingface(
    folder: Union[str, Path],
    out: Union[str, Path],
    checkpoint_file: Optional[str] = None,
    form: str = AUTO,
    head: Optional[str] = None,
) -> str:
    """Writes a folder that transformers loads, whole or not at all.

    Before it takes its name, the model is read back from it and compared with the checkpoint's.

    Args:
        folder: of checkpoints; see :func:`lazyformer_fairseq.fairseq_plugin.models.hub.load`.
        out: must not exist yet, or be empty.
        form: "bert" for a BERT of transformers, "custom" for a model with code of its own, "auto" for the first where
            it is possible.
        head: the classification head to take along; None for the only one.

    Returns:
        The form that was chosen.

    Raises:
        UserError: what :func:`read_source` raises; the model is no BERT; a kind that nobody has written for
            transformers; `out` exists.
    """
    refuse_filled_folder(out)
    source = read_source(folder, checkpoint_file, head)
    form = choose_form(source, form)
    with atomic_folder(Path(out)) as unfinished:
        model_class = write_bert(source, unfinished) if form == BERT else write_custom(source, unfinished)
        write_tokenizer(source.tokenizer, unfinished, source.cfg.max_positions, source.cfg.token_types > 0)
        (unfinished / CARD_FILE).write_text(model_card(source, form, Path(out).name), encoding="utf-8")
        check_same_outputs(source, model_class.from_pretrained(str(unfinished)))
    return form


def choose_form(source: Source, form: str) -> str:
    """ "bert" or "custom"."""
    if form == CUSTOM:
        return CUSTOM
    why = why_not_bert(source)
    if why and form == BERT:
        raise UserError(f"--as bert: this model is no BERT: {why}; --as custom takes it, with code of its own")
    return CUSTOM if why else BERT


def write_bert(source: Source, folder: Path) -> Any:
    """Config and weights of a BERT; returns its class."""
    config = bert_config(source)
    config.save_pretrained(folder)
    save_weights(bert_weights(source), folder)
    return getattr(transformers, config.architectures[0])


def write_custom(source: Source, folder: Path) -> Any:
    """Config, weights and code; returns the class of the package that reads them."""
    config, weights = custom_config(source), custom_weights(source)
    code = merged_code(config.plan)
    config.weights_sha256 = hash_custom(config, weights)
    config.save_pretrained(folder)
    (folder / CODE_FILE).write_text(code, encoding="utf-8")
    save_weights(weights, folder)
    return getattr(heads, config.architectures[0])


def save_weights(weights: dict[str, Tensor], folder: Path) -> None:
    save_file(weights, str(folder / WEIGHTS_FILE), {"format": "pt"})


@torch.no_grad()
def check_same_outputs(source: Source, model: Any) -> None:
    """Raises a UserError where the exported model computes something else than the checkpoint's, on padded texts.

    Both are in double precision from then on: in single precision deep models amplify rounding as far as small mistakes
    reach.
    """
    source.model.double().encoder.sentence_encoder.attention_backend = "eager"
    model = model.double()
    ids, marked = example(source)
    given = {} if marked is None else {"global_attention_mask": marked.long()}
    types = None
    if source.cfg.token_types:
        given["token_type_ids"] = types = torch.arange(ids.size(1)).expand_as(ids) % source.cfg.token_types
    pad = source.tokenizer.dictionary.pad()
    found = _logits(model(ids, attention_mask=ids.ne(pad).long(), **given))
    for name, logits in found.items():
        head = {"masked words": None, "next sentence": NEXT_SENTENCE}.get(name, source.head and source.head.name)
        wanted, _ = source.model(ids, classification_head_name=head, global_positions=marked, token_types=types)
        if wanted.dim() == 3:  # of each token
            logits, wanted = logits[ids.ne(pad)], wanted[ids.ne(pad)]
        difference = float((logits - wanted).abs().max() / wanted.abs().max().clamp(min=1))
        if not difference < CLOSE:
            raise UserError(
                f"the exported model's logits of the {name} differ from the checkpoint's by {difference:.1g}: not "
                "written"
            )


def _logits(output: Any) -> dict[str, Tensor]:
    """What a model of transformers returned, by what it is of, in our order of numbers."""
    if "prediction_logits" in output:
        return {"masked words": output.prediction_logits, "next sentence": output.seq_relationship_logits}
    if "start_logits" in output:
        return {"head": torch.stack([output.start_logits, output.end_logits], -1)}
    return {"masked words" if output.logits.dim() == 3 else "head": output.logits}


def example(source: Source) -> tuple[Tensor, Optional[Tensor]]:
    """Ids (2, T), the second row padded on the right, and which tokens are marked, where the pattern asks for it."""
    dictionary, time = source.tokenizer.dictionary, min(24, source.cfg.max_positions)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(dictionary), (2, time), generator=generator)
    ids[ids == dictionary.pad()] = dictionary.unk()
    ids[:, 0] = dictionary.bos()
    ids[1, time * 2 // 3 :] = dictionary.pad()
    asks = any(planned.values.get("global") == "given" for planned in source.model.encoder.sentence_encoder.plan)
    return ids, torch.zeros_like(ids, dtype=torch.bool).index_fill(1, torch.tensor([0]), True) if asks else None


# Ours, by names in transformers.
ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "gelu_tanh": "gelu_pytorch_tanh", "relu_squared": "relu2"}
OF_ENCODER = "encoder.sentence_encoder."
MASKED_LM = {
    "encoder.lm_head.bias": "lm_head.decoder.bias",
    **{
        f"encoder.lm_head.{name}.{kind}": f"lm_head.{name}.{kind}"
        for name in ("dense", "layer_norm")
        for kind in ("weight", "bias")
    },
}
CLASSES = {  # by what names of their heads' weights begin with
    "lm_head": LazyFormerForMaskedLM,
    "classifier": LazyFormerForSequenceClassification,
    "qa_outputs": LazyFormerForQuestionAnswering,
}


def custom_config(source: Source) -> LazyFormerConfig:
    """Sizes, plan and names of ids; without hashes."""
    cfg, tokenizer = source.cfg, source.tokenizer
    dictionary = tokenizer.dictionary
    config = LazyFormerConfig(
        vocab_size=len(dictionary),
        hidden_size=cfg.encoder_embed_dim,
        intermediate_size=cfg.encoder_ffn_embed_dim,
        num_attention_heads=cfg.encoder_attention_heads,
        max_position_embeddings=cfg.max_positions,
        sublayer_pattern=cfg.sublayer_pattern,
        plan=plan_as_json(cfg.sublayer_pattern),
        hidden_act=ACTIVATIONS[str(cfg.activation_fn)],
        head_act=ACTIVATIONS[str(cfg.head_activation_fn)],
        hidden_dropout_prob=cfg.dropout,
        attention_probs_dropout_prob=cfg.attention_dropout,
        activation_dropout=cfg.activation_dropout,
        normalize_before=cfg.encoder_normalize_before,
        layer_norm_eps=cfg.layer_norm_eps,
        type_vocab_size=cfg.token_types,
        pooler=pooler_in_checkpoint(source.weights) is not None,
        relative_position_buckets=cfg.relative_position_buckets,
        relative_position_max_distance=cfg.relative_position_max_distance,
        classifier_dropout=cfg.pooler_dropout,
        **special_ids(source),
        **labels(source),
    )
    if source.head is not None and not source.head.is_of_spans:
        config.classifier = source.head.kind
    config.architectures = [CLASSES[_head_there(source) or "lm_head"].__name__]
    config.auto_map = {auto: f"{CODE_FILE.removesuffix('.py')}.{name}" for auto, name in AUTO_CLASSES.items()}
    config.dtype = "float32"
    return config


def _head_there(source: Source) -> str:
    """What the head that goes along is called in transformers; "" for none."""
    if source.head is None:
        return ""
    return "qa_outputs" if source.head.is_of_spans else "classifier"


def special_ids(source: Source) -> dict[str, int]:
    """Of the tokenizer, by their names in a config."""
    dictionary = source.tokenizer.dictionary
    return {
        "bos_token_id": dictionary.bos(),
        "pad_token_id": dictionary.pad(),
        "eos_token_id": dictionary.eos(),
        "mask_token_id": source.tokenizer.mask_index,
    }


def labels(source: Source) -> dict[str, Any]:
    """Of the classification head, as a config has them."""
    head = source.head
    if head is None or head.is_of_spans:
        return {}
    names = head.labels or [f"LABEL_{number}" for number in range(head.outputs)]
    kind = "regression" if head.is_regression else "single_label_classification"
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": kind,
    }


def custom_weights(source: Source) -> dict[str, Tensor]:
    """By names in transformers, each weight once.

    Raises:
        UserError: a weight has no name there.
    """
    found: dict[str, Tensor] = {}
    weights = source.weights
    once = {name for name, _ in source.model.named_parameters()} | {name for name, _ in source.model.named_buffers()}
    for name in once - {"dictionary_sha256"}:
        if name.startswith(OF_ENCODER):
            found[f"lazyformer.{name.removeprefix(OF_ENCODER)}"] = weights[name]
        elif name in MASKED_LM:
            found[MASKED_LM[name]] = weights[name]
        elif not name.startswith(PREFIX):
            raise UserError(f"weight {name} has no place in a model of transformers")
    if (pooler := pooler_in_checkpoint(weights)) is not None:
        dense = f"{PREFIX}{pooler}.dense"
        found |= {f"lazyformer.pooler.dense.{part}": weights[f"{dense}.{part}"] for part in ("weight", "bias")}
    if source.head is not None:
        for name, weight in head_weights(weights, source.head).items():
            found[f"{_head_there(source)}.{name.removeprefix('span_proj.')}"] = weight
    return {name: found[name].float().contiguous() for name in sorted(found)}


def hash_custom(config: LazyFormerConfig, weights: dict[str, Tensor]) -> dict[str, dict[str, str]]:
    """What `weights_sha256` of the config is to be."""
    found: dict[str, dict[str, str]] = {}
    for head, model_class in CLASSES.items():
        if any(name.startswith(f"{head}.") for name in weights):
            found |= hash_weights(filled(model_class, config, weights).state_dict())
    return found


def filled(model_class: type, config: LazyFormerConfig, weights: dict[str, Tensor]) -> nn.Module:
    """The model in transformers with those of these weights that it has, in evaluation mode.

    Raises:
        UserError: names or shapes are not those of the model.
    """
    model = model_class(config)
    others = tuple(f"{head}." for head in HEADS if CLASSES.get(head) is not model_class)
    own = {name: weight for name, weight in weights.items() if not name.startswith(others)}
    try:
        missing, unexpected = model.load_state_dict(own, strict=False)
    except RuntimeError as error:
        raise UserError(f"the exported model has other weights than the checkpoint: {error}") from error
    again = {"lm_head.decoder.weight", *(f"lazyformer.{name}" for name in model.lazyformer.same_weights)}
    if wrong := sorted({*missing} - again | {*unexpected}):
        raise UserError(f"the exported model and the checkpoint differ in weights {', '.join(wrong)}")
    return model.eval()


def plan_as_json(pattern: str) -> list[dict[str, Any]]:
    """Of an encoder's pattern: what :func:`~lazyformer_fairseq.huggingface.exported.modelling.read_plan` reads.

    `kinds` of attention are the outermost first, `settings` all of theirs, or those of another letter. `giver` is a
    number of a sublayer.

    Raises:
        UserError: as :func:`~lazyformer_fairseq.patterns.grammar.plan` does.
    """
    found, newest = [], {}
    for number, planned in enumerate(plan(pattern, ENCODER)):
        rows = chosen_kinds(planned.values)
        own = [setting for setting in planned.kind.settings if setting not in SETTINGS]
        names = [setting.name for settings in (*(row.settings for row in rows), own) for setting in settings]
        found.append(
            {
                "letter": planned.kind.letter,
                "kinds": [row.name for row in rows],
                "settings": {name: planned.values[name] for name in names},
                "readers": list(planned.consumers),
                "giver": newest[planned.kind.reads] if planned.kind.reads else None,
            }
        )
        newest |= dict.fromkeys(planned.kind.hands_on, number)
    return found


NORM = "LayerNorm"


def why_not_bert(source: Source) -> str:
    """What BERT lacks of this model; "" if it is one."""
    cfg = source.cfg
    plan = plan_as_json(cfg.sublayer_pattern)
    letters = "".join(place["letter"] for place in plan)
    activation, head_activation = str(cfg.activation_fn), str(cfg.head_activation_fn)
    if any(place["kinds"] for place in plan) or letters != "sf" * (len(letters) // 2):
        return f"its pattern is {cfg.sublayer_pattern}, BERT's (sf)xN without settings"
    if cfg.encoder_normalize_before:
        return "it normalises before each sublayer (--encoder-normalize-before), BERT after it"
    if cfg.relative_position_buckets:
        return f"it has a relative position bias ({cfg.relative_position_buckets} buckets), BERT none"
    if activation != head_activation:
        return f"its sublayers have {activation} and its masked-LM head {head_activation}, BERT one activation for both"
    if cfg.activation_dropout:
        return f"it has dropout {cfg.activation_dropout:g} within feed-forward sublayers, BERT none"
    if source.head is not None and source.head.kind == "linear":
        return f"its classification head {source.head.name} is {source.head.kind}, BERT's has a pooler (dense)"
    return ""


def bert_config(source: Source) -> BertConfig:
    """Its sizes and names of ids."""
    cfg = source.cfg
    config = BertConfig(
        vocab_size=len(source.tokenizer.dictionary),
        hidden_size=cfg.encoder_embed_dim,
        num_hidden_layers=len(plan_as_json(cfg.sublayer_pattern)) // 2,
        num_attention_heads=cfg.encoder_attention_heads,
        intermediate_size=cfg.encoder_ffn_embed_dim,
        hidden_act=ACTIVATIONS[str(cfg.activation_fn)],
        hidden_dropout_prob=cfg.dropout,
        attention_probs_dropout_prob=cfg.attention_dropout,
        max_position_embeddings=cfg.max_positions,
        type_vocab_size=cfg.token_types or 2,
        layer_norm_eps=cfg.layer_norm_eps,
        classifier_dropout=cfg.pooler_dropout,
        **special_ids(source),
        **labels(source),
    )
    config.architectures = [bert_class(source)]
    config.dtype = "float32"
    return config


def bert_class(source: Source) -> str:
    """The name in transformers of the class with all heads that go along."""
    if source.head is not None:
        return "BertForQuestionAnswering" if source.head.is_of_spans else "BertForSequenceClassification"
    return "BertForPreTraining" if NEXT_SENTENCE in source.model.classification_heads else "BertForMaskedLM"


def bert_weights(source: Source) -> dict[str, Tensor]:
    """By BERT's names; a model without token types has rows of zeros for them."""
    found = dict(_bert_weights(source.weights, len(plan_as_json(source.cfg.sublayer_pattern)) // 2))
    width = found["bert.embeddings.word_embeddings.weight"].size(1)
    found.setdefault("bert.embeddings.token_type_embeddings.weight", torch.zeros(2, width))
    for theirs, ours in _maps_of_heads(source).items():
        found |= {f"{theirs}.{kind}": source.weights[f"{PREFIX}{ours}.{kind}"] for kind in ("weight", "bias")}
    return {name: found[name].float().contiguous().clone() for name in sorted(found)}


def _maps_of_heads(source: Source) -> dict[str, str]:
    """BERT's names of the maps on the encoder but for the masked-LM head -> ours, without prefix."""
    head, pooler = source.head, pooler_in_checkpoint(source.weights)
    found = {} if pooler is None else {"bert.pooler.dense": f"{pooler}.dense"}
    if head is None and NEXT_SENTENCE in source.model.classification_heads:
        return found | {"cls.seq_relationship": f"{NEXT_SENTENCE}.out_proj"}
    if head is None:
        return found
    if head.is_of_spans:
        return found | {"qa_outputs": f"{head.name}.span_proj"}
    return {"bert.pooler.dense": f"{head.name}.dense", "classifier": f"{head.name}.out_proj"}


def _bert_weights(weights: dict[str, Any], layers: int) -> Iterator[tuple[str, Tensor]]:
    """The encoder's and the masked-LM head's, by BERT's names."""
    embeddings = {"embed_tokens": "word", "embed_positions": "position", "embed_token_types": "token_type"}
    for ours, name in embeddings.items():
        if f"{OF_ENCODER}{ours}.weight" in weights:
            yield f"bert.embeddings.{name}_embeddings.weight", weights[f"{OF_ENCODER}{ours}.weight"]
    maps = {
        f"{OF_ENCODER}embedding_layer_norm": f"bert.embeddings.{NORM}",
        "encoder.lm_head.dense": "cls.predictions.transform.dense",
        "encoder.lm_head.layer_norm": f"cls.predictions.transform.{NORM}",
    }
    for layer in range(layers):
        attention, feed_forward = (f"{OF_ENCODER}sublayers.{2 * layer + offset}" for offset in (0, 1))
        bert = f"bert.encoder.layer.{layer}"
        maps |= {
            f"{attention}.inner.out_proj": f"{bert}.attention.output.dense",
            f"{attention}.layer_norm": f"{bert}.attention.output.{NORM}",
            f"{feed_forward}.inner.fc1": f"{bert}.intermediate.dense",
            f"{feed_forward}.inner.fc2": f"{bert}.output.dense",
            f"{feed_forward}.layer_norm": f"{bert}.output.{NORM}",
        }
        for kind in ("weight", "bias"):
            parts = weights[f"{attention}.inner.qkv_proj.{kind}"].chunk(3)
            for name, part in zip(("query", "key", "value"), parts, strict=True):
                yield f"{bert}.attention.self.{name}.{kind}", part
    for ours, name in maps.items():
        for kind in ("weight", "bias"):
            yield f"{name}.{kind}", weights[f"{ours}.{kind}"]
    yield "cls.predictions.bias", weights["encoder.lm_head.bias"]
