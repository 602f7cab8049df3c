"""The exported model's configuration."""

from typing import Any, Optional

from transformers import PretrainedConfig


class LazyFormerConfig(PretrainedConfig):
    """Sizes, the pattern and its plan. Names are those of BertConfig where it has them.

    Args:
        sublayer_pattern: as it was trained; for readers, as `plan` says the same.
        plan: the sublayers, lowest first; see :class:`PlannedSublayer`. ``lazyformer export`` writes it.
        head_act: activation of the masked-LM head.
        normalize_before: LayerNorm before each sublayer (pre-norm) instead of after it.
        activation_dropout: after the activation of the feed-forward sublayers.
        pooler: whether the encoder has BERT's, which a model has that was imported with one.
        relative_position_buckets: of T5's relative position bias; 0 for none.
        relative_position_max_distance: from this one on, all distances share a bucket.
        classifier: the classification head, "dense" (RoBERTa's) or "linear" (one map).
        classifier_dropout: in it.
        weights_sha256: by part of the model and by precision, a hash of the weights; see ``checksums``.
        hidden_size, ..., layer_norm_eps: as BertConfig's. `type_vocab_size` is 0 where there are no token types.
    """

    model_type = "lazyformer"

    def __init__(
        self,
        vocab_size: int = 32768,
        hidden_size: int = 768,
        intermediate_size: int = 3072,
        num_attention_heads: int = 12,
        max_position_embeddings: int = 512,
        sublayer_pattern: str = "",
        plan: Optional[list[dict[str, Any]]] = None,
        hidden_act: str = "gelu",
        head_act: str = "gelu",
        hidden_dropout_prob: float = 0.1,
        attention_probs_dropout_prob: float = 0.0,
        activation_dropout: float = 0.0,
        normalize_before: bool = False,
        layer_norm_eps: float = 1e-5,
        type_vocab_size: int = 0,
        pooler: bool = False,
        relative_position_buckets: int = 0,
        relative_position_max_distance: int = 128,
        classifier: str = "dense",
        classifier_dropout: float = 0.0,
        initializer_range: float = 0.02,
        weights_sha256: Optional[dict[str, dict[str, str]]] = None,
        bos_token_id: Optional[int] = 0,
        pad_token_id: Optional[int] = 1,
        eos_token_id: Optional[int] = 2,
        mask_token_id: Optional[int] = None,
        tie_word_embeddings: bool = True,
        **others: Any,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.sublayer_pattern = sublayer_pattern
        self.plan = [] if plan is None else plan
        self.num_hidden_layers = len(self.plan)
        self.hidden_act = hidden_act
        self.head_act = head_act
        self.hidden_dropout_prob = hidden_dropout_prob
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.activation_dropout = activation_dropout
        self.normalize_before = normalize_before
        self.layer_norm_eps = layer_norm_eps
        self.type_vocab_size = type_vocab_size
        self.pooler = pooler
        self.relative_position_buckets = relative_position_buckets
        self.relative_position_max_distance = relative_position_max_distance
        self.classifier = classifier
        self.classifier_dropout = classifier_dropout
        self.initializer_range = initializer_range
        self.weights_sha256 = weights_sha256
        self.mask_token_id = mask_token_id
        others.pop("num_hidden_layers", None)  # the plan's
        super().__init__(
            bos_token_id=bos_token_id,
            pad_token_id=pad_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **others,
        )
