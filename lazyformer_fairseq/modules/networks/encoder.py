"""The encoder: embeddings, T5's relative position bias (Raffel et al., 2019), and the stack of sublayers."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.layer_norm import layer_norm
from lazyformer_fairseq.modules.networks.documents import Documents, PackedTokens
from lazyformer_fairseq.modules.networks.permuted import check_takes_permuted, check_turns, visibility_mask
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.sublayers.attention import AttentionSublayer
from lazyformer_fairseq.modules.sublayers.feed_forward import ResidualSublayer
from lazyformer_fairseq.modules.sublayers.interface import Context
from lazyformer_fairseq.patterns.attention_variants import GIVEN
from lazyformer_fairseq.patterns.kinds import ENCODER, EncoderSizes


def relative_position_bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Map relative positions to T5's bidirectional buckets.

    Each short distance has its own bucket. Longer distances share buckets, which widen logarithmically up to
    `max_distance`.

    Args:
        distance: an integer tensor of key positions minus query positions.
        num_buckets: the number of buckets, which must be even; the upper half is for positive distances.
        max_distance: the distance beyond which all distances share a bucket.

    Returns:
        An integer tensor of the same shape, with values in [0, num_buckets).
    """
    half = num_buckets // 2
    exact = half // 2
    magnitude = distance.abs()
    # The clamp keeps the unused branch of `where` from taking the logarithm of zero.
    logarithm = torch.log(magnitude.clamp(min=exact).float() / exact)
    steps = logarithm / math.log(max_distance / exact) * (half - exact)
    far = (exact + steps.long()).clamp(max=half - 1)
    return torch.where(magnitude < exact, magnitude, far) + half * (distance > 0)


class RelativePositionBias(nn.Module):
    """T5's relative position bias: a learned table indexed by bucket and head, shared by all self-attention sublayers.

    Args:
        num_heads: N.
        num_buckets: the number of rows in the table. It must be a multiple of 4, because each direction has an exact
            and a logarithmic half.
        max_distance: the distance beyond which all distances share a bucket.

    Raises:
        UserError: If the number of buckets is not a positive multiple of 4, or `max_distance` is too small for it.
    """

    def __init__(self, num_heads: int, num_buckets: int = 32, max_distance: int = 128):
        super().__init__()
        if num_buckets % 4 or not 0 < num_buckets // 4 < max_distance:
            raise UserError(
                f"relative position bias: cannot use {num_buckets} buckets for distances up to {max_distance}; the "
                "number of buckets must be a positive multiple of 4, and the distance must exceed a quarter of that"
            )
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.table = nn.Parameter(torch.zeros(num_buckets, num_heads))

    def forward(self, time: int) -> Scores:
        """Return the bias for sequences of `time` tokens, as a :class:`Scores` object."""
        distance = torch.arange(1 - time, time, device=self.table.device)
        bucket_by_distance = relative_position_bucket(distance, self.num_buckets, self.max_distance)
        return Scores(self.table, bucket_by_distance, self.max_distance)

    def for_positions(self, places_BT: Tensor, most: int) -> Tensor:
        """Return the bias (B, N, T, T) for every pair of tokens, given explicit positions.

        Args:
            places_BT: the position of each token.
            most: an exclusive upper bound on the positions.
        """
        distance = torch.arange(1 - most, most, device=self.table.device)
        by_distance_ND = self.table[relative_position_bucket(distance, self.num_buckets, self.max_distance)].t()
        ahead_BTT = places_BT[:, None, :] - places_BT[:, :, None]
        return by_distance_ND[:, ahead_BTT + most - 1].transpose(0, 1)


