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
from lazyformer_fairseq.modules.networks.documents import Documents, TextInARow
from lazyformer_fairseq.modules.networks.permuted import check_takes_permuted, check_turns, sees
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.sublayers.attention import AttentionSublayer
from lazyformer_fairseq.modules.sublayers.feed_forward import ResidualSublayer
from lazyformer_fairseq.modules.sublayers.interface import Context
from lazyformer_fairseq.patterns.attention_variants import GIVEN
from lazyformer_fairseq.patterns.kinds import ENCODER, EncoderSizes


def relative_position_bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return T5's bidirectional buckets of relative positions.

    Short distances have a bucket each. Longer ones share buckets whose width grows logarithmically up to
    `max_distance`.

    Args:
        distance: an integer tensor of key position minus query position.
        num_buckets: the number of buckets, which must be even; the upper half serves positive distances.
        max_distance: the distance from which all share a bucket.

    Returns:
        An integer tensor of the same shape with values in [0, num_buckets).
    """
    half = num_buckets // 2
    exact = half // 2
    magnitude = distance.abs()
    # The clamp keeps the unused branch of `where` from taking the logarithm of zero.
    steps = torch.log(magnitude.clamp(min=exact).float() / exact) / math.log(max_distance / exact) * (half - exact)
    far = (exact + steps.long()).clamp(max=half - 1)
    return torch.where(magnitude < exact, magnitude, far) + half * (distance > 0)


class RelativePositionBias(nn.Module):
    """T5's relative position bias: a learned table by bucket and head, shared by all self-attention sublayers.

    Args:
        num_heads: N.
        num_buckets: the number of rows of the table. It must be a multiple of 4, because each of the two directions has
            an exact and a logarithmic half.
        max_distance: the distance from which all share a bucket.

    Raises:
        UserError: the number of buckets is no positive multiple of 4, or `max_distance` is too small for it.
    """

    def __init__(self, num_heads: int, num_buckets: int = 32, max_distance: int = 128):
        super().__init__()
        if num_buckets % 4 or not 0 < num_buckets // 4 < max_distance:
            raise UserError(
                f"relative position bias: {num_buckets} buckets for distances up to {max_distance} are not possible; "
                "the number of buckets must be a positive multiple of 4, and the distance more than a quarter of it"
            )
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.table = nn.Parameter(torch.zeros(num_buckets, num_heads))

    def forward(self, time: int) -> Scores:
        """Return the bias for sequences of `time` tokens, as :class:`Scores`."""
        distance = torch.arange(1 - time, time, device=self.table.device)
        bucket_by_distance = relative_position_bucket(distance, self.num_buckets, self.max_distance)
        return Scores(self.table, bucket_by_distance, self.max_distance)

    def of_places(self, places_BT: Tensor, most: int) -> Tensor:
        """Return the bias (B, N, T, T) of each pair of tokens with explicit positions.

        Args:
            places_BT: the position of each token.
            most: a number greater than all positions.
        """
        distance = torch.arange(1 - most, most, device=self.table.device)
        by_distance_ND = self.table[relative_position_bucket(distance, self.num_buckets, self.max_distance)].t()
        ahead_BTT = places_BT[:, None, :] - places_BT[:, :, None]
        return by_distance_ND[:, ahead_BTT + most - 1].transpose(0, 1)


@dataclass(frozen=True)
class TokenInfo:
    """Information about the tokens of a batch besides their ids, and the tokens whose features the caller wants.

    Attributes:
        global_positions_BT: True at global tokens, which see all and are seen by all, such as those of a question.
            Patterns with ``global=given`` require it.
        token_types_BT: the type of each token, int64, for models with token types; None for type 0 everywhere.
        documents: for each sequence, the lengths of its documents in tokens, without padding. A token then sees only
            its own document, and padding is not computed. None for one document per sequence.
        positions_begin_anew: whether the positions of each document start at 0, instead of continuing through the
            sequence.
        positions_BT: the position of each permuted token in its text, int64; arbitrary at padding. T may exceed the
            model's `max_positions`.
        turns_B3T: when each permuted token sees others and is seen (:mod:`.permuted`), int64; padding is never seen.
        wanted_M: the indices, among the B * T tokens, of those whose features are wanted, int64, without padding; None
            for all. Whatever no other token reads is then computed only for these.
    """

    global_positions_BT: Optional[Tensor] = None
    token_types_BT: Optional[Tensor] = None
    documents: Optional[Sequence[Sequence[int]]] = None
    positions_begin_anew: bool = False
    positions_BT: Optional[Tensor] = None
    turns_B3T: Optional[Tensor] = None
    wanted_M: Optional[Tensor] = None

    def moved(self, move: Callable[[Tensor], Tensor], places_of: Callable[[Tensor], Tensor]) -> "TokenInfo":
        """Return a copy for tokens that have been moved.

        Args:
            move: moves a tensor (B, T, ...) as the tokens have been moved.
            places_of: maps old indices of tokens to new ones.
        """
        moved = self
        if self.wanted_M is not None:
            moved = replace(moved, wanted_M=places_of(self.wanted_M))
        if self.global_positions_BT is not None:
            moved = replace(moved, global_positions_BT=move(self.global_positions_BT))
        if self.token_types_BT is not None:
            moved = replace(moved, token_types_BT=move(self.token_types_BT))
        return moved


class TextFirst(NamedTuple):
    """A permutation that moves all padding behind the text, where it does not affect the positions of the text.

    Attributes:
        to_BT: the place to which each token goes.
        from_BT: the place from which each token comes: first the text in its order, then padding.
    """

    to_BT: Tensor
    from_BT: Tensor

    @classmethod
    def of(cls, padding_mask_BT: Tensor) -> "TextFirst":
        """Return the permutation for a mask that is True at padding.

        The computation is the same for any mask, so it can be part of a compiled or exported graph.
        """
        is_text = ~padding_mask_BT
        behind = is_text.sum(-1, keepdim=True) + padding_mask_BT.cumsum(-1)
        to_BT = torch.where(is_text, is_text.cumsum(-1), behind) - 1
        every_BT = torch.arange(to_BT.size(1), device=to_BT.device).expand_as(to_BT)
        return cls(to_BT, torch.empty_like(to_BT).scatter_(1, to_BT, every_BT))

    def move(self, x: Tensor) -> Tensor:
        """Return `x` (B, T, ...) with the text first."""
        return _taken(x, self.from_BT, 1)

    def back(self, x: Tensor) -> Tensor:
        """Return `x` (B, T, ...) in its original order."""
        return _taken(x, self.to_BT, 1)

    def places_of(self, places_M: Tensor) -> Tensor:
        """Return the new indices among the B * T tokens of tokens with these old indices."""
        starts_M = places_M - places_M % self.to_BT.size(1)
        return starts_M + self.to_BT.flatten()[places_M]

    def pairs_back(self, x_BNTK: Tensor, tokens: int) -> Tensor:
        """Return pairs of query and key (B, N, T, K) in their original order.

        The first `tokens` keys are moved; further keys, which belong to no tokens, stay in place.
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
    """Return whether padding comes after the text in every row; waits for a GPU."""
    return bool((padding_mask_BT[:, 1:] >= padding_mask_BT[:, :-1]).all())


