"""The fairseq models: every ``--arch`` of ours is one of two classes with another sublayer pattern.

Transformer-XL, PAR, Sandwich and lazy PAR are the causal language model, all others the encoder.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Optional, Union

import torch
from fairseq.models import FairseqEncoder, FairseqEncoderModel, register_model
from torch import Tensor, nn

from lazyformer_fairseq.fairseq_plugin.models import checkpoint_match, config, hub
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import CheckedModel, dictionary_hash
from lazyformer_fairseq.fairseq_plugin.models.config import CausalLMConfig, LazyFormerConfig
from lazyformer_fairseq.fairseq_plugin.reliability.options import backend_of
from lazyformer_fairseq.modules.networks import heads
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder, init_transformer_xl_weights
from lazyformer_fairseq.modules.networks.encoder import Encoder, init_bert_weights
from lazyformer_fairseq.modules.networks.stack import StreamMemory
from lazyformer_fairseq.modules.sublayers.feed_forward import ACTIVATIONS
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.kinds import parse_cutoffs

logger = logging.getLogger(__name__)

DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


def norms_and_biases(cfg: Union[LazyFormerConfig, CausalLMConfig]) -> dict[str, Any]:
    """Those options of a network."""
    return {"norm": str(cfg.norm), "norm_bias": not cfg.no_norm_bias, "linear_bias": not cfg.no_linear_bias}


@register_model("lazyformer", dataclass=LazyFormerConfig)
class LazyFormerModel(checkpoint_match.CheckedModel, FairseqEncoderModel):
    """A masked language model over an encoder of lazy, PAR or any other pattern, with heads for classes and spans."""

    per_word = checkpoint_match.PER_WORD
    takes_positions = True  # for the criterion: `masked_tokens` may be places among the B * T
    takes_documents = True  # for tasks

    def __init__(self, cfg: LazyFormerConfig, dictionary):
        super().__init__(_EncoderWithHead(cfg, dictionary))
        self.cfg = cfg
        self.classification_heads = nn.ModuleDict()
        self.register_buffer("dictionary_sha256", checkpoint_match.dictionary_hash(dictionary))
        self.apply(init_bert_weights)

    @classmethod
    def from_pretrained(cls, folder: str, checkpoint_file: Optional[str] = None):
        """Loads model, dictionary and tokenizer from a folder of checkpoints; see :func:`models.hub.load`."""
        return hub.load(cls, folder, checkpoint_file)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Optional[Tensor] = None,
        features_only: bool = False,
        masked_tokens: Optional[Tensor] = None,
        classification_head_name: Optional[str] = None,
        return_all_hiddens: bool = False,
        has_padding: Optional[bool] = None,
        global_positions: Optional[Tensor] = None,
        token_types: Optional[Tensor] = None,
        documents: Optional[Sequence[Sequence[int]]] = None,
        positions_begin_anew: bool = False,
        **unused,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Encodes, and applies the requested head.

        Args:
            src_tokens: ids (B, T).
            src_lengths: unused; fairseq's tasks pass it.
            features_only: return the encoder's output.
            masked_tokens: logits at these positions alone: places among the B * T, int64 (M,), or a boolean (B, T).
            classification_head_name: return this head's logits; with `masked_tokens` beside those.
            return_all_hiddens: also return what every sublayer returned.
            has_padding: whether any sequence is padded, and on the right alone. Whoever made the batch can tell; if
                None, padding may stand anywhere, and the model must wait for the GPU to find out.
            global_positions: (B, T), True at tokens that see and are seen by all, such as those of a question; for
                patterns with ``global=given``, which need it.
            token_types: (B, T), which of two texts a token is of, for models with ``--token-types``; None for type 0.
            documents, positions_begin_anew: of each sequence the lengths of documents that do not see each other, as
                :meth:`~lazyformer_fairseq.modules.networks.encoder.Encoder.forward` takes them. No padding is computed.

        Returns:
            Masked-LM logits (B, T, V) or (M, V), features (B, T, C), or a head's logits: (B, classes), of spans
            (B, T, 2); and ``{"inner_states": list of (B, T, C)}``, with a head's logits as ``head_logits`` where it is
            asked for beside masked tokens.
        """
        is_headless = features_only or classification_head_name is not None
        output, extra = self.encoder(
            src_tokens, is_headless, masked_tokens, return_all_hiddens, has_padding,
            (global_positions, token_types, documents, positions_begin_anew),
        )  # fmt: skip
        if classification_head_name is None:
            return output, extra
        head, features = self.classification_heads[classification_head_name], output
        if has_padding is None and not heads.reads_all_tokens(head):  # then <s> is wherever text begins
            first = src_tokens.ne(self.encoder.dictionary.pad()).int().argmax(-1)
            features = features[torch.arange(len(first), device=first.device), first].unsqueeze(1)
        if masked_tokens is None:
            return head(features), extra
        return self.encoder.lm_head(output, masked_tokens), {**extra, "head_logits": head(features)}

    @property
    def compiles(self) -> bool:
        """Whether training goes through torch.compile; for the criterion."""
        return self.encoder.sentence_encoder.compiles

    def register_classification_head(self, name: str, num_classes: int, kind: str = "dense") -> None:
        """Adds the head `name` with fresh weights, or replaces one of another size or kind.

        Args:
            kind: a key of :data:`~lazyformer_fairseq.modules.networks.heads.HEADS`.
        """
        previous = dict(self.classification_heads.items()).get(name)
        if previous is not None:
            if type(previous) is heads.HEADS[kind] and heads.outputs_of(previous) == num_classes:
                return
            logger.warning(
                "classification head %s: %d outputs (%s) replace its %d, weights start anew",
                name, num_classes, kind, heads.outputs_of(previous),
            )  # fmt: skip
        head = heads.HEADS[kind](self.cfg.encoder_embed_dim, num_classes, self.cfg.pooler_dropout)
        self.classification_heads[name] = head.apply(init_bert_weights)

    def register_pooler(self) -> None:
        """Adds a pooler with fresh weights, as the head that is called so."""
        self.classification_heads[heads.POOLER] = heads.Pooler(self.cfg.encoder_embed_dim).apply(init_bert_weights)

    def register_next_sentence_head(self) -> None:
        """Adds BERT's head that tells whether the second text of a pair follows the first: a pooler and two classes."""
        self.register_classification_head(heads.NEXT_SENTENCE, 2)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Lets a checkpoint with other classification heads than the model's load, or with fewer positions; logs it."""
        super().upgrade_state_dict_named(state_dict, name)
        checkpoint_match.match_classification_heads(state_dict, self.classification_heads)
        positions = self.cfg.max_positions, self.cfg.copy_positions
        checkpoint_match.match_positions(state_dict, self.state_dict(), checkpoint_match.PER_POSITION, *positions)


