"""The masked language model: the encoder of a pattern, its masked-LM head, and heads for classes, spans and tags."""

import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.modules.networks import heads
from lazyformer_fairseq.modules.networks.encoder import Encoder, TokenInfo, init_bert_weights, start_as_asked
from lazyformer_fairseq.modules.networks.options import DROPOUTS, MaskedLMOptions, norms_and_biases
from lazyformer_fairseq.modules.sublayers.feed_forward import ACTIVATIONS

logger = logging.getLogger(__name__)


class MaskedLM(nn.Module):
    """A masked language model over an encoder of lazy, PAR or any other pattern, with heads for classes and spans.

    Its weights have the names that checkpoints have: ``encoder.sentence_encoder``, ``encoder.lm_head``,
    ``classification_heads``.

    Args:
        options: of the model.
        vocab_size: V.
        padding_idx: id of the padding symbol.

    Raises:
        ValueError: as :class:`Encoder` does.
    """

    per_word: ClassVar[str] = "encoder.sentence_encoder.embed_tokens.weight"  # the weight with a row for each word
    takes_positions = True  # for a loss: `masked_tokens` may be places among the B * T
    takes_documents = takes_permuted = True  # for whoever makes batches

    def __init__(self, options: MaskedLMOptions, vocab_size: int, padding_idx: int = 1):
        super().__init__()
        self.cfg = options
        self.encoder = _EncoderWithHead(options, vocab_size, padding_idx)
        self.classification_heads = nn.ModuleDict()
        self.apply(init_bert_weights)
        start_as_asked(self.encoder.sentence_encoder, options.local_heads, options.zero_last_maps)

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
        positions_begin_anew: bool = False,
        positions: Optional[Tensor] = None,
        turns: Optional[Tensor] = None,
        **_more: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Encode, and apply the requested head.

        Args:
            src_tokens: ids (B, T).
            src_lengths: unused; fairseq's tasks pass it.
            features_only: return the encoder's output.
            masked_tokens: logits at these positions alone: places among the B * T, int64 (M,), or a boolean (B, T).
            classification_head_name: return this head's logits; with `masked_tokens` beside those.
            return_all_hiddens: also return what every sublayer returned.
            has_padding: whether any sequence is padded, and on the right alone. Whoever made the batch can tell; if
                None, padding may stand anywhere, and the model must wait for the GPU to find out.
            global_positions: see :class:`~lazyformer_fairseq.modules.networks.encoder.TokenInfo`, also for the rest.
            token_types: of each token.
            documents: lengths of documents of each sequence.
            positions_begin_anew: whether the positions of each document do.
            positions: of permuted tokens.
            turns: of permuted tokens.

        Returns:
            Masked-LM logits (B, T, V) or (M, V), features (B, T, C), or a head's logits: (B, classes), of every token
            (B, T, classes); and ``{"inner_states": list of (B, T, C)}``, with a head's logits as ``head_logits`` where
            it is asked for beside masked tokens.
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
            positions_begin_anew=positions_begin_anew,
            positions_BT=positions,
            turns_B3T=turns,
            wanted_M=wanted,
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
        """Return the places of all `<s>` among the B * T, (B,)."""
        batch, time = src_tokens.shape
        starts = torch.arange(batch, device=src_tokens.device) * time
        if has_padding is not None:
            return starts
        return starts + src_tokens.ne(self.encoder.sentence_encoder.padding_idx).int().argmax(-1)

    @property
    def compiles(self) -> bool:
        """True if training goes through torch.compile."""
        return self.encoder.sentence_encoder.compiles

    def max_positions(self) -> int:
        """Return the longest sequence, in tokens."""
        return self.encoder.sentence_encoder.max_positions

    def register_classification_head(self, name: str, num_classes: int, head_type: str = "dense") -> None:
        """Add the head `name` with fresh weights, or replace one of another size or type.

        Args:
            name: of the head.
            num_classes: its outputs.
            head_type: a key of :data:`~lazyformer_fairseq.modules.networks.heads.HEADS`.
        """
        previous = dict(self.classification_heads.items()).get(name)
        if previous is not None:
            if type(previous) is heads.HEADS[head_type] and heads.outputs_of(previous) == num_classes:
                return
            logger.warning(
                "classification head %s: %d outputs (%s) replace its %d, weights start anew",
                name,
                num_classes,
                head_type,
                heads.outputs_of(previous),
            )
        head = heads.HEADS[head_type](self.cfg.encoder_embed_dim, num_classes, self.cfg.pooler_dropout)
        self.classification_heads[name] = head.apply(init_bert_weights)

    def register_pooler(self) -> None:
        """Add a pooler with fresh weights, as the head that is called so."""
        self.classification_heads[heads.POOLER] = heads.Pooler(self.cfg.encoder_embed_dim).apply(init_bert_weights)

    def register_next_sentence_head(self) -> None:
        """Add BERT's head that tells whether the second text of a pair follows the first: a pooler and two classes."""
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
    """Return arguments of the :class:`Encoder` that a model's options describe."""
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
        assert embed_tokens is not None, "an encoder with a vocabulary has them"
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
