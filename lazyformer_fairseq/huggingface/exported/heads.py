"""The encoder around the sublayers of a plan, and the same with a head for each task."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Optional, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from lazyformer_fairseq.huggingface.exported.modelling import (
    TIES_BY_TABLE,
    LazyFormerConfig,
    LazyFormerPreTrainedModel,
    build_sublayers,
    eager,
    norm_options,
    other_heads,
    run_sublayers,
    turns_of,
)
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.layer_norm import layer_norm
from lazyformer_fairseq.modules.networks.encoder import RelativePositionBias, TextFirst, is_padded_right
from lazyformer_fairseq.modules.networks.heads import CLASSIFICATION_HEADS, Pooler
from lazyformer_fairseq.modules.sublayers.attention import AttentionSublayer
from lazyformer_fairseq.modules.sublayers.interface import Context


class LazyFormerModel(LazyFormerPreTrainedModel):
    """The encoder: embeddings, then the sublayers of the plan.

    Post-norm encoders normalise the embeddings, pre-norm ones the output.
    """

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = other_heads()

    def __init__(self, config: LazyFormerConfig, is_part: bool = False):
        super().__init__(config)
        self.is_part = is_part
        self.build(config)
        self.pooler = Pooler(config.hidden_size) if config.pooler else None
        self.gradient_checkpointing = False
        self.same_weights = same_weights(self)
        if self.same_weights:
            self._tied_weights_keys = self.same_weights if TIES_BY_TABLE else list(self.same_weights)
        self.post_init()

    def init_weights(self) -> None:
        """As PreTrainedModel's; of a part, the whole does it: so the same seed gives the weights that fairseq's has."""
        if not self.is_part:
            super().init_weights()

    def build(self, config: LazyFormerConfig) -> None:
        """Embeddings, sublayers, norms."""
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embed_positions = (
            nn.Embedding(config.max_position_embeddings, config.hidden_size) if config.position_embeddings else None
        )
        self.embed_token_types = (
            nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        )
        self.relative_position_bias = (
            RelativePositionBias(
                config.num_attention_heads, config.relative_position_buckets, config.relative_position_max_distance
            )
            if config.relative_position_buckets
            else None
        )
        self.sublayers = build_sublayers(config)
        norm, is_pre = partial(layer_norm, config.hidden_size, *norm_options(config)), config.normalize_before
        self.embedding_layer_norm = norm() if config.embedding_norm or not is_pre else None
        self.final_layer_norm = norm() if is_pre else None

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed_tokens = value

    def _tie_weights(self) -> None:
        """What transformers 4 calls after loading: sublayers that share a weight do so again."""
        for name, source in self.same_weights.items():
            module, _, weight = name.rpartition(".")
            setattr(self.get_submodule(module), weight, self.get_parameter(source))

    def forward(
        self,
        input_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        token_type_ids: Optional[Tensor] = None,
        inputs_embeds: Optional[Tensor] = None,
        global_attention_mask: Optional[Tensor] = None,
        output_attentions: Optional[bool] = None,
        output_hidden_states: Optional[bool] = None,
        return_dict: Optional[bool] = None,
    ) -> Union[tuple[Any, ...], BaseModelOutputWithPooling]:
        """Encodes.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 at padding, which may stand anywhere: it takes no position. None for padding
                wherever `input_ids` has the padding symbol.
            token_type_ids: (B, T); for models with token types alone.
            inputs_embeds: (B, T, C), in place of `input_ids`.
            global_attention_mask: (B, T), 1 at tokens that see and are seen by all; for patterns with ``global=given``.
            output_attentions: also return probabilities (B, N, T, K) of each attending sublayer, computed eagerly.
            output_hidden_states: also return the embeddings and what each sublayer returned, the last one normalised.
            return_dict: False for a tuple.

        Raises:
            ValueError: a sequence longer than the model's positions, or arguments that do not fit together.
        """
        config = self.config
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        marked = self._global_positions(global_attention_mask)
        sizes = (inputs_embeds if input_ids is None else input_ids).shape[:2]
        refuse_other_masks(sizes, attention_mask=attention_mask, global_attention_mask=global_attention_mask)
        padding_mask = self.find_padding(input_ids, attention_mask)
        is_right = padding_mask is None or not (torch.compiler.is_compiling() or not is_padded_right(padding_mask))
        text = None if is_right else TextFirst.of(padding_mask)
        given = (input_ids, inputs_embeds, token_type_ids, marked)
        if text is not None:
            given = tuple(None if each is None else text.move(each) for each in given)
        *inputs, global_positions = given
        x = self._embed(*inputs)
        shared = self.context(x, 0, padding_mask, global_positions)
        if output_attentions or config._attn_implementation == "eager":
            shared = shared._replace(back_end=eager)
        x, states, probabilities = self.through_sublayers(
            x, shared, bool(output_attentions), bool(output_hidden_states)
        )
        x = x if self.final_layer_norm is None else self.final_layer_norm(x)
        pooled = None if self.pooler is None else self.pooler(x)
        states = (*states[:-1], x) if output_hidden_states else (x,)
        if text is not None:
            states = tuple(text.back(state) for state in states)
            tokens = [0 if projected else x.size(1) for projected in self._reads_projected()]
            probabilities = [text.pairs_back(*each) for each in zip(probabilities, tokens, strict=False)]
        output = BaseModelOutputWithPooling(
            last_hidden_state=states[-1],
            pooler_output=pooled,
            hidden_states=states if output_hidden_states else None,
            attentions=tuple(probabilities) if output_attentions else None,
        )
        return output if wants_dict(config, return_dict) else output.to_tuple()

    def through_sublayers(
        self, x_BTC: Tensor, shared: Context, output_attentions: bool, output_hidden_states: bool
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """As :func:`run_sublayers`, whatever states are asked for."""
        checkpoint = self._checkpoint if self.gradient_checkpointing and self.training else None
        return run_sublayers(self.sublayers, x_BTC, shared, output_attentions, checkpoint, turns_of(self.config))

    def context(self, x_BTC: Tensor, memory: int, padding_BT: Optional[Tensor], given_BT: Optional[Tensor]) -> Context:
        """What all sublayers share in a pass: what shapes scores, by padding and global positions, and the back end."""
        bias = self.relative_position_bias
        scores = Scores() if bias is None else bias(x_BTC.size(1))
        scores = scores if padding_BT is None else scores.with_padding(padding_BT)
        scores = scores if given_BT is None else scores.with_given(given_BT)
        return Context(scores, lambda *_: "recompute")

    def penalty(self) -> Union[Tensor, float]:
        """What sublayers add to a loss in training; nothing, without lazyformer_fairseq."""
        return 0.0

    def find_padding(self, input_ids: Optional[Tensor], attention_mask: Optional[Tensor]) -> Optional[Tensor]:
        """(B, T), True at padding; None where it is known that there is none."""
        if attention_mask is not None:
            padding_mask = attention_mask.eq(0)
        elif input_ids is not None and self.config.pad_token_id is not None:
            padding_mask = input_ids.eq(self.config.pad_token_id)
        else:
            return None
        # What is traced must hold for other inputs too.
        return padding_mask if torch.compiler.is_compiling() or bool(padding_mask.any()) else None

    def _embed(
        self,
        input_ids: Optional[Tensor],
        inputs_embeds: Optional[Tensor],
        token_type_ids: Optional[Tensor],
    ) -> Tensor:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        time, longest = x.size(1), self.config.max_position_embeddings
        if time > longest:
            raise ValueError(f"a sequence of {time} tokens is longer than the model's {longest} positions")
        if self.embed_positions is not None:
            x = x + self.embed_positions(torch.arange(time, device=x.device))
        if self.embed_token_types is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
            x = x + self.embed_token_types(token_type_ids)
        elif token_type_ids is not None:
            raise ValueError("token_type_ids are given, but this model has no token types: leave them out")
        x = x if self.embedding_layer_norm is None else self.embedding_layer_norm(x)
        return F.dropout(x, self.config.hidden_dropout_prob, self.training)

    def _global_positions(self, global_attention_mask: Optional[Tensor]) -> Optional[Tensor]:
        asks = any(place["settings"].get("global") == "given" for place in self.config.plan)
        if asks != (global_attention_mask is not None):
            raise ValueError(
                "this model's tokens that see and are seen by all are given: pass global_attention_mask, 1 at each"
                if asks
                else "global_attention_mask is given, but no sublayer of this model asks for it"
            )
        return None if global_attention_mask is None else global_attention_mask.ne(0)

    def _reads_projected(self) -> list[bool]:
        """Of each sublayer of attention: whether keys that it reads are what Linformer made of the tokens."""
        plan = self.config.plan
        return [
            not sublayer.inner.attends and "linformer" in plan[place["giver"]]["kinds"]
            for place, sublayer in zip(plan, self.sublayers, strict=True)
            if isinstance(getattr(sublayer, "inner", None), AttentionSublayer)
        ]

    def _checkpoint(self, function: Callable, *arguments: Any) -> Any:
        # Reentrant, it would not see the tensors within what sublayers hand on, and their gradients would be lost.
        return self._gradient_checkpointing_func(function, *arguments, use_reentrant=False)


def refuse_other_masks(sizes: torch.Size, **masks: Optional[Tensor]) -> None:
    """Raises a ValueError for a mask that has not (B, T) = `sizes`, or not 0 and 1 alone: an additive one, say.

    What is traced looks at no number: the graph is for other inputs too.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return
    for name, mask in masks.items():
        if mask is not None and mask.shape != sizes:
            raise ValueError(f"{name} has the shape {tuple(mask.shape)}, must be (batch, tokens), {tuple(sizes)}")
        if mask is not None and mask.dtype != torch.bool and not bool((mask.eq(0) | mask.eq(1)).all()):
            wrong = mask[mask.ne(0) & mask.ne(1)][0].item()
            raise ValueError(f"{name} has {wrong} in it, must be 1 at tokens that count, 0 at others")


