"""The encoder: embeddings, T5's relative position bias (Raffel et al., 2019), then the stack of the pattern."""

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
from lazyformer_fairseq.modules.networks.documents import Documents, TextInARow
from lazyformer_fairseq.modules.networks.permuted import check_takes_permuted, check_turns, sees
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.sublayers.attention import AttentionSublayer
from lazyformer_fairseq.modules.sublayers.feed_forward import ResidualSublayer
from lazyformer_fairseq.modules.sublayers.interface import Context
from lazyformer_fairseq.patterns.attention_variants import GIVEN
from lazyformer_fairseq.patterns.kinds import ENCODER, EncoderSizes


def relative_position_bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return T5's bidirectional buckets: one each for short distances, logarithmically wider up to `max_distance`.

    Args:
        distance: integer tensor of (key position - query position).
        num_buckets: even; the upper half serves positive distances.
        max_distance: all distances from here on share a bucket.

    Returns:
        Integer tensor of the same shape with values in [0, num_buckets).
    """
    half = num_buckets // 2
    exact = half // 2
    magnitude = distance.abs()
    # clamp from below, so that the unused branch of `where` never takes the logarithm of zero
    steps = torch.log(magnitude.clamp(min=exact).float() / exact) / math.log(max_distance / exact) * (half - exact)
    far = (exact + steps.long()).clamp(max=half - 1)
    return torch.where(magnitude < exact, magnitude, far) + half * (distance > 0)


class RelativePositionBias(nn.Module):
    """Table of biases by bucket and head, shared by all self-attention sublayers.

    Args:
        num_heads: N.
        num_buckets: rows of the table; a multiple of 4, for two directions with exact and logarithmic halves.
        max_distance: see :func:`relative_position_bucket`.
    """

    def __init__(self, num_heads: int, num_buckets: int = 32, max_distance: int = 128):
        super().__init__()
        if num_buckets % 4 or not 0 < num_buckets // 4 < max_distance:
            raise UserError(
                f"relative position bias: {num_buckets} buckets for distances to {max_distance}; "
                "needs a positive multiple of 4 and a distance beyond a quarter of it"
            )
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.table = nn.Parameter(torch.zeros(num_buckets, num_heads))

    def forward(self, time: int) -> Scores:
        """Return the bias for sequences of `time` tokens."""
        distance = torch.arange(1 - time, time, device=self.table.device)
        bucket_by_distance = relative_position_bucket(distance, self.num_buckets, self.max_distance)
        return Scores(self.table, bucket_by_distance, self.max_distance)

    def of_places(self, places_BT: Tensor, most: int) -> Tensor:
        """Return the bias (B, N, T, T) of each pair of tokens that stand at these places, all below `most`."""
        distance = torch.arange(1 - most, most, device=self.table.device)
        by_distance_ND = self.table[relative_position_bucket(distance, self.num_buckets, self.max_distance)].t()
        ahead_BTT = places_BT[:, None, :] - places_BT[:, :, None]
        return by_distance_ND[:, ahead_BTT + most - 1].transpose(0, 1)


@dataclass(frozen=True)
class TokenInfo:
    """Facts about the tokens of a batch besides their ids, and which of them the caller wants.

    Attributes:
        global_positions_BT: True at tokens that see and are seen by all, such as those of a question; for patterns with
            ``global=given``, which need it.
        token_types_BT: the type of each token, int64, for models with token types; None for type 0 everywhere.
        documents: for each sequence the lengths of its documents, padding apart: a token sees its own document alone,
            and padding is not computed. None for one document per sequence.
        positions_begin_anew: whether the positions of each document begin anew; else those of its sequence go on.
        positions_BT: the position of each permuted token in its text, int64; padding has any. T may be more than the
            model's `max_positions`.
        turns_B3T: when each permuted token sees others and is seen (:mod:`.permuted`), int64; padding never is.
        wanted_M: places among the B * T of tokens whose features alone are wanted, int64, none of them padding; None
            for all. What no other token reads is then computed for these alone.
    """

    global_positions_BT: Optional[Tensor] = None
    token_types_BT: Optional[Tensor] = None
    documents: Optional[Sequence[Sequence[int]]] = None
    positions_begin_anew: bool = False
    positions_BT: Optional[Tensor] = None
    turns_B3T: Optional[Tensor] = None
    wanted_M: Optional[Tensor] = None

    def moved(self, move: Callable[[Tensor], Tensor], places_of: Callable[[Tensor], Tensor]) -> "TokenInfo":
        """Return the same where `move` puts the tokens in other places: those that `places_of` returns."""
        moved = self
        if self.wanted_M is not None:
            moved = replace(moved, wanted_M=places_of(self.wanted_M))
        if self.global_positions_BT is not None:
            moved = replace(moved, global_positions_BT=move(self.global_positions_BT))
        if self.token_types_BT is not None:
            moved = replace(moved, token_types_BT=move(self.token_types_BT))
        return moved


class TextFirst(NamedTuple):
    """Places of tokens with all padding last, where it counts for nothing, whatever places a sublayer counts by.

    Attributes:
        to_BT: the place that each token goes to.
        from_BT: the place that each comes from: text in its order, then padding.
    """

    to_BT: Tensor
    from_BT: Tensor

    @classmethod
    def of(cls, padding_mask_BT: Tensor) -> "TextFirst":
        """Return the places by a mask, True at padding; for any mask, so that it can stand in a graph."""
        is_text = ~padding_mask_BT
        behind = is_text.sum(-1, keepdim=True) + padding_mask_BT.cumsum(-1)
        to_BT = torch.where(is_text, is_text.cumsum(-1), behind) - 1
        every_BT = torch.arange(to_BT.size(1), device=to_BT.device).expand_as(to_BT)
        return cls(to_BT, torch.empty_like(to_BT).scatter_(1, to_BT, every_BT))

    def move(self, x: Tensor) -> Tensor:
        """Return (B, T, ...) with text first."""
        return _taken(x, self.from_BT, 1)

    def back(self, x: Tensor) -> Tensor:
        """Return (B, T, ...) in its own order."""
        return _taken(x, self.to_BT, 1)

    def places_of(self, places_M: Tensor) -> Tensor:
        """Return where tokens at these places among the B * T go, likewise among all of them."""
        starts_M = places_M - places_M % self.to_BT.size(1)
        return starts_M + self.to_BT.flatten()[places_M]

    def pairs_back(self, x_BNTK: Tensor, tokens: int) -> Tensor:
        """Return (B, N, T, K) in its own order; keys behind so many, which are no tokens, stay there."""
        of_tokens, others = _taken(x_BNTK, self.to_BT, 2).tensor_split((tokens,), -1)
        if tokens:
            return torch.cat([_taken(of_tokens, self.to_BT, 3), others], -1)
        return others


def _taken(x: Tensor, places_BT: Tensor, axis: int) -> Tensor:
    shape = [1] * x.dim()
    shape[0], shape[axis] = places_BT.shape
    return x.gather(axis, places_BT.view(shape).expand_as(x))


def is_padded_right(padding_mask_BT: Tensor) -> bool:
    """Return whether text comes first in every row; waits for a GPU."""
    return bool((padding_mask_BT[:, 1:] >= padding_mask_BT[:, :-1]).all())


class Encoder(Stack):
    """Token, learned absolute position and token type embeddings, T5's relative bias, the sublayers of a pattern.

    Post-norm encoders normalise the embeddings, pre-norm ones the output (as fairseq's roberta and roberta_prenorm).
    With `embedding_norm` these normalise embeddings in place of the first sublayer's input (ModernBERT, 2.1.1).

    Args:
        pattern, embed_dim, ffn_embed_dim, num_heads, options: of the :class:`Stack`; dropout acts on embeddings too.
        vocab_size: V; None for the blocks alone, which take embeddings and add no positions to them.
        max_positions: longest sequence.
        padding_idx: id of the padding symbol.
        relative_position_buckets: buckets of the relative bias; 0 for none.
        relative_position_max_distance: from this one on, all distances share a bucket.
        token_types: rows of the table of token types (BERT, section 3.2: which of two texts); 0 for none.
        no_token_positional_embeddings: no learned positions; `max_positions` still is the longest sequence.
        embedding_norm: of pre-norm encoders, moves the first sublayer's norm from its input to the embeddings.

    Raises:
        ValueError: as :class:`Stack` does.
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
            raise UserError(f"{token_types} token types: must be 0 or more")
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
            # What nothing reads needs no gradient: on several GPUs DDP waits for one of every weight that requires it.
            self.relative_position_bias.requires_grad_(self.has_scores)
        self.embedding_layer_norm: Optional[nn.Module] = None
        self.final_layer_norm: Optional[nn.Module] = None
        if vocab_size and (embedding_norm or not self.normalize_before):
            self.embedding_layer_norm = layer_norm(embed_dim, *self.norm)
        if self.normalize_before:
            self.final_layer_norm = layer_norm(embed_dim, *self.norm)
        self.embedding_norm = embedding_norm
        if embedding_norm:
            leave_out_first_norm(self.sublayers, self.normalize_before)

    @property
    def sizes(self) -> EncoderSizes:
        """Sizes, for counting costs."""
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
        """Encode sequences.

        Args:
            tokens_BT: ids; for the blocks alone embeddings (B, T, C), of any length. Padding may stand anywhere: it
                takes no position.
            padding_mask_BT: True at padding; None where there is none, which is cheaper.
            return_all: also return the embeddings and the output of each sublayer.
            is_padded_on_right: whether all padding comes after the text; else text is moved there and back. None to
                look, which waits for a GPU.
            info: what else is known of the tokens.

        Returns:
            Features (B, T, C), or (M, C) of the tokens that `info` wants, and the list of intermediate (B, T, C) (empty
            unless `return_all`). Zeros at padding with documents.

        Raises:
            ValueError: as :meth:`embed`.
            UserError: global positions where no sublayer asks for them, none where one does, or others than (B, T)
                booleans; token types where the model has none; documents of other lengths than the text; permuted
                tokens where a sublayer or the back end cannot take them.
        """
        if info.turns_B3T is not None:
            return self._encode_permuted(tokens_BT, info, return_all)
        self._check_global_positions(info.global_positions_BT, tokens_BT)
        if info.documents is not None:
            is_right_on_gpu = is_padded_on_right and tokens_BT.device.type != "cpu"
            row = TextInARow.of(
                info.documents,
                tokens_BT,
                None if is_right_on_gpu else padding_mask_BT,
                is_full=padding_mask_BT is None,
                begins_anew=info.positions_begin_anew,
            )
            moved = info.moved(row.take, row.places_of)
            x, states = self._encode(row.take(tokens_BT), None, moved, return_all, row)
            if info.wanted_M is None:
                x = row.spread(x)
            return x, [row.spread(state) for state in states]
        if padding_mask_BT is None:
            return self._encode(tokens_BT, None, info, return_all)
        if is_padded_on_right is None:
            is_padded_on_right = is_padded_right(padding_mask_BT)
        if is_padded_on_right:
            return self._encode(tokens_BT, padding_mask_BT, info, return_all)
        text = TextFirst.of(padding_mask_BT)
        moved = info.moved(text.move, text.places_of)
        x, states = self._encode(text.move(tokens_BT), text.move(padding_mask_BT), moved, return_all)
        if info.wanted_M is None:
            x = text.back(x)
        return x, [text.back(state) for state in states]

    def _encode(
        self,
        tokens_BT: Tensor,
        padding_mask_BT: Optional[Tensor],
        info: TokenInfo,
        return_all: bool,
        row: Optional[TextInARow] = None,
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
        return self._run(x, shared, return_all, info.wanted_M)

    def _encode_permuted(
        self,
        tokens_BT: Tensor,
        info: TokenInfo,
        return_all: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        """Add the bias of each pair, -inf where a token does not see another, to all scores, as learned ones are."""
        check_takes_permuted(self, "turns")
        turns_B3T = info.turns_B3T
        positions_BT = info.positions_BT
        assert turns_B3T is not None, "permuted tokens have turns"
        check_turns(turns_B3T, positions_BT, tokens_BT.shape[:2], self.max_positions)
        assert positions_BT is not None, "and positions, as was checked"
        x = tokens_BT
        if self.embed_tokens is not None:
            x = self.embed(tokens_BT, info.token_types_BT, info.positions_BT)
        if self.relative_position_bias is not None and self.has_scores:
            added = self.relative_position_bias.of_places(positions_BT, self.max_positions).to(x.dtype)
        else:
            added = x.new_zeros(()).expand(len(x), self.num_heads, x.size(1), x.size(1))
        added = added.masked_fill(~sees(turns_B3T)[:, None], float("-inf"))
        shape = Scores(learned_BNTK=added, places_BT=info.positions_BT)
        return self._run(x, Context(shape, self.back_end()), return_all, info.wanted_M)

    def _run(
        self,
        x_BTC: Tensor,
        shared: Context,
        return_all: bool,
        wanted_M: Optional[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        output = self.run(x_BTC, shared, return_all, wanted_M=wanted_M)
        x = output.x_BTC
        if wanted_M is not None:
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
            tokens_BT: ids, or embeddings of words (B, T, C).
            token_types_BT: the type of each token; None for type 0 everywhere.
            positions: of the tokens, (T,) or as a tensor (B, T), whose bounds the caller checks; by default their
                places.

        Raises:
            ValueError: where the positions, or T, exceed `max_positions`.
            UserError: token types where the model has none.
        """
        time = tokens_BT.size(1)
        if isinstance(positions, np.ndarray):
            time = int(positions.max()) + 1
        if time > self.max_positions and not isinstance(positions, Tensor):
            raise ValueError(f"a sequence of {time} tokens is longer than the model's {self.max_positions} positions")
        x = tokens_BT
        if not tokens_BT.is_floating_point():
            assert self.embed_tokens is not None, "blocks alone take embeddings"
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
            raise UserError("token types are given, but the model has none (--token-types)")
        if self.embedding_layer_norm is not None:
            x = self.embedding_layer_norm(x)
        return F.dropout(x, self.dropout, self.training)

    @property
    def asking(self) -> list[str]:
        """Sublayers that see tokens that the caller marks, as the pattern has them."""
        return [planned.text for planned in self.plan if planned.values.get("global") == GIVEN]

    def _check_global_positions(self, given_BT: Optional[Tensor], tokens_BT: Tensor) -> None:
        asking = self.asking
        if given_BT is None and asking:
            raise UserError(
                f"{asking[0]} sees and shows tokens that the caller marks: pass global_positions, a mask of the shape "
                "of the tokens; or write global=1, whose weights are the same, for the first token of each text"
            )
        if given_BT is None:
            return
        if not asking:
            raise UserError("global_positions are given, but no sublayer of the pattern has global=given")
        if given_BT.dtype != torch.bool or given_BT.shape != tokens_BT.shape[:2]:
            raise UserError(
                f"global_positions is {given_BT.dtype} {tuple(given_BT.shape)}, must be torch.bool "
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
        """Return the context of sequences; with `lengths`, that of documents in a row, (1, S, C)."""
        if lengths is None:
            shape = self._scores(x_BTC.size(1), padding_mask_BT, global_positions_BT)
            return Context(shape, self.back_end())
        documents = Documents(lengths, self.embed_dim, x_BTC.device)
        given = documents.split(global_positions_BT)
        documents.scores = [
            self._scores(group.width, group.is_padding_DW, _unless_padding(given_DW, group.is_padding_DW))
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


def _unless_padding(given: Optional[Tensor], is_padding: Optional[Tensor]) -> Optional[Tensor]:
    if given is None or is_padding is None:
        return given
    return given & ~is_padding


def leave_out_first_norm(sublayers: Iterable[nn.Module], normalize_before: bool) -> None:
    """Replace the norm of the first sublayer that has one by an identity: the embeddings have it.

    Raises:
        UserError: sublayers are post-norm.
    """
    if not normalize_before:
        raise UserError("--embedding-norm: needs --encoder-normalize-before; post-norm normalises embeddings anyway")
    first = next((each for each in sublayers if isinstance(each, ResidualSublayer)), None)
    if first is not None:
        first.layer_norm = nn.Identity()


def init_bert_weights(module: nn.Module) -> None:
    """Initialise as BERT does, for ``module.apply``.

    | parameter | value |
    |---|---|
    | weights of linear maps and embeddings | N(0, 0.02) |
    | their biases, the padding symbol's embedding, the relative bias table | 0 |
    | LayerNorm | weight 1, bias 0 (torch's own) |
    | projections of global tokens | copies of the others |
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
        module.start_copies()


LOCAL = (-1, 1, -2, 2)  # distances of keys
FAVOUR = 6.0  # added to a score: a weight of 403 to 1


@torch.no_grad()
def start_as_asked(encoder: Encoder, local_heads: bool, zero_last_maps: bool) -> None:
    """Set values that some models start with in place of :func:`init_bert_weights`'s.

    Args:
        encoder: to change in place.
        local_heads: T5's table favours the distances -1, 1, -2 and 2, one in each of the first four heads, so that
            attention need not find out first where neighbours are (ours; that attention maps are learned slowly is
            what holds a loss on its first plateau: Gopalani and Hu, 2025, arXiv 2506.13688).
        zero_last_maps: each sublayer adds nothing to the stream at first (Fixup, Zhang et al., 2019, arXiv 1901.09321;
            ReZero, Bachlechner et al., 2020, arXiv 2003.04887, has a gate that is zero for it).

    Raises:
        UserError: there is no such table or it has no bucket for each of these distances, or a sublayer does not say
            which map is its last.
    """
    if local_heads:
        bias = encoder.relative_position_bias
        distances = torch.tensor(LOCAL[: encoder.num_heads])
        if bias is None or bias.num_buckets // 4 <= max(LOCAL):
            raise UserError("--local-heads: needs --relative-position-buckets 12 or more")
        buckets = relative_position_bucket(distances, bias.num_buckets, bias.max_distance)
        bias.table[buckets, torch.arange(len(distances))] = FAVOUR
    if not zero_last_maps:
        return
    for sublayer in encoder.sublayers:
        if isinstance(sublayer, ResidualSublayer):
            for weight in sublayer.inner.last_map().parameters():
                weight.zero_()
