"""The transformers configuration of our masked language models."""

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
    """The sizes and pattern of a masked language model. Settings shared with BertConfig keep their names.

    Args:
        sublayer_pattern: The encoder's pattern, such as M2x6 (the LazyFormer model in the paper).
        hidden_size, intermediate_size, num_attention_heads: The hidden size, the feed-forward size, and the number of
            attention heads.
        hidden_act: The activation of the feed-forward sublayers.
        head_act: The activation of the masked-LM head.
        normalize_before: Whether the norm precedes each sublayer (pre-norm) instead of following it.
        embedding_norm: Whether a pre-norm model normalizes the embeddings instead of the first sublayer's input.
        norm, norm_bias: The type of the norms, "layer" or "rms", and whether LayerNorms have a bias.
        linear_bias: Whether the linear layers in sublayers and in the masked-LM head have biases.
        plain_lm_head: Whether the masked-LM head consists of the output layer only.
        reversible: Whether the sublayers are reversible and alternately update two streams.
        activation_dropout: The dropout rate after the feed-forward activation.
        type_vocab_size: The number of token types; 0 for none.
        position_embeddings: Whether the model has learned positions.
        pooler: Whether the encoder has BERT's pooler.
        relative_position_buckets: The number of buckets of T5's relative position bias; 0 for no bias.
        relative_position_max_distance: The distance beyond which all positions share one bucket.
        classifier: The type of the classification head, "dense" (as in RoBERTa) or "linear" (a single linear layer).
        classifier_dropout: The dropout rate in the classification head.
        experts_loss: The weight of the load-balancing loss for experts.
        attention_backend: The back end that computes attention; ``attn_implementation="eager"`` takes precedence.
        sparse_prediction: Whether to compute masked-LM logits only at predicted tokens if there are labels. None does
            so only during training.
        weights_sha256: The hashes of the weights, by model part and precision.
        **given: Settings of this class, BertConfig or PretrainedConfig; :data:`DEFAULTS` contains the default values.

    Raises:
        UserError: The pattern is invalid.
    """

    model_type = "lazyformer"

    def __init__(self, **given: Any):
        settings = {**DEFAULTS, **given}
        settings["num_hidden_layers"] = len(plan(settings["sublayer_pattern"], ENCODER))
        super().__init__(**settings)

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the pattern and all settings that differ from their defaults."""
        return {**super().to_diff_dict(), "sublayer_pattern": self.sublayer_pattern}
