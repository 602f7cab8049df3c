"""A model of any pattern as one of ours in transformers: config and weights."""

from typing import Any

from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import PREFIX, pooler_in_checkpoint
from lazyformer_fairseq.huggingface.export.plan import plan_as_json
from lazyformer_fairseq.huggingface.export.source import Source, head_weights
from lazyformer_fairseq.huggingface.exported.checksums import HEADS, hash_weights
from lazyformer_fairseq.huggingface.exported.heads import (
    LazyFormerForMaskedLM,
    LazyFormerForQuestionAnswering,
    LazyFormerForSequenceClassification,
)
from lazyformer_fairseq.huggingface.exported.modelling import AUTO_CLASSES, CODE_FILE, LazyFormerConfig

# Ours, by names in transformers.
ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "gelu_tanh": "gelu_pytorch_tanh", "relu_squared": "relu2"}
ENCODER = "encoder.sentence_encoder."
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
        if name.startswith(ENCODER):
            found[f"lazyformer.{name.removeprefix(ENCODER)}"] = weights[name]
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
