"""The decoder of a causal language model: adaptive embeddings, then the stack of the pattern."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.layer_norm import layer_norm
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveEmbedding, AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.adaptive_softmax import Band as WordBand
from lazyformer_fairseq.modules.networks.stack import Stack, refuse_features
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.modules.sublayers.attention import AttentionSublayer, check_heads, encode_distances
from lazyformer_fairseq.modules.sublayers.attention_variants.absolute import TABLE
from lazyformer_fairseq.modules.sublayers.interface import Context, RelativePositions
from lazyformer_fairseq.patterns.attention_variants import chosen_variants, why_no_memory
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import CAUSAL, CausalSizes


class CausalDecoder(Stack):
    """Transformer-XL with any pattern of sublayers (Dai et al., 2019; PAR Transformer, section 3.1).

    Dropout acts, as in Transformer-XL, on embeddings, on encoded distances, on every sublayer's output and on the
    features. Pre-norm decoders normalise the features.

    Args:
        pattern, embed_dim, ffn_embed_dim, num_heads, options: of the :class:`Stack`; `embed_dim` must be even, for
            sines and cosines.
        vocab_size: V.
        mem_len: tokens that a StreamMemory keeps from one segment to the next.
        clamp_len: distances beyond this one count as it; 0 or -1 for no such limit.
        same_length: every query sees itself and the `mem_len` tokens before it, equally many for all, as in
            Transformer-XL's code; else the whole memory and the segment up to itself.
        cutoffs: ids that start a new band of the embedding; empty for one band.
        div_val: how many times narrower each band is than the one before.
        scaled_init: whether :func:`init_transformer_xl_weights` draws the last map of each sublayer smaller.

    Attributes:
        positions: the table of ``s[positions=absolute]``, (length, C), which embeddings get times sqrt(C), as they have
            it themselves; None where no sublayer asks for it.
        mem_len, clamp_len, same_length: may be set between two forward passes; weights do not depend on them.

    Raises:
        ValueError: sizes that do not fit together; the message names them (most are UserErrors).
    """

    direction = CAUSAL

    def __init__(  # noqa: PLR0913, PLR0917 - sizes
        self,
        pattern: str,
        vocab_size: int,
        embed_dim: int,
        ffn_embed_dim: int,
        num_heads: int,
        mem_len: int,
        clamp_len: int = 0,
        same_length: bool = False,
        cutoffs: Sequence[int] = (),
        div_val: int = 1,
        activation: Callable[[Tensor], Tensor] = F.relu,
        scaled_init: bool = False,
        **options: Any,
    ):
        _check_sizes(embed_dim, ffn_embed_dim, num_heads, mem_len, clamp_len)
        refuse_same_length_without_memory(same_length, mem_len)
        super().__init__(pattern, embed_dim, ffn_embed_dim, num_heads, activation=activation, **options)
        self.mem_len = mem_len
        self.clamp_len = clamp_len
        self.scaled_init = scaled_init
        self.same_length = same_length
        self.embedding = AdaptiveEmbedding(vocab_size, embed_dim, cutoffs, div_val)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, embed_dim // num_heads))
        self.position_bias = nn.Parameter(torch.zeros(num_heads, embed_dim // num_heads))
        self.positions: Optional[nn.Parameter] = None
        self.sublayers = self.build_sublayers()
        # What nothing reads needs no gradient: on several GPUs DDP waits for one of every weight that requires it.
        attending = [getattr(sublayer, "inner", sublayer) for sublayer in self.sublayers if sublayer.attends]
        attending = [each for each in attending if getattr(each, "has_scores", True)]
        self.content_bias.requires_grad_(any(getattr(each, "has_queries", True) for each in attending))
        self.position_bias.requires_grad_(any(getattr(each, "has_keys", True) for each in attending))
        self.final_layer_norm: Optional[nn.Module] = None
        if self.normalize_before:
            self.final_layer_norm = layer_norm(embed_dim, *self.norm)

    @property
    def sizes(self) -> CausalSizes:
        """Sizes, for counting costs."""
        bands = self.embedding.bands
        return CausalSizes(
            vocab_size=sum(band.size for band in bands),
            embed_dim=self.embed_dim,
            ffn_embed_dim=self.options.ffn_embed_dim,
            num_heads=self.num_heads,
            cutoffs=tuple(band.start for band in bands[1:]),
            div_val=self.embed_dim // bands[:2][-1].table.size(1),
            normalize_before=self.normalize_before,
            norm=self.norm.type,
            norm_bias=self.norm.has_bias,
            linear_bias=self.options.linear_bias,
        )

    def build_sublayer(self, planned: PlannedSublayer) -> nn.Module:
        """Return one sublayer; as :meth:`Stack.build_sublayer`."""
        built = super().build_sublayer(planned)
        self.positions = self.options.common.get(TABLE)
        return built

    @property
    def why_no_memory(self) -> str:
        """Reason why some sublayer cannot attend to a memory, so that a text is read anew for each token; or ""."""
        return next(filter(None, (why_no_memory(planned.values) for planned in self.plan)), "")

    @property
    def mem_len(self) -> int:
        """Tokens that a memory keeps."""
        return self._mem_len

    @mem_len.setter
    def mem_len(self, length: int) -> None:
        for planned in self.plan:
            for row in chosen_variants(planned.values):
                why = row.why_no_memory(planned.values) or row.why_no_segments
                if length and why:
                    raise UserError(f"--mem-len {length} is not for {planned.text}: {why}; give --mem-len 0")
        self._mem_len = length

    @property
    def same_length(self) -> bool:
        """True if every query sees equally many tokens."""
        return self._same_length

    @same_length.setter
    def same_length(self, is_on: bool) -> None:
        if is_on:
            for planned in self.plan:
                refuse_features(planned, {"mask"}, "--same-length is not for ")
        self._same_length = is_on

    def context(self, x_BTC: Tensor, memory_length: int = 0) -> Context:
        """Return the context of T queries over M remembered tokens and themselves; streams have no padding."""
        mask = None
        if self.same_length:
            mask = AttentionMask(((self.num_heads, (Band(self.mem_len, 0),)),))
        scores = Scores(is_causal=True, mask=mask)
        if not self.has_scores:
            return Context(scores, self.back_end())
        keys = memory_length + x_BTC.size(1)
        encoded = encode_distances(keys, self.embed_dim, max(self.clamp_len, 0), self.content_bias)
        encoded = F.dropout(encoded, self.dropout, self.training)
        positions = RelativePositions(encoded, self.content_bias, self.position_bias)
        return Context(scores, self.back_end(), positions)

    def forward(
        self,
        tokens_BT: Tensor,
        memory: Optional[StreamMemory] = None,
        return_all: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Read one segment of B streams.

        Args:
            tokens_BT: ids, or embeddings (B, T, C) in their place.
            memory: of the same B streams up to this segment; holds the segment too when this returns. None for streams
                that start and end here.
            return_all: also return the embeddings and the output of each sublayer.

        Returns:
            Features (B, T, C), and the list of intermediate (B, T, C) (empty unless `return_all`).
        """
        past = StreamMemory() if memory is None else memory
        x = tokens_BT
        if not tokens_BT.is_floating_point():
            x = self.embedding(tokens_BT)
        if self.positions is not None:
            x = x + self._places(past.seen, tokens_BT.size(1))
        x = F.dropout(x, self.dropout, self.training)
        shared = self.context(x, past.length)
        output = self.run(x, shared, return_all, past)
        x = output.x_BTC
        if memory is not None:
            memory.remember(output.attended, self.mem_len)
        if self.final_layer_norm is not None:
            x = self.final_layer_norm(x)
        return F.dropout(x, self.dropout, self.training), output.states

    def _places(self, seen: int, time: int) -> Tensor:
        """Return vectors (T, C) of the places of T tokens behind those `seen`."""
        assert self.positions is not None, "s[positions=absolute] has made the table"
        length = self.positions.size(0)
        if seen + time > length:
            raise UserError(
                f"{seen + time} tokens, but this model's table of positions has {length}: give shorter texts "
                "(--tgt-len), or train a model with a longer one, s[positions=absolute,length=...]"
            )
        return self.positions[seen : seen + time] * math.sqrt(self.embed_dim)

    def last_maps(self) -> list[nn.Linear]:
        """Return the map of each sublayer whose output goes to the residual connection.

        Raises:
            UserError: a sublayer does not say which one.
        """
        inners = [getattr(sublayer, "inner", None) for sublayer in self.sublayers]
        return [inner.last_map() for inner in inners if inner is not None]