def first_of_text(x_BTC: Tensor, padding_mask_BT: Optional[Tensor]) -> Tensor:
    """(B, C) of the tokens with which texts begin, behind padding if there is some on the left."""
    if padding_mask_BT is None:
        return x_BTC[:, 0]
    first = padding_mask_BT.int().argmin(-1).to(x_BTC.device)
    return x_BTC[torch.arange(x_BTC.size(0), device=x_BTC.device), first]


def same_weights(model: nn.Module) -> dict[str, str]:
    """From each further name of a weight that several sublayers share to its first.

    They say so themselves: where transformers 4 builds a model without memory, each has a weight of its own at first.
    """
    first: dict[str, str] = {}
    found = {}
    for path, module in model.named_modules():
        for name, common in getattr(module, "common_weights", {}).items():
            weight = f"{path}.{name}"
            if first.setdefault(common, weight) != weight:
                found[weight] = first[common]
    return found


def wants_dict(config: LazyFormerConfig, return_dict: Optional[bool]) -> bool:
    return config.return_dict if return_dict is None else return_dict


TIED = {"lm_head.decoder.weight": "lazyformer.embed_tokens.weight"}


IGNORED = -100  # a label where nothing is predicted


class _OutputMap(nn.Linear):
    def reset_parameters(self) -> None:
        """Nothing: its numbers come later, and are the word embedding's in most models."""


