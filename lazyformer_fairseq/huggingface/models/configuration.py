"""The configuration of the masked language models in transformers."""

from typing import Any

from transformers import PretrainedConfig

from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import ENCODER

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "sublayer_pattern": "M2x6",
    "hidden_act": "gelu",
    "head_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.0,
    "activation_dropout": 0.0,
    "normalize_before": False,
    "layer_norm_eps": 1e-5,
    "norm": "layer",
    "norm_bias": True,
    "linear_bias": True,
    "embedding_norm": False,
    "plain_lm_head": False,
    "type_vocab_size": 0,
    "position_embeddings": True,
    "pooler": False,
    "relative_position_buckets": 0,
    "relative_position_max_distance": 128,
    "classifier": "dense",
    "classifier_dropout": 0.0,
    "experts_loss": 0.01,
    "reversible": False,
    "initializer_range": 0.02,
    "attention_backend": "auto",
    "sparse_prediction": None,
    "weights_sha256": None,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "mask_token_id": None,
    "tie_word_embeddings": True,
}


class LazyFormerConfig(PretrainedConfig):
    """Sizes and pattern of a masked language model; names are those of BertConfig where it has them.

    Args:
        sublayer_pattern: the encoder, such as M2x6, the paper's LazyFormer.
        hidden_size, intermediate_size, num_attention_heads: widths and heads.
        hidden_act: activation of the feed-forward sublayers.
        head_act: activation of the masked-LM head.
        normalize_before: LayerNorm before each sublayer (pre-norm) instead of after it.
        embedding_norm: of a pre-norm model: normalize the embeddings instead of the first sublayer's input.
        norm, norm_bias: "layer" or "rms", and whether LayerNorms have a bias.
        linear_bias: whether linear maps of sublayers, and of the masked-LM head, have biases.
        plain_lm_head: whether that head is the output map alone.
        reversible: whether sublayers change two streams in turn.
        activation_dropout: dropout after the activation of the feed-forward sublayers.
        type_vocab_size: number of token types; 0 for none.
        position_embeddings: whether there are learned positions.
        pooler: whether the encoder has BERT's pooler.
        relative_position_buckets: number of buckets of T5's relative position bias; 0 for none.
        relative_position_max_distance: the distance from which on all positions share a bucket.
        classifier: the classification head, "dense" (RoBERTa's) or "linear" (one map).
        classifier_dropout: dropout in the classification head.
        experts_loss: weight of the loss that keeps experts equally busy.
        attention_backend: how attention is computed; ``attn_implementation="eager"`` takes precedence.
        sparse_prediction: whether masked-LM logits are those of predicted tokens alone where there are labels; None for
            in training alone.
        weights_sha256: hashes of the weights, by part of the model and by precision.
        **given: further settings of BertConfig and PretrainedConfig; :data:`DEFAULTS` has those that are left out.

    Raises:
        UserError: the pattern cannot be read.
    """

    model_type = "lazyformer"

    def __init__(self, **given: Any):
        settings = {**DEFAULTS, **given}
        settings["num_hidden_layers"] = len(plan(settings["sublayer_pattern"], ENCODER))
        super().__init__(**settings)

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what differs from the defaults, and the pattern in any case."""
        return {**super().to_diff_dict(), "sublayer_pattern": self.sublayer_pattern}
