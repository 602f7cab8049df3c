"""A plain ``(sf)xN`` as a real BERT of transformers, without code of its own.

BERT counts positions from the left, padding included, and sees all tokens without an attention mask: so the two agree
on inputs that are padded on the right and have one. The model's `dense` classification head is BERT's pooler and
classifier, its head for next sentences BERT's pooler and ``cls.seq_relationship``, its span head ``qa_outputs``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig

from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import PREFIX, pooler_in_checkpoint
from lazyformer_fairseq.huggingface.export.custom import ACTIVATIONS, ENCODER, labels, special_ids
from lazyformer_fairseq.huggingface.export.plan import plan_as_json
from lazyformer_fairseq.huggingface.export.source import Source
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE

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
        if f"{ENCODER}{ours}.weight" in weights:
            yield f"bert.embeddings.{name}_embeddings.weight", weights[f"{ENCODER}{ours}.weight"]
    maps = {
        f"{ENCODER}embedding_layer_norm": f"bert.embeddings.{NORM}",
        "encoder.lm_head.dense": "cls.predictions.transform.dense",
        "encoder.lm_head.layer_norm": f"cls.predictions.transform.{NORM}",
    }
    for layer in range(layers):
        attention, feed_forward = (f"{ENCODER}sublayers.{2 * layer + offset}" for offset in (0, 1))
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