class MaskedLMHead(nn.Module):
    """Dense, activation, LayerNorm, then a decoder tied to the token embedding, with bias; or the decoder alone."""

    def __init__(self, config: LazyFormerConfig):
        super().__init__()
        is_plain, width = config.plain_lm_head, config.hidden_size
        self.dense = None if is_plain else nn.Linear(width, width, config.linear_bias)
        self.activation = ACT2FN[config.head_act]
        self.layer_norm = None if is_plain else layer_norm(width, *norm_options(config))
        self.decoder = _OutputMap(config.hidden_size, config.vocab_size)
        if not config.tie_word_embeddings and not self.decoder.weight.is_meta:
            nn.init.normal_(self.decoder.weight, std=config.initializer_range)
            nn.init.zeros_(self.decoder.bias)
            self.decoder._is_hf_initialized = True  # it comes before all others, as in fairseq

    def forward(self, features: Tensor) -> Tensor:
        if self.dense is not None:
            features = self.layer_norm(self.activation(self.dense(features)))
        return self.decoder(features)


Given = tuple[Optional[Tensor], Optional[Tensor]]


class LazyFormerWithHead(LazyFormerPreTrainedModel):
    """The encoder, and weights that it shares among sublayers declared for the whole.

    Attributes:
        encoder_class: of the encoder; lazyformer_fairseq, where it is installed, puts its own here.
        output_class: what `forward` returns, of a loss, logits, hidden states and attention probabilities.
    """

    encoder_class: ClassVar[type[LazyFormerModel]] = LazyFormerModel
    output_class: ClassVar[Any] = TokenClassifierOutput

    def __init__(self, config: LazyFormerConfig):
        super().__init__(config)
        self.lazyformer = self.encoder_class(config, is_part=True)
        if self.lazyformer.same_weights and not TIES_BY_TABLE:
            shared = [f"lazyformer.{name}" for name in self.lazyformer.same_weights]
            self._tied_weights_keys = [*(self._tied_weights_keys or ()), *shared]

    def forward(
        self,
        input_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        token_type_ids: Optional[Tensor] = None,
        inputs_embeds: Optional[Tensor] = None,
        global_attention_mask: Optional[Tensor] = None,
        labels: Optional[Tensor] = None,
        output_attentions: Optional[bool] = None,
        output_hidden_states: Optional[bool] = None,
        return_dict: Optional[bool] = None,
        num_items_in_batch: Union[Tensor, int, None] = None,
        **documents: Any,
    ) -> Any:
        """As :meth:`LazyFormerModel.forward`.

        Args:
            labels: (B, T), -100 where nothing is predicted, or of a text (B,): classes or, of one output, scores.
            num_items_in_batch: predicted tokens of the whole update, by which a masked-LM loss is then divided.
            documents: as lazyformer_fairseq's encoder takes them.
        """
        given = (input_ids, attention_mask, token_type_ids, inputs_embeds, global_attention_mask)
        encoded = self.lazyformer(*given, output_attentions, output_hidden_states, return_dict=True, **documents)
        x, labels = encoded.last_hidden_state, None if labels is None else labels.to(encoded.last_hidden_state.device)
        loss, logits = self.answer(x, (input_ids, attention_mask), labels, num_items_in_batch)
        output = self.output_class(loss, logits, encoded.hidden_states, encoded.attentions)
        return output if wants_dict(self.config, return_dict) else output.to_tuple()

    def answer(
        self, x_BTC: Tensor, given: Given, labels: Optional[Tensor], items: Any
    ) -> tuple[Optional[Tensor], Tensor]:
        """Loss, where there are labels, and logits; `given` are ids and attention mask."""
        logits = self.logits_of(x_BTC, *given)
        if labels is None:
            return None, logits
        share = labels.ne(IGNORED).any()  # where nothing is predicted, sublayers add nothing either
        return self.with_penalty(self.loss(logits, labels), share), logits

    def with_penalty(self, loss: Tensor, share: Tensor) -> Tensor:
        """In training with what sublayers add, of which this batch has a share."""
        return loss + share * self.lazyformer.penalty() if self.training else loss

    def logits_of(self, x_BTC: Tensor, input_ids: Optional[Tensor], attention_mask: Optional[Tensor]) -> Tensor:
        """Return logits: of each token, if a class does not say otherwise."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of each token's class."""
        return mean_cross_entropy(logits.flatten(0, 1), labels.flatten())