@dataclass(frozen=True)
class TokenInfo:
    """Optional information about the tokens of a batch in addition to their ids.

    Attributes:
        global_positions_BT: True at global tokens, such as the tokens of a question, which see all tokens and are seen
            by all. Required by patterns with ``global=given``.
        token_types_BT: the type of each token, int64, for models with token types; None for type 0 everywhere.
        documents: for each sequence, the lengths of its documents in tokens, without padding. A token then sees only
            its own document, and no outputs are computed for padding. None for one document per sequence.
        restart_positions: whether positions restart at 0 in each document instead of continuing through the
            sequence.
        positions_BT: the position of each permuted token in its text, int64; arbitrary at padding. T may exceed the
            model's `max_positions`.
        turns_B3T: the turns at which each permuted token sees and is seen (see :mod:`.permuted`), int64; padding is
            never seen.
        selected_M: the tokens to return features for, as int64 indices into the flattened batch, none of which are at
            padding; None for all tokens. Computations whose results no other token uses are then limited to these
            tokens.
    """

    global_positions_BT: Optional[Tensor] = None
    token_types_BT: Optional[Tensor] = None
    documents: Optional[Sequence[Sequence[int]]] = None
    restart_positions: bool = False
    positions_BT: Optional[Tensor] = None
    turns_B3T: Optional[Tensor] = None
    selected_M: Optional[Tensor] = None

    def moved(self, move: Callable[[Tensor], Tensor], places_of: Callable[[Tensor], Tensor]) -> "TokenInfo":
        """Return a copy for tokens that have been reordered.

        Args:
            move: a function that reorders a tensor (B, T, ...) in the same way as the tokens.
            places_of: a function that maps old token indices to new ones.
        """
        moved = self
        if self.selected_M is not None:
            moved = replace(moved, selected_M=places_of(self.selected_M))
        if self.global_positions_BT is not None:
            moved = replace(moved, global_positions_BT=move(self.global_positions_BT))
        if self.token_types_BT is not None:
            moved = replace(moved, token_types_BT=move(self.token_types_BT))
        return moved


class PaddingPermutation(NamedTuple):
    """A permutation that moves all padding to the end of each row, where it does not affect the tokens' positions.

    Attributes:
        to_BT: the new index of each token.
        from_BT: the old index of each token: first the text in its original order, then padding.
    """

    to_BT: Tensor
    from_BT: Tensor

    @classmethod
    def of(cls, padding_mask_BT: Tensor) -> "PaddingPermutation":
        """Build the permutation from a mask that is True at padding.

        The computation has no data-dependent control flow, so it can be part of a compiled or exported graph.
        """
        is_text = ~padding_mask_BT
        behind = is_text.sum(-1, keepdim=True) + padding_mask_BT.cumsum(-1)
        to_BT = torch.where(is_text, is_text.cumsum(-1), behind) - 1
        every_BT = torch.arange(to_BT.size(1), device=to_BT.device).expand_as(to_BT)
        return cls(to_BT, torch.empty_like(to_BT).scatter_(1, to_BT, every_BT))

    def move(self, x: Tensor) -> Tensor:
        """Reorder `x` (B, T, ...) so that the text comes first."""
        return _taken(x, self.from_BT, 1)

    def back(self, x: Tensor) -> Tensor:
        """Restore the original order of `x` (B, T, ...)."""
        return _taken(x, self.to_BT, 1)

    def places_of(self, places_M: Tensor) -> Tensor:
        """Map the tokens' old indices in the flattened batch to new ones."""
        starts_M = places_M - places_M % self.to_BT.size(1)
        return starts_M + self.to_BT.flatten()[places_M]

    def pairs_back(self, x_BNTK: Tensor, tokens: int) -> Tensor:
        """Restore the original order of query-key pairs (B, N, T, K).

        The first `tokens` keys are reordered; the remaining keys are not tokens and stay where they are.
        """
        of_tokens, others = _taken(x_BNTK, self.to_BT, 2).tensor_split((tokens,), -1)
        if tokens:
            return torch.cat([_taken(of_tokens, self.to_BT, 3), others], -1)
        return others


def _taken(x: Tensor, places_BT: Tensor, axis: int) -> Tensor:
    shape = [1] * x.dim()
    shape[0], shape[axis] = places_BT.shape
    return x.gather(axis, places_BT.view(shape).expand_as(x))


def is_padded_right(padding_mask_BT: Tensor) -> bool:
    """Return whether padding comes after the text in every row; synchronizes with the GPU."""
    return bool((padding_mask_BT[:, 1:] >= padding_mask_BT[:, :-1]).all())