def _check_sizes(embed_dim: int, ffn_embed_dim: int, num_heads: int, mem_len: int, clamp_len: int) -> None:
    check_heads(embed_dim, num_heads)
    if embed_dim < 2 or embed_dim % 2:
        raise UserError(f"an embedding dimension of {embed_dim}: must be even and positive, for sines and cosines")
    if ffn_embed_dim < 1:
        raise UserError(f"feed-forward sublayers {ffn_embed_dim} wide: must be 1 or more")
    if mem_len < 0:
        raise UserError(f"--mem-len {mem_len}: must be 0 (no memory) or more")
    if clamp_len < -1:
        raise UserError(f"--clamp-len {clamp_len}: must be positive, or 0 for no limit to distances")


def refuse_same_length_without_memory(same_length: bool, mem_len: int) -> None:
    """Raise a UserError, as each query would see itself alone."""
    if same_length and not mem_len:
        raise UserError(
            "--same-length with --mem-len 0: a query sees itself and as many tokens before it as the memory has, so "
            "here itself alone; give a --mem-len, or leave --same-length out"
        )


def init_transformer_xl_weights(module: nn.Module, std: float = 0.02) -> None:
    """Initialise as Transformer-XL does, for ``module.apply``; its large model's `std` is 0.005.

    | parameter | value |
    |---|---|
    | weights of linear maps, embeddings, bands in the head of the softmax, u and v | N(0, std) |
    | projections of bands | N(0, 0.01) |
    | biases of linear maps, words and bands; words' vectors in an untied softmax | 0 |
    | with `scaled_init`: last maps of L sublayers | N(0, std / sqrt(L)), as GPT-2's |
    | LayerNorm | weight 1, bias 0 (torch's own; Transformer-XL draws the weight from N(1, std)) |
    | projections of global tokens | copies of the others |
    """
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(module, WordBand):
        nn.init.normal_(module.table, std=std)
        if module.projection is not None:
            nn.init.normal_(module.projection, std=0.01)
    if isinstance(module, AdaptiveSoftmax):
        nn.init.zeros_(module.bias)
        for band in getattr(module.own, "bands", ()):
            nn.init.zeros_(band.table)
        if module.band_weight is not None and module.band_bias is not None:
            nn.init.normal_(module.band_weight, std=std)
            nn.init.zeros_(module.band_bias)
    if isinstance(module, CausalDecoder):
        nn.init.normal_(module.content_bias, std=std)
        nn.init.normal_(module.position_bias, std=std)
        if module.positions is not None:
            nn.init.normal_(module.positions, std=std)
        if module.scaled_init:
            maps = module.last_maps()
            for linear in maps:
                nn.init.normal_(linear.weight, std=std / math.sqrt(len(maps)))
    if isinstance(module, AttentionSublayer):
        module.start_copies()