def mean_cross_entropy(
    logits: Tensor, targets: Tensor, ignored: int = IGNORED, items: Union[Tensor, int, None] = None
) -> Tensor:
    """Return the mean cross-entropy in nats of the rows that have a target.

    A batch without a target is usual in short texts. Its loss is zero, and so are its gradients.

    Args:
        logits: (N, V).
        targets: (N,), `ignored` where nothing is predicted.
        items: what the sum is divided by; None for the number of targets.
    """
    nats = F.cross_entropy(logits.float(), targets, ignore_index=ignored, reduction="sum")
    return nats / at_least_one(targets.ne(ignored).sum() if items is None else items, nats)


def at_least_one(items: Union[Tensor, int], like: Tensor) -> Tensor:
    """Return a count of predicted tokens to divide by, on the device of `like`."""
    return torch.as_tensor(items, device=like.device).clamp(min=1)


class LazyFormerForMaskedLM(LazyFormerWithHead):
    """Logits of the masked-LM head.

    With `labels` in training they are computed where a token is predicted alone: `logits` is (M, V), in the order of
    ``labels[labels != -100]``. Without labels, and in evaluation, it is (B, T, V), which Trainer hands to
    ``compute_metrics``. ``config.sparse_prediction`` makes it (M, V) always (True) or never (False), as ModernBERT's.
    """

    accepts_loss_kwargs = True  # Trainer tells how many tokens an update predicts: batches weigh by theirs
    output_class = MaskedLMOutput
    _tied_weights_keys: ClassVar[Any] = TIED if TIES_BY_TABLE else list(TIED)
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = other_heads("lm_head")

    def __init__(self, config: LazyFormerConfig):
        super().__init__(config)
        self.lm_head = MaskedLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head.decoder = new_embeddings

    def answer(
        self, x_BTC: Tensor, given: Given, labels: Optional[Tensor], items: Any
    ) -> tuple[Optional[Tensor], Tensor]:
        """(B, T, V), or (M, V)."""
        if labels is None:
            return None, self.lm_head(x_BTC)
        sparse = self.config.sparse_prediction
        places = labels.flatten().ne(IGNORED).nonzero().squeeze(1)
        if self.training if sparse is None else sparse:
            logits = predicted = self.lm_head(x_BTC.flatten(0, 1).index_select(0, places))
        else:
            logits = self.lm_head(x_BTC)
            predicted = logits.flatten(0, 1).index_select(0, places)
        items = len(places) if items is None else items
        loss = mean_cross_entropy(predicted, labels.flatten().index_select(0, places), items=items)
        return self.with_penalty(loss, len(places) / at_least_one(items, loss)), logits