class Encoder(Stack):
    """An encoder: token, position and type embeddings, T5's relative position bias, and the sublayers of a pattern.

    Post-norm encoders normalize the embeddings; pre-norm encoders normalize the output (as in fairseq's roberta and
    roberta_prenorm). With `embedding_norm`, pre-norm encoders also normalize the embeddings, instead of the first
    sublayer's input (ModernBERT, section 2.1.1).

    Args:
        pattern: see :class:`Stack`.
        vocab_size: V. None for an encoder without embeddings, which takes vectors as input and adds no positions.
        embed_dim: C.
        ffn_embed_dim: the hidden size of the feed-forward sublayers.
        num_heads: N, which must divide C.
        max_positions: the maximum sequence length in tokens.
        padding_idx: the id of the padding symbol.
        relative_position_buckets: the number of buckets of the relative position bias; 0 for no bias.
        relative_position_max_distance: the distance beyond which all distances share a bucket.
        token_types: the number of token types (segment embeddings in BERT, section 3.2); 0 for none.
        no_token_positional_embeddings: whether to omit the learned position embeddings; `max_positions` remains the
            maximum length.
        embedding_norm: whether to normalize the embeddings instead of the first sublayer's input; pre-norm only.
        options: further arguments of :class:`Stack`; `dropout` also applies to the embeddings.

    Raises:
        UserError: If an option is out of bounds or options conflict.
    """

    direction = ENCODER
    takes_permuted = True

    def __init__(  # noqa: PLR0913, PLR0917 - sizes
        self,
        pattern: str,
        vocab_size: Optional[int],
        embed_dim: int,
        ffn_embed_dim: int,
        num_heads: int,
        max_positions: int = 512,
        padding_idx: int = 1,
        relative_position_buckets: int = 32,
        relative_position_max_distance: int = 128,
        token_types: int = 0,
        no_token_positional_embeddings: bool = False,
        embedding_norm: bool = False,
        **options: Any,
    ):
        super().__init__(pattern, embed_dim, ffn_embed_dim, num_heads, max_positions=max_positions, **options)
        if token_types < 0:
            raise UserError(f"the number of token types must be 0 or more, not {token_types}")
        self.padding_idx = padding_idx
        self.max_positions = max_positions
        self.embed_tokens: Optional[nn.Embedding] = None
        if vocab_size is not None:
            self.embed_tokens = nn.Embedding(vocab_size, embed_dim, padding_idx)
            self.embed_positions: Optional[nn.Embedding] = None
            self.embed_token_types: Optional[nn.Embedding] = None
            if not no_token_positional_embeddings:
                self.embed_positions = nn.Embedding(max_positions, embed_dim)
            if token_types:
                self.embed_token_types = nn.Embedding(token_types, embed_dim)
        self.relative_position_bias: Optional[RelativePositionBias] = None
        if relative_position_buckets:
            bias = RelativePositionBias(num_heads, relative_position_buckets, relative_position_max_distance)
            self.relative_position_bias = bias
            self.features = frozenset({"bias"})
        self.sublayers = self.build_sublayers()
        if self.relative_position_bias is not None:
            # Unused weights must not require gradients: DDP waits for the gradient of every weight that requires one.
            self.relative_position_bias.requires_grad_(self.has_scores)
        self.embedding_layer_norm: Optional[nn.Module] = None
        self.final_layer_norm: Optional[nn.Module] = None
        if vocab_size and (embedding_norm or not self.normalize_before):
            self.embedding_layer_norm = layer_norm(embed_dim, *self.norm)
        if self.normalize_before:
            self.final_layer_norm = layer_norm(embed_dim, *self.norm)
        self.embedding_norm = embedding_norm
        if embedding_norm:
            remove_first_norm(self.sublayers, self.normalize_before)

    @property
    def sizes(self) -> EncoderSizes:
        """The network's sizes, for counting costs."""
        given: dict[str, Any] = {}
        vocab_size = 0
        if self.embed_tokens is not None:
            vocab_size = self.embed_tokens.num_embeddings
            given["no_token_positional_embeddings"] = self.embed_positions is None
            if self.embed_token_types is not None:
                given["token_types"] = self.embed_token_types.num_embeddings
        return EncoderSizes(
            vocab_size=vocab_size,
            embed_dim=self.embed_dim,
            ffn_embed_dim=self.options.ffn_embed_dim,
            num_heads=self.num_heads,
            max_positions=self.max_positions,
            relative_position_buckets=getattr(self.relative_position_bias, "num_buckets", 0),
            computes_all_tokens=self.reversible,
            **given,
            norm=self.norm.type,
            norm_bias=self.norm.has_bias,
            linear_bias=self.options.linear_bias,
        )

    def forward(
        self,
        tokens_BT: Tensor,
        padding_mask_BT: Optional[Tensor] = None,
        return_all: bool = False,
        is_padded_on_right: Optional[bool] = None,
        info: TokenInfo = TokenInfo(),
    ) -> tuple[Tensor, list[Tensor]]:
        """Encode a batch of sequences.

        Args:
            tokens_BT: ids or, if the encoder has no embeddings, vectors (B, T, C) for any T. Padding may be anywhere,
                and does not count as a position.
            padding_mask_BT: True at padding; None if there is no padding, which is cheaper.
            return_all: whether to also return the embeddings and the output of each sublayer.
            is_padded_on_right: whether all padding comes after the text. If False, padding is moved to the right and
                the outputs are moved back. None to detect it, which synchronizes with the GPU.
            info: further information about the tokens.

        Returns:
            Features (B, T, C), or (M, C) for the tokens in `info.selected_M`, and a list of intermediate states
            (B, T, C), which is empty unless `return_all`. With documents, features are zero at padding.

        Raises:
            ValueError: If a sequence or a position exceeds `max_positions`.
            UserError: If global positions are passed but no sublayer uses them, are missing but required, or are not a
                boolean mask (B, T); if token types are passed but the model has none; if document lengths do not match
                the text; or if tokens are permuted but a sublayer or the back end does not support it.
        """
        if info.turns_B3T is not None:
            return self._encode_permuted(tokens_BT, info, return_all)
        self._check_global_positions(info.global_positions_BT, tokens_BT)
        if info.documents is not None:
            is_right_on_gpu = is_padded_on_right and tokens_BT.device.type != "cpu"
            row = PackedTokens.of(
                info.documents,
                tokens_BT,
                None if is_right_on_gpu else padding_mask_BT,
                is_full=padding_mask_BT is None,
                begins_anew=info.restart_positions,
            )
            moved = info.moved(row.take, row.places_of)
            x, states = self._encode(row.take(tokens_BT), None, moved, return_all, row)
            if info.selected_M is None:
                x = row.spread(x)
            return x, [row.spread(state) for state in states]
        if padding_mask_BT is None:
            return self._encode(tokens_BT, None, info, return_all)
        if is_padded_on_right is None:
            is_padded_on_right = is_padded_right(padding_mask_BT)
        if is_padded_on_right:
            return self._encode(tokens_BT, padding_mask_BT, info, return_all)
        text = PaddingPermutation.of(padding_mask_BT)
        moved = info.moved(text.move, text.places_of)
        x, states = self._encode(text.move(tokens_BT), text.move(padding_mask_BT), moved, return_all)
        if info.selected_M is None:
            x = text.back(x)
        return x, [text.back(state) for state in states]

    def _encode(
        self,
        tokens_BT: Tensor,
        padding_mask_BT: Optional[Tensor],
        info: TokenInfo,
        return_all: bool,
        row: Optional[PackedTokens] = None,
    ) -> tuple[Tensor, list[Tensor]]:
        positions = None
        lengths = None
        if row is not None:
            positions = row.positions_S
            lengths = row.lengths
        x = tokens_BT
        if self.embed_tokens is not None:
            x = self.embed(tokens_BT, info.token_types_BT, positions)
        shared = self.context(x, 0, padding_mask_BT, info.global_positions_BT, lengths)
        return self._run(x, shared, return_all, info.selected_M)

    def _encode_permuted(
        self,
        tokens_BT: Tensor,
        info: TokenInfo,
        return_all: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        """Encode permuted tokens.

        In all sublayers, a term is added to each score in the same way as learned scores: the relative bias of the two
        tokens, or -inf if the query token does not see the key token.
        """
        check_takes_permuted(self, "turns")
        turns_B3T = info.turns_B3T
        positions_BT = info.positions_BT
        assert turns_B3T is not None, "permuted tokens have turns"
        check_turns(turns_B3T, positions_BT, tokens_BT.shape[:2], self.max_positions)
        assert positions_BT is not None, "check_turns rejects missing positions"
        x = tokens_BT
        if self.embed_tokens is not None:
            x = self.embed(tokens_BT, info.token_types_BT, info.positions_BT)
        if self.relative_position_bias is not None and self.has_scores:
            added = self.relative_position_bias.for_positions(positions_BT, self.max_positions).to(x.dtype)
        else:
            batch, time = x.shape[:2]
            added = x.new_zeros(()).expand(batch, self.num_heads, time, time)
        added = added.masked_fill(~visibility_mask(turns_B3T)[:, None], float("-inf"))
        shape = Scores(learned_BNTK=added, places_BT=info.positions_BT)
        return self._run(x, Context(shape, self.back_end()), return_all, info.selected_M)

    def _run(
        self,
        x_BTC: Tensor,
        shared: Context,
        return_all: bool,
        selected_M: Optional[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        output = self.run(x_BTC, shared, return_all, selected_M=selected_M)
        x = output.x_BTC
        if selected_M is not None:
            x = x[0]
        if self.final_layer_norm is not None:
            x = self.final_layer_norm(x)
        return x, output.states

    def embed(
        self,
        tokens_BT: Tensor,
        token_types_BT: Optional[Tensor] = None,
        positions: Optional[Union[np.ndarray, Tensor]] = None,
    ) -> Tensor:
        """Return the input (B, T, C) of the first sublayer.

        Args:
            tokens_BT: ids, or token embeddings (B, T, C).
            token_types_BT: the type of each token; None for type 0 everywhere.
            positions: the tokens' positions, either as an array (T,) or as a tensor (B, T) whose values the caller must
                check. By default, each token's index in its sequence.

        Raises:
            ValueError: If T or a position in an array exceeds `max_positions`.
            UserError: If token types are passed but the model has none.
        """
        time = tokens_BT.size(1)
        if isinstance(positions, np.ndarray):
            time = int(positions.max()) + 1
        if time > self.max_positions and not isinstance(positions, Tensor):
            raise ValueError(
                f"a sequence of {time} tokens is longer than the model's {self.max_positions} positions; shorten the "
                "sequence, or train a model with a larger --max-positions"
            )
        x = tokens_BT
        if not tokens_BT.is_floating_point():
            assert self.embed_tokens is not None, "an encoder without embeddings takes vectors"
            x = self.embed_tokens(tokens_BT)
        if self.embed_positions is not None:
            if isinstance(positions, np.ndarray):
                positions = torch.from_numpy(positions).to(tokens_BT.device)
            elif positions is None:
                positions = torch.arange(time, device=x.device)
            x = x + self.embed_positions(positions)
        if self.embed_token_types is not None:
            if token_types_BT is None:
                token_types_BT = torch.zeros(1, dtype=torch.long, device=x.device)
            x = x + self.embed_token_types(token_types_BT)
        elif token_types_BT is not None:
            raise UserError(
                "token types were passed, but the model has none; omit them, or train a model with --token-types 2"
            )
        if self.embedding_layer_norm is not None:
            x = self.embedding_layer_norm(x)
        return F.dropout(x, self.dropout, self.training)

    @property
    def sublayers_with_given_global(self) -> list[str]:
        """The sublayers with ``global=given``, as written in the pattern."""
        return [planned.text for planned in self.plan if planned.values.get("global") == GIVEN]

    def _check_global_positions(self, given_BT: Optional[Tensor], tokens_BT: Tensor) -> None:
        asking = self.sublayers_with_given_global
        if given_BT is None and asking:
            raise UserError(
                f"{asking[0]} needs to know which tokens are global: pass global_positions, a mask with the same shape "
                "as the tokens, or use global=1, which has the same weights and makes each text's first token global"
            )
        if given_BT is None:
            return
        if not asking:
            raise UserError(
                "global_positions was passed, but no sublayer of the pattern has global=given; omit "
                "global_positions, or use a pattern with global=given"
            )
        if given_BT.dtype != torch.bool or given_BT.shape != tokens_BT.shape[:2]:
            raise UserError(
                f"global_positions is {given_BT.dtype} {tuple(given_BT.shape)}, but must be torch.bool "
                f"{tuple(tokens_BT.shape[:2])}"
            )

    def context(
        self,
        x_BTC: Tensor,
        memory_length: int = 0,  # noqa: ARG002 - an encoder has none
        padding_mask_BT: Optional[Tensor] = None,
        global_positions_BT: Optional[Tensor] = None,
        lengths: Optional[np.ndarray] = None,
    ) -> Context:
        """Return the context of a forward pass.

        Args:
            x_BTC: the input of the first sublayer.
            memory_length: not used, because an encoder has no memory.
            padding_mask_BT: True at padding; None if there is none.
            global_positions_BT: True at global tokens; None if there are none.
            lengths: the lengths of the documents packed into a row (1, S, C); None if `x_BTC` contains sequences.
        """
        if lengths is None:
            shape = self._scores(x_BTC.size(1), padding_mask_BT, global_positions_BT)
            return Context(shape, self.back_end())
        documents = Documents(lengths, self.embed_dim, x_BTC.device)
        given = documents.split(global_positions_BT)
        documents.scores = [
            self._scores(group.width, group.is_padding_DW, _mask_out_padding(given_DW, group.is_padding_DW))
            for group, given_DW in zip(documents.groups, given, strict=True)
        ]
        return Context(Scores(), self.back_end(), documents=documents)

    def _scores(self, time: int, padding_mask_BT: Optional[Tensor], global_positions_BT: Optional[Tensor]) -> Scores:
        shape = Scores()
        if self.relative_position_bias and self.has_scores:
            shape = self.relative_position_bias(time)
        if padding_mask_BT is not None:
            shape = shape.with_padding(padding_mask_BT)
        if global_positions_BT is None:
            return shape
        return shape.with_given(global_positions_BT)


def _mask_out_padding(given: Optional[Tensor], is_padding: Optional[Tensor]) -> Optional[Tensor]:
    if given is None or is_padding is None:
        return given
    return given & ~is_padding


def remove_first_norm(sublayers: Iterable[nn.Module], normalize_before: bool) -> None:
    """Remove the norm of the first sublayer that has one, because the embeddings are normalized instead.

    Raises:
        UserError: If the sublayers are post-norm.
    """
    if not normalize_before:
        raise UserError(
            "--embedding-norm requires --encoder-normalize-before; post-norm encoders always normalize the embeddings"
        )
    first = next((each for each in sublayers if isinstance(each, ResidualSublayer)), None)
    if first is not None:
        first.layer_norm = nn.Identity()


def init_bert_weights(module: nn.Module) -> None:
    """Initialize a module as in BERT; call it as ``network.apply(init_bert_weights)``.

    | parameters | initial values |
    |---|---|
    | weights of linear layers and embeddings | N(0, 0.02) |
    | biases of linear layers, the padding symbol's embedding, the relative bias's table | 0 |
    | LayerNorm | weight 1, bias 0 (torch's default) |
    | projections for global tokens | copies of the regular projections |
    """
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        nn.init.zeros_(module.weight[module.padding_idx])
    if isinstance(module, RelativePositionBias):
        nn.init.zeros_(module.table)
    if isinstance(module, AttentionSublayer):
        module.initialize_copies()


LOCAL_HEAD_DISTANCES = (-1, 1, -2, 2)  # distance to the key that each of the first four heads favors
LOCAL_HEAD_BIAS = 6.0  # added to the favored key's score, which multiplies its weight by 403


@torch.no_grad()
def apply_optional_init(encoder: Encoder, local_heads: bool, zero_last_maps: bool) -> None:
    """Apply optional initialization schemes after :func:`init_bert_weights`.

    Args:
        encoder: the encoder, which is modified in place.
        local_heads: whether the first four heads of T5's table each favor one of the distances -1, 1, -2 and 2.
            Attention then does not have to learn where the neighbors are. This initialization is our own. The
            motivation is that slow learning of attention maps keeps the loss on its first plateau (Gopalani and Hu,
            2025, arXiv 2506.13688).
        zero_last_maps: whether sublayers initially add nothing to the residual stream (Fixup, Zhang et al., 2019, arXiv
            1901.09321). ReZero (Bachlechner et al., 2020, arXiv 2003.04887) uses zero-initialized gates instead.

    Raises:
        UserError: If the encoder has no relative bias, if it has too few buckets for each of these distances to have a
            separate one, or if a sublayer's class does not define its last linear layer.
    """
    if local_heads:
        bias = encoder.relative_position_bias
        distances = torch.tensor(LOCAL_HEAD_DISTANCES[: encoder.num_heads])
        if bias is None or bias.num_buckets // 4 <= max(LOCAL_HEAD_DISTANCES):
            raise UserError("--local-heads requires --relative-position-buckets 12 or more")
        buckets = relative_position_bucket(distances, bias.num_buckets, bias.max_distance)
        bias.table[buckets, torch.arange(len(distances))] = LOCAL_HEAD_BIAS
    if not zero_last_maps:
        return
    for sublayer in encoder.sublayers:
        if isinstance(sublayer, ResidualSublayer):
            for weight in sublayer.inner.last_map().parameters():
                weight.zero_()
