"""The decoder of a causal language model: adaptive embeddings and the stack of sublayers."""

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
from lazyformer_fairseq.modules.networks.stack import Stack, check_score_features
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.modules.sublayers.attention import AttentionSublayer, check_heads, encode_distances
from lazyformer_fairseq.modules.sublayers.attention_variants.absolute import TABLE
from lazyformer_fairseq.modules.sublayers.interface import Context, RelativePositions
from lazyformer_fairseq.patterns.attention_variants import chosen_variants, why_no_memory
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import CAUSAL, CausalSizes


class CausalDecoder(Stack):
    """A causal decoder: Transformer-XL with any sublayer pattern (Dai et al., 2019; PAR Transformer, section 3.1).

    As in Transformer-XL, dropout applies to the embeddings, the distance encodings, the output of every sublayer and
    the features. Pre-norm decoders normalize the features.

    Args:
        pattern: see :class:`Stack`.
        vocab_size: V.
        embed_dim: C, which must be even because distances are encoded as sines and cosines.
        ffn_embed_dim: the hidden size of the feed-forward sublayers.
        num_heads: N, which must divide C.
        mem_len: the number of tokens that a StreamMemory keeps from one segment to the next.
        clamp_len: the maximum distance, to which longer distances are clamped; 0 or -1 for no limit.
        same_length: whether every query sees the same number of tokens, namely itself and the `mem_len` tokens before
            it, as in Transformer-XL's code. If False, a query sees the whole memory and the tokens of its segment up to
            and including itself.
        cutoffs: the first id of every embedding band except the first; empty for a single band.
        div_val: the factor by which the embedding width shrinks from band to band.
        activation: the activation function of the feed-forward sublayers.
        scaled_init: whether :func:`init_transformer_xl_weights` initializes the last linear layer of each sublayer with
            smaller weights.
        options: further arguments of :class:`Stack`.

    Attributes:
        positions: the position table (length, C) of ``s[positions=absolute]``. Its vectors are multiplied by sqrt(C),
            like the embeddings to which they are added. None if no sublayer uses the table.
        mem_len: see above. `mem_len`, `clamp_len` and `same_length` may be changed between forward passes, because the
            weights do not depend on them.

    Raises:
        UserError: If an option is out of bounds or options conflict.
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
        check_same_length_has_memory(same_length, mem_len)
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
        # Unused weights must not require gradients: DDP waits for the gradient of every weight that requires one.
        attending = [getattr(sublayer, "inner", sublayer) for sublayer in self.sublayers if sublayer.attends]
        attending = [each for each in attending if getattr(each, "has_scores", True)]
        self.content_bias.requires_grad_(any(getattr(each, "has_queries", True) for each in attending))
        self.position_bias.requires_grad_(any(getattr(each, "has_keys", True) for each in attending))
        self.final_layer_norm: Optional[nn.Module] = None
        if self.normalize_before:
            self.final_layer_norm = layer_norm(embed_dim, *self.norm)

    @property
    def sizes(self) -> CausalSizes:
        """The network's sizes, for counting costs."""
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
        """Build a sublayer as in :meth:`Stack.build_sublayer`, and set the shared position table, if any."""
        built = super().build_sublayer(planned)
        self.positions = self.options.common.get(TABLE)
        return built

    @property
    def why_no_memory(self) -> str:
        """The reason why one of the sublayers cannot attend to a memory; "" if all sublayers can.

        Without a memory, generation reprocesses the whole text for each new token.
        """
        return next(filter(None, (why_no_memory(planned.values) for planned in self.plan)), "")

    @property
    def mem_len(self) -> int:
        """The number of tokens that a memory keeps from one segment to the next."""
        return self._mem_len

    @mem_len.setter
    def mem_len(self, length: int) -> None:
        for planned in self.plan:
            for row in chosen_variants(planned.values):
                why = row.why_no_memory(planned.values) or row.why_no_segments
                if length and why:
                    raise UserError(f"--mem-len {length} cannot be used with {planned.text}: {why}; set --mem-len 0")
        self._mem_len = length

    @property
    def same_length(self) -> bool:
        """True if every query sees the same number of tokens."""
        return self._same_length

    @same_length.setter
    def same_length(self, is_on: bool) -> None:
        if is_on:
            for planned in self.plan:
                check_score_features(planned, {"mask"}, "--same-length cannot be used with ")
        self._same_length = is_on

    def context(self, x_BTC: Tensor, memory_length: int = 0) -> Context:
        """Build the context of a forward pass over a segment (B, T, C) with a memory of `memory_length` tokens.

        Streams have no padding.
        """
        mask = None
        if self.same_length:
            all_heads = (self.num_heads, (Band(self.mem_len, 0),))
            mask = AttentionMask((all_heads,))
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
        """Process one segment of B streams.

        Args:
            tokens_BT: ids, or embeddings (B, T, C).
            memory: the streams' memory of previous segments, to which this segment is added. None to process the
                segment on its own.
            return_all: whether to also return the embeddings and the output of each sublayer.

        Returns:
            Features (B, T, C), and a list of intermediate states (B, T, C), which is empty unless `return_all`.
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
        """Return the position vectors (T, C) of the next T tokens after `seen` tokens."""
        assert self.positions is not None, "called only with s[positions=absolute]"
        length = self.positions.size(0)
        if seen + time > length:
            raise UserError(
                f"a text has {seen + time} tokens, but this model's position table has length {length}: use shorter "
                "texts (--tgt-len), or train a model with a longer table, s[positions=absolute,length=...]"
            )
        return self.positions[seen : seen + time] * math.sqrt(self.embed_dim)

    def last_maps(self) -> list[nn.Linear]:
        """Return each sublayer's last linear layer, the one that writes to the residual stream.

        Raises:
            UserError: If a sublayer's class does not define its last linear layer.
        """
        inners = [getattr(sublayer, "inner", None) for sublayer in self.sublayers]
        return [inner.last_map() for inner in inners if inner is not None]


def _check_sizes(embed_dim: int, ffn_embed_dim: int, num_heads: int, mem_len: int, clamp_len: int) -> None:
    check_heads(embed_dim, num_heads)
    if embed_dim < 2 or embed_dim % 2:
        raise UserError(
            f"the embedding dimension must be even and positive, not {embed_dim}, because distances are encoded as "
            "sines and cosines"
        )
    if ffn_embed_dim < 1:
        raise UserError(f"the hidden size of feed-forward sublayers must be 1 or more, not {ffn_embed_dim}")
    if mem_len < 0:
        raise UserError(f"--mem-len {mem_len}: must be 0 (no memory) or more")
    if clamp_len < -1:
        raise UserError(f"--clamp-len {clamp_len}: must be positive, or 0 or -1 for no limit")


def check_same_length_has_memory(same_length: bool, mem_len: int) -> None:
    """Raise a UserError for `same_length` without a memory, because each query would see only itself."""
    if same_length and not mem_len:
        raise UserError(
            "--same-length with --mem-len 0: every query sees itself and the --mem-len tokens before it, so without a "
            "memory a query would see only itself; set --mem-len, or omit --same-length"
        )


def init_transformer_xl_weights(module: nn.Module, std: float = 0.02) -> None:
    """Initialize a module as in Transformer-XL; call it through ``network.apply``.

    | parameters | initial values |
    |---|---|
    | weights of linear layers, embeddings, the softmax's band vectors, `content_bias` and `position_bias` | N(0, std) |
    | projections of bands | N(0, 0.01) |
    | biases of linear layers, words and bands; word vectors of an untied softmax | 0 |
    | last linear layers of L sublayers, with `scaled_init` | N(0, std / sqrt(L)), as in GPT-2 |
    | LayerNorm | weight 1, bias 0 (torch's default; Transformer-XL draws the weight from N(1, std)) |
    | projections for global tokens | copies of the regular projections |

    Args:
        module: a module of the network.
        std: the standard deviation; Transformer-XL's large model uses 0.005.
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
        module.initialize_copies()