class _EncoderWithHead(FairseqEncoder):
    """The encoder and its masked-LM head behind fairseq's encoder interface."""

    SIZES = ("max_positions", "relative_position_buckets", "relative_position_max_distance", "token_types",
             "layer_norm_eps", "no_token_positional_embeddings", "embedding_norm")  # fmt: skip

    def __init__(self, cfg: LazyFormerConfig, dictionary):
        super().__init__(dictionary)
        self.sentence_encoder = Encoder(
            pattern=cfg.sublayer_pattern,
            vocab_size=len(dictionary),
            embed_dim=cfg.encoder_embed_dim,
            ffn_embed_dim=cfg.encoder_ffn_embed_dim,
            num_heads=cfg.encoder_attention_heads,
            padding_idx=dictionary.pad(),
            activation=ACTIVATIONS[str(cfg.activation_fn)],
            normalize_before=cfg.encoder_normalize_before,
            attention_backend=backend_of(cfg),
            **{name: getattr(cfg, name) for name in (*DROPOUTS, *self.SIZES)},
            **norms_and_biases(cfg),
        )
        self.sentence_encoder.compiles = cfg.compile
        self.lm_head = heads.MaskedLMHead(
            cfg.encoder_embed_dim,
            self.sentence_encoder.embed_tokens,
            ACTIVATIONS[str(cfg.head_activation_fn)],
            self.sentence_encoder.norm,
            not cfg.no_linear_bias,
            cfg.plain_lm_head,
            cfg.untied_lm_head,
        )

    def forward(
        self, src_tokens, features_only, masked_tokens, return_all_hiddens, has_padding, given
    ) -> tuple[Tensor, dict[str, Any]]:
        padding_mask = src_tokens.eq(self.sentence_encoder.padding_idx)
        is_padded_on_right = None if has_padding is None else True
        mask = padding_mask if (bool(padding_mask.any()) if has_padding is None else has_padding) else None
        features, inner_states = self.sentence_encoder(src_tokens, mask, return_all_hiddens, is_padded_on_right, *given)
        output = features if features_only else self.lm_head(features, masked_tokens)
        return output, {"inner_states": inner_states}

    def max_positions(self) -> int:
        return self.sentence_encoder.max_positions


