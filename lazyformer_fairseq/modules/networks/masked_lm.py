"""The masked language model: an encoder with a masked-LM head and optional heads for classification, spans and tags."""

import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.modules.networks import heads
from lazyformer_fairseq.modules.networks.encoder import Encoder, TokenInfo, apply_optional_init, init_bert_weights
from lazyformer_fairseq.modules.networks.options import DROPOUTS, MaskedLMOptions, norms_and_biases
from lazyformer_fairseq.modules.sublayers.feed_forward import ACTIVATIONS

logger = logging.getLogger(__name__)


class MaskedLM(nn.Module):
    """A masked language model built from any sublayer pattern, with optional heads for classification, spans and tags.

    The weights have the same names as in fairseq's checkpoints:
    ``encoder.sentence_encoder``, ``encoder.lm_head`` and ``classification_heads``.

    Args:
        options: the model's options.
        vocab_size: V.
        padding_idx: the id of the padding symbol.

    Attributes:
        takes_positions: whether losses may pass `masked_tokens` as indices into the flattened (B, T) batch.
        takes_documents: whether a sequence may contain several documents.
        takes_permuted: whether the tokens of a batch may be permuted.

    Raises:
        UserError: If an option is out of bounds or options conflict.
    """

    per_word: ClassVar[str] = "encoder.sentence_encoder.embed_tokens.weight"  # a weight with one row per word
    takes_positions = True
    takes_documents = takes_permuted = True

    def __init__(self, options: MaskedLMOptions, vocab_size: int, padding_idx: int = 1):
        super().__init__()
        self.cfg = options
        self.encoder = _EncoderWithHead(options, vocab_size, padding_idx)
        self.classification_heads = nn.ModuleDict()
        self.apply(init_bert_weights)
        apply_optional_init(self.encoder.sentence_encoder, options.local_heads, options.zero_last_maps)

    def forward(  # noqa: PLR0913, PLR0917 - by name, as fairseq's tasks pass them
        self,
        src_tokens: Tensor,
        src_lengths: Optional[Tensor] = None,  # noqa: ARG002 - fairseq passes it
        features_only: bool = False,
        masked_tokens: Optional[Tensor] = None,
        classification_head_name: Optional[str] = None,
        return_all_hiddens: bool = False,
        has_padding: Optional[bool] = None,
        global_positions: Optional[Tensor] = None,
        token_types: Optional[Tensor] = None,
        documents: Optional[Sequence[Sequence[int]]] = None,
        restart_positions: bool = False,
        positions: Optional[Tensor] = None,
        turns: Optional[Tensor] = None,
        **_more: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Encode a batch and apply the requested head.

        Args:
            src_tokens: ids (B, T).
            src_lengths: unused; passed by fairseq's tasks.
            features_only: whether to return the encoder's output instead of logits.
            masked_tokens: the positions to compute masked-LM logits for, as int64 indices (M,) into the flattened batch
                or as a boolean mask (B, T); None for all positions.
            classification_head_name: the name of a head to apply instead of the masked-LM head, or in addition to it if
                `masked_tokens` is set.
            return_all_hiddens: whether to also return the output of every sublayer.
            has_padding: whether any sequence is padded, in which case all padding must be on the right. With None,
                padding may be anywhere, and detecting it synchronizes with the GPU.
            global_positions: True at global tokens (B, T). This and all further arguments are described in
                :class:`~lazyformer_fairseq.modules.networks.encoder.TokenInfo`.
            token_types: the type of each token (B, T).
            documents: for each sequence, the lengths of its documents.
            restart_positions: whether positions restart at 0 in each document.
            positions: the positions of permuted tokens (B, T).
            turns: the turns of permuted tokens (B, 3, T).

        Returns:
            A pair. The first element is masked-LM logits (B, T, V) or (M, V); features (B, T, C) with `features_only`;
            or the requested head's logits, (B, classes), or (B, T, classes) for per-token heads. The second element is
            a dictionary with ``inner_states``, a list of (B, T, C), and, if both a head and masked tokens are
            requested, ``head_logits``.
        """
        head = None
        wanted = None
        if classification_head_name is not None:
            head = self.classification_heads[classification_head_name]
            if masked_tokens is None and not isinstance(head, heads.TokenHead):
                wanted = self._first_of_texts(src_tokens, has_padding)
        elif masked_tokens is not None and not features_only:
            wanted = heads.as_positions(masked_tokens)
        info = TokenInfo(
            global_positions_BT=global_positions,
            token_types_BT=token_types,
            documents=documents,
            restart_positions=restart_positions,
            positions_BT=positions,
            turns_B3T=turns,
            selected_M=wanted,
        )
        output, extra = self.encoder(
            src_tokens,
            features_only=features_only or head is not None,
            return_all_hiddens=return_all_hiddens,
            has_padding=has_padding,
            info=info,
        )
        if head is None:
            return output, extra
        if wanted is not None:
            return head(output.unsqueeze(1)), extra
        if masked_tokens is None:
            return head(output), extra
        features = output
        if not isinstance(head, heads.TokenHead):
            first = self._first_of_texts(src_tokens, has_padding)
            features = output.flatten(0, 1).index_select(0, first).unsqueeze(1)
        return self.encoder.lm_head(output, masked_tokens), {**extra, "head_logits": head(features)}

    def _first_of_texts(self, src_tokens: Tensor, has_padding: Optional[bool]) -> Tensor:
        """Return the indices (B,) of each sequence's first token, ``<s>``, in the flattened batch."""
        batch, time = src_tokens.shape
        starts = torch.arange(batch, device=src_tokens.device) * time
        if has_padding is not None:
            return starts
        return starts + src_tokens.ne(self.encoder.sentence_encoder.padding_idx).int().argmax(-1)

    @property
    def compiles(self) -> bool:
        """True if training runs the sublayers through torch.compile."""
        return self.encoder.sentence_encoder.compiles

    def max_positions(self) -> int:
        """Return the maximum sequence length in tokens."""
        return self.encoder.sentence_encoder.max_positions

    def register_classification_head(self, name: str, num_classes: int, head_type: str = "dense") -> None:
        """Add a newly initialized classification head, unless one with the same name, size and type exists.

        An existing head with the same name but a different size or type is replaced.

        Args:
            name: the name of the head.
            num_classes: the number of outputs.
            head_type: a key of :data:`~lazyformer_fairseq.modules.networks.heads.HEADS`.
        """
        previous = dict(self.classification_heads.items()).get(name)
        if previous is not None:
            if type(previous) is heads.HEADS[head_type] and heads.num_logits(previous) == num_classes:
                return
            logger.warning(
                "classification head %s: replaced by a newly initialized head with %d outputs (%s); the old one had %d",
                name,
                num_classes,
                head_type,
                heads.num_logits(previous),
            )
        head = heads.HEADS[head_type](self.cfg.encoder_embed_dim, num_classes, self.cfg.pooler_dropout)
        self.classification_heads[name] = head.apply(init_bert_weights)

    def register_pooler(self) -> None:
        """Add a newly initialized pooler as the head named :data:`heads.POOLER`."""
        self.classification_heads[heads.POOLER] = heads.Pooler(self.cfg.encoder_embed_dim).apply(init_bert_weights)

    def register_next_sentence_head(self) -> None:
        """Add a newly initialized next-sentence prediction head, as in BERT."""
        self.register_classification_head(heads.NEXT_SENTENCE, 2)


_SAME_NAMES = (
    "max_positions",
    "relative_position_buckets",
    "relative_position_max_distance",
    "token_types",
    "layer_norm_eps",
    "no_token_positional_embeddings",
    "embedding_norm",
    "reversible",
    *DROPOUTS,
)


def encoder_arguments(options: MaskedLMOptions, vocab_size: int, padding_idx: int) -> dict[str, Any]:
    """Return the :class:`Encoder` arguments for a model's options."""
    return {
        "pattern": options.sublayer_pattern,
        "vocab_size": vocab_size,
        "embed_dim": options.encoder_embed_dim,
        "ffn_embed_dim": options.encoder_ffn_embed_dim,
        "num_heads": options.encoder_attention_heads,
        "padding_idx": padding_idx,
        "activation": ACTIVATIONS[str(options.activation_fn)],
        "normalize_before": options.encoder_normalize_before,
        "attention_backend": str(options.attention_backend),
        **{name: getattr(options, name) for name in _SAME_NAMES},
        **norms_and_biases(options),
    }


class _EncoderWithHead(nn.Module):
    """The encoder and its masked-LM head."""

    def __init__(self, options: MaskedLMOptions, vocab_size: int, padding_idx: int):
        super().__init__()
        self.sentence_encoder = Encoder(**encoder_arguments(options, vocab_size, padding_idx))
        self.sentence_encoder.compiles = options.compile
        self.sentence_encoder.checkpoints = options.checkpoint_activations
        embed_tokens = self.sentence_encoder.embed_tokens
        assert embed_tokens is not None, "an encoder with a vocabulary has embeddings"
        self.lm_head = heads.MaskedLMHead(
            options.encoder_embed_dim,
            embed_tokens,
            activation=ACTIVATIONS[str(options.head_activation_fn)],
            norm=self.sentence_encoder.norm,
            linear_bias=not options.no_linear_bias,
            is_plain=options.plain_lm_head,
            is_untied=options.untied_lm_head,
        )

    def forward(
        self,
        src_tokens: Tensor,
        *,
        features_only: bool,
        return_all_hiddens: bool,
        has_padding: Optional[bool],
        info: TokenInfo,
    ) -> tuple[Tensor, dict[str, Any]]:
        padding_mask: Optional[Tensor] = None
        is_padded_on_right = None
        if has_padding is not None:
            is_padded_on_right = True
        if has_padding is not False:
            padding_mask = src_tokens.eq(self.sentence_encoder.padding_idx)
            if has_padding is None and not padding_mask.any():
                padding_mask = None
        output, inner_states = self.sentence_encoder(
            src_tokens,
            padding_mask,
            return_all=return_all_hiddens,
            is_padded_on_right=is_padded_on_right,
            info=info,
        )
        if not features_only:
            output = self.lm_head(output)
        return output, {"inner_states": inner_states}