class LazyFormerForSequenceClassification(LazyFormerWithHead):
    """A class or a score for each sequence, from its first token."""

    output_class = SequenceClassifierOutput
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = other_heads("classifier")

    def __init__(self, config: LazyFormerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        head = CLASSIFICATION_HEADS[config.classifier]
        self.classifier = head(config.hidden_size, config.num_labels, config.classifier_dropout)
        self.post_init()

    def logits_of(self, x_BTC: Tensor, input_ids: Optional[Tensor], attention_mask: Optional[Tensor]) -> Tensor:
        """Return logits (B, classes)."""
        padding_mask = self.lazyformer.find_padding(input_ids, attention_mask)
        return self.classifier(first_of_text(x_BTC, padding_mask)[:, None])

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """As ``config.problem_type`` says."""
        return classification_loss(self.config, logits, labels)


def classification_loss(config: LazyFormerConfig, logits: Tensor, labels: Tensor) -> Tensor:
    """Mean squared error of scores, cross-entropy of one class or of several, as ``config.problem_type`` says."""
    if config.problem_type is None:
        several = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
        config.problem_type = "regression" if config.num_labels == 1 else several
    if config.problem_type == "regression":
        return F.mse_loss(logits.float().view_as(labels) if config.num_labels == 1 else logits.float(), labels.float())
    if config.problem_type == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits.float(), labels.float())
    return mean_cross_entropy(logits, labels.flatten())


class LazyFormerForTokenClassification(LazyFormerWithHead):
    """A class for each token."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = other_heads("token_classifier")

    def __init__(self, config: LazyFormerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.token_classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def logits_of(self, x_BTC: Tensor, input_ids: Optional[Tensor], attention_mask: Optional[Tensor]) -> Tensor:
        """Return logits (B, T, classes)."""
        return self.token_classifier(self.dropout(x_BTC))


class LazyFormerForQuestionAnswering(LazyFormerWithHead):
    """Where an answer starts and ends."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = other_heads("qa_outputs")

    def __init__(self, config: LazyFormerConfig):
        super().__init__(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(
        self,
        input_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        token_type_ids: Optional[Tensor] = None,
        inputs_embeds: Optional[Tensor] = None,
        global_attention_mask: Optional[Tensor] = None,
        start_positions: Optional[Tensor] = None,
        end_positions: Optional[Tensor] = None,
        output_attentions: Optional[bool] = None,
        output_hidden_states: Optional[bool] = None,
        return_dict: Optional[bool] = None,
        num_items_in_batch: Union[Tensor, int, None] = None,
        **documents: Any,
    ) -> Union[tuple[Any, ...], QuestionAnsweringModelOutput]:
        """As :meth:`LazyFormerModel.forward`.

        Args:
            start_positions, end_positions: (B,); those beyond the input, as of cut answers, are left out.
            num_items_in_batch: unused; the loss is the mean of the batch.
        """
        given = (input_ids, attention_mask, token_type_ids, inputs_embeds, global_attention_mask)
        encoded = self.lazyformer(*given, output_attentions, output_hidden_states, return_dict=True, **documents)
        start, end = self.qa_outputs(encoded.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            time = start.size(1)
            places = [each.to(start.device).clamp(0, time) for each in (start_positions, end_positions)]
            loss = mean_cross_entropy(start, places[0], time) + mean_cross_entropy(end, places[1], time)
            loss = self.with_penalty(loss / 2, torch.cat(places).ne(time).any())
        output = QuestionAnsweringModelOutput(loss, start, end, encoded.hidden_states, encoded.attentions)
        return output if wants_dict(self.config, return_dict) else output.to_tuple()