config.register_presets("lazyformer", ARCHITECTURES)


@register_model("lazyformer_lm", dataclass=CausalLMConfig)
class CausalLanguageModel(CheckedModel):
    """A causal decoder of any pattern and an adaptive softmax that is tied to its embedding.

    Attributes:
        decoder: the CausalDecoder; its `mem_len`, `clamp_len` and `same_length` may be set for evaluation.
        softmax: the AdaptiveSoftmax.
    """

    per_word = "softmax.bias"

    def __init__(self, cfg: CausalLMConfig, dictionary):
        super().__init__()
        self.cfg = cfg
        self.padding_idx = dictionary.pad()
        self.decoder = CausalDecoder(
            pattern=cfg.sublayer_pattern,
            vocab_size=len(dictionary),
            embed_dim=cfg.decoder_embed_dim,
            ffn_embed_dim=cfg.decoder_ffn_embed_dim,
            num_heads=cfg.decoder_attention_heads,
            cutoffs=parse_cutoffs(cfg.adaptive_softmax_cutoff),
            div_val=cfg.adaptive_softmax_factor,
            activation=ACTIVATIONS[str(cfg.activation_fn)],
            normalize_before=cfg.decoder_normalize_before,
            attention_backend=backend_of(cfg),
            **{name: getattr(cfg, name) for name in (*DROPOUTS, "mem_len", "clamp_len", "same_length")},
            **norms_and_biases(cfg),
        )
        self.softmax = AdaptiveSoftmax(self.decoder.embedding)
        self.register_buffer("dictionary_sha256", dictionary_hash(dictionary))
        self.apply(partial(init_transformer_xl_weights, std=cfg.init_std))

    def forward(
        self,
        src_tokens: Tensor,
        memory: Optional[StreamMemory] = None,
        target: Optional[Tensor] = None,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        **unused,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Reads one segment of B streams.

        Args:
            src_tokens: ids (B, T).
            memory: of these B streams; advances to the end of this segment. None to start and end here.
            target: ids (B, T), the tokens that follow.
            features_only: return the decoder's output.
            return_all_hiddens: also return what every sublayer returned.

        Returns:
            With `target` the negative log-likelihood of each token in nats, (B, T) in float32, 0 where the target is
            padding; without, log-probabilities (B, T, V); or features (B, T, C). And
            ``{"inner_states": list of (B, T, C)}``.
        """
        features, inner_states = self.decoder(src_tokens, memory, return_all=return_all_hiddens)
        extra = {"inner_states": inner_states}
        if features_only:
            return features, extra
        if target is None:
            return self.softmax.log_probabilities(features, self.decoder.embedding), extra
        nll = self.softmax.negative_log_likelihood(features.flatten(0, 1), target.flatten(), self.decoder.embedding)
        return nll.view_as(target).masked_fill(target == self.padding_idx, 0), extra


config.register_presets("lazyformer_lm", CAUSAL_ARCHITECTURES)