class Encoder(Stack):
    """An encoder: embeddings of tokens, positions and token types, T5's relative bias, and the sublayers of a pattern.

    Post-norm encoders normalise the embeddings; pre-norm encoders normalise the output (as fairseq's roberta and
    roberta_prenorm do). With `embedding_norm`, pre-norm encoders also normalise the embeddings, in place of the input
    of the first sublayer (ModernBERT, section 2.1.1).

    Args:
        pattern: see :class:`Stack`.
        vocab_size: V. None for an encoder without embeddings, which takes vectors as input and adds no positions.
        embed_dim: C.
        ffn_embed_dim: the hidden size of feed-forward sublayers.
        num_heads: N, which must divide C.
        max_positions: the longest sequence in tokens.
        padding_idx: the id of the padding symbol.
        relative_position_buckets: the number of buckets of the relative bias; 0 for no bias.
        relative_position_max_distance: the distance from which all share a bucket.
        token_types: the number of token types (BERT, section 3.2: which of two texts a token belongs to); 0 for none.
        no_token_positional_embeddings: whether to leave out learned positions; `max_positions` remains the longest
            sequence.
        embedding_norm: whether to move the norm of the first sublayer's input to the embeddings; pre-norm only.
        options: further arguments of :class:`Stack`; `dropout` also applies to the embeddings.

    Raises:
        UserError: an option is out of bounds, or options contradict each other.
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
            # A weight that nothing reads must not require a gradient: DDP waits for the gradients of all that do.
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
        """The sizes of the network, for counting costs."""
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
            tokens_BT: ids, or vectors (B, T, C) of any length if the encoder has no embeddings. Padding may be
                anywhere; it takes no position.
            padding_mask_BT: True at padding; None if there is none, which is cheaper.
            return_all: whether to return the embeddings and the output of each sublayer too.
            is_padded_on_right: whether all padding comes after the text. If not, padding is moved there, and the
                outputs are moved back. None to find out, which waits for a GPU.
            info: further information about the tokens.

        Returns:
            Features (B, T, C), or (M, C) of the tokens that `info` wants, and a list of intermediate states (B, T, C),
            which is empty unless `return_all`. With documents, features are zero at padding.

        Raises:
            ValueError: a sequence or a position exceeds `max_positions`.
            UserError: global positions are given but no sublayer asks for them, they are missing though a sublayer asks
                for them, or they are not booleans (B, T). Token types are given but the model has none. The lengths of
                documents do not fit the text. Tokens are permuted, but a sublayer or the back end does not allow it.
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
        """Encode permuted tokens.

        For each pair of tokens, the relative bias, or -inf if the first does not see the second, is added to the scores
        of all sublayers, like learned scores.
        """
        check_takes_permuted(self, "turns")
        turns_B3T = info.turns_B3T
        positions_BT = info.positions_BT
        assert turns_B3T is not None, "permuted tokens have turns"
        check_turns(turns_B3T, positions_BT, tokens_BT.shape[:2], self.max_positions)
        assert positions_BT is not None, "check_turns refuses missing positions"
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
            tokens_BT: ids, or embeddings of tokens (B, T, C).
            token_types_BT: the type of each token; None for type 0 everywhere.
            positions: the positions of the tokens, as an array (T,) or as a tensor (B, T), whose bounds the caller
                checks; by default their indices in the sequence.

        Raises:
            ValueError: T or a position exceeds `max_positions`.
            UserError: token types are given, but the model has none.
        """
        time = tokens_BT.size(1)
        if isinstance(positions, np.ndarray):
            time = int(positions.max()) + 1
        if time > self.max_positions and not isinstance(positions, Tensor):
            raise ValueError(
                f"a sequence of {time} tokens is longer than the model's {self.max_positions} positions; shorten it, "
                "or train a model with a larger --max-positions"
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
                "token types are given, but the model has none; leave them out, or train a model with --token-types 2"
            )
        if self.embedding_layer_norm is not None:
            x = self.embedding_layer_norm(x)
        return F.dropout(x, self.dropout, self.training)

    @property
    def asking(self) -> list[str]:
        """The sublayers with ``global=given``, as the pattern has them."""
        return [planned.text for planned in self.plan if planned.values.get("global") == GIVEN]

    def _check_global_positions(self, given_BT: Optional[Tensor], tokens_BT: Tensor) -> None:
        asking = self.asking
        if given_BT is None and asking:
            raise UserError(
                f"{asking[0]} needs to know which tokens are global: pass global_positions, a mask of the shape of the "
                "tokens, or write global=1 to make the first token of each text global, which has the same weights"
            )
        if given_BT is None:
            return
        if not asking:
            raise UserError(
                "global_positions are given, but no sublayer of the pattern has global=given; leave them out, or use "
                "such a pattern"
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
            global_positions_BT: True at global tokens; None if the caller gives none.
            lengths: the lengths of documents in a row (1, S, C); None for sequences.
        """
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
    """Remove the norm of the first sublayer that has one; the embeddings are normalised instead.

    Raises:
        UserError: the sublayers are post-norm.
    """
    if not normalize_before:
        raise UserError(
            "--embedding-norm needs --encoder-normalize-before; post-norm encoders normalise embeddings anyway"
        )
    first = next((each for each in sublayers if isinstance(each, ResidualSublayer)), None)
    if first is not None:
        first.layer_norm = nn.Identity()


def init_bert_weights(module: nn.Module) -> None:
    """Initialise a module as BERT does; call it as ``network.apply(init_bert_weights)``.

    | parameters | initial values |
    |---|---|
    | weights of linear maps and embeddings | N(0, 0.02) |
    | biases of linear maps, the embedding of the padding symbol, the table of the relative bias | 0 |
    | LayerNorm | weight 1, bias 0 (torch's own) |
    | projections for global tokens | copies of the plain projections |
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


LOCAL = (-1, 1, -2, 2)  # the distance of the key that each of the first four heads favours
FAVOUR = 6.0  # added to the score of the favoured key, which multiplies its weight by 403


@torch.no_grad()
def start_as_asked(encoder: Encoder, local_heads: bool, zero_last_maps: bool) -> None:
    """Apply optional initialisations after :func:`init_bert_weights`.

    Args:
        encoder: the encoder, which is changed in place.
        local_heads: whether T5's table favours the distances -1, 1, -2 and 2, one in each of the first four heads, so
            that attention does not have to learn where neighbours are. This initialisation is our own. Slow learning of
            attention maps is what keeps the loss on its first plateau (Gopalani and Hu, 2025, arXiv 2506.13688).
        zero_last_maps: whether each sublayer adds nothing to the residual stream at first (Fixup, Zhang et al., 2019,
            arXiv 1901.09321). ReZero (Bachlechner et al., 2020, arXiv 2003.04887) uses a gate of zero for this instead.

    Raises:
        UserError: the encoder has no relative bias, or too few buckets for a separate one at each of these distances;
            or the class of a sublayer does not tell which map is its last.
    """
    if local_heads:
        bias = encoder.relative_position_bias
        distances = torch.tensor(LOCAL[: encoder.num_heads])
        if bias is None or bias.num_buckets // 4 <= max(LOCAL):
            raise UserError("--local-heads needs --relative-position-buckets 12 or more")
        buckets = relative_position_bucket(distances, bias.num_buckets, bias.max_distance)
        bias.table[buckets, torch.arange(len(distances))] = FAVOUR
    if not zero_last_maps:
        return
    for sublayer in encoder.sublayers:
        if isinstance(sublayer, ResidualSublayer):
            for weight in sublayer.inner.last_map().parameters():
                weight.zero_()
