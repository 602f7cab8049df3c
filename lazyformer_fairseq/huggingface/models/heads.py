"""The transformers models with an encoder and a task head."""

from typing import Any, ClassVar, Optional, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import (
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from lazyformer_fairseq.huggingface.models.configuration import LazyFormerConfig
from lazyformer_fairseq.huggingface.models.encoder import (
    TIES_BY_TABLE,
    LazyFormerModel,
    LazyFormerPreTrainedModel,
    activation,
    first_of_text,
    wants_dict,
)
from lazyformer_fairseq.huggingface.models.saved_weights import other_heads
from lazyformer_fairseq.modules.layer_norm import layer_norm
from lazyformer_fairseq.modules.networks.heads import CLASSIFICATION_HEADS

IGNORED = -100  # the label of tokens that are not predicted
TIED_WEIGHTS = {"lm_head.decoder.weight": "lazyformer.encoder.embed_tokens.weight"}


class LazyFormerWithHead(LazyFormerPreTrainedModel):
    """The base class of models with a head, which contains the encoder and declares its shared weights.

    Attributes:
        output_class: The output's class, which is constructed from the loss, logits, hidden states and attention
            probabilities.
    """

    output_class: ClassVar[Any] = TokenClassifierOutput

    def __init__(self, config: LazyFormerConfig):
        super().__init__(config)
        self.lazyformer = LazyFormerModel(config, is_part=True)
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
        return_dict: Optional[bool] = None,
        num_items_in_batch: Union[Tensor, int, None] = None,
        **others: Any,
    ) -> Any:
        """Compute logits, and a loss if there are labels.

        Args:
            input_ids: The tokens (B, T).
            attention_mask: (B, T), 0 at padding.
            token_type_ids: (B, T), for models with token types only.
            inputs_embeds: Embeddings (B, T, C) in place of `input_ids`.
            global_attention_mask: (B, T), 1 at tokens with global attention in both directions.
            labels: The targets. Token labels are (B, T), with -100 at tokens that are not predicted. Text labels are
                (B,) and contain classes or regression targets.
            return_dict: Whether to return an object; False for a tuple.
            num_items_in_batch: The number of predicted tokens in the whole update. A masked-LM loss is divided by it.
            **others: Additional arguments; see :meth:`LazyFormerModel.forward`.
        """
        encoded = self.lazyformer(
            input_ids,
            attention_mask,
            token_type_ids,
            inputs_embeds,
            global_attention_mask,
            return_dict=True,
            **others,
        )
        x = encoded.last_hidden_state
        if labels is not None:
            labels = labels.to(x.device)
        padding_mask = self.lazyformer.find_padding(input_ids, attention_mask)
        loss, logits = self.compute(x, padding_mask, labels, num_items_in_batch)
        output = self.output_class(loss, logits, encoded.hidden_states, encoded.attentions)
        if wants_dict(self.config, return_dict):
            return output
        return output.to_tuple()

    def compute(
        self,
        x_BTC: Tensor,
        padding_mask_BT: Optional[Tensor],
        labels: Optional[Tensor],
        num_items: Union[Tensor, int, None],
    ) -> tuple[Optional[Tensor], Tensor]:
        """Return the loss (None without labels) and the logits."""
        logits = self.logits(x_BTC, padding_mask_BT)
        if labels is None:
            return None, logits
        share = labels.ne(IGNORED).any()  # sublayers add no loss to a batch in which nothing is predicted
        return self.with_penalty(self.loss(logits, labels), share), logits

    def with_penalty(self, loss: Tensor, share: Tensor) -> Tensor:
        """Return the loss; during training, add the sublayers' own loss times `share`."""
        if self.training:
            return loss + share * self.lazyformer.penalty()
        return loss

    def logits(self, x_BTC: Tensor, padding_mask_BT: Optional[Tensor]) -> Tensor:
        """Return the logits, either per token or per text."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over labeled tokens."""
        return mean_cross_entropy(logits.flatten(0, 1), labels.flatten())


def mean_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignored: int = IGNORED,
    num_items: Union[Tensor, int, None] = None,
) -> Tensor:
    """Return the mean cross-entropy, in nats, over rows with a target.

    Batches without any target are common with short texts. Their loss and gradients are zero, whereas transformers'
    models return NaN.

    Args:
        logits: (N, V).
        targets: (N,), `ignored` in rows that are not predicted.
        ignored: The target value of rows without a target.
        num_items: The divisor of the sum; None for the number of targets.
    """
    nats = F.cross_entropy(logits.float(), targets, ignore_index=ignored, reduction="sum")
    if num_items is None:
        num_items = targets.ne(ignored).sum()
    return nats / at_least_one(num_items, nats)


def at_least_one(num_items: Union[Tensor, int], like: Tensor) -> Tensor:
    """Clamp a number of predicted tokens to at least 1 to make it a valid divisor, and move it to `like`'s device."""
    return torch.as_tensor(num_items, device=like.device).clamp(min=1)


class _OutputMap(nn.Linear):
    def reset_parameters(self) -> None:
        """Do nothing: the weights are set later, in most models to the word embedding."""


class MaskedLMHead(nn.Module):
    """The masked-LM head: a dense layer, an activation, a LayerNorm, and a decoder with bias; or only the decoder.

    The decoder is tied to the token embedding unless the config disables it.
    """

    def __init__(self, config: LazyFormerConfig):
        super().__init__()
        width = config.hidden_size
        self.dense = None
        self.layer_norm = None
        if not config.plain_lm_head:
            self.dense = nn.Linear(width, width, config.linear_bias)
            self.layer_norm = layer_norm(width, config.layer_norm_eps, config.norm, config.norm_bias)
        self.activation = activation(config.head_act)
        self.decoder = _OutputMap(width, config.vocab_size)
        if not config.tie_word_embeddings and not self.decoder.weight.is_meta:
            nn.init.normal_(self.decoder.weight, std=config.initializer_range)
            nn.init.zeros_(self.decoder.bias)
            self.decoder._is_hf_initialized = True  # as in fairseq, these weights are drawn before all others

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (..., V) from features (..., C)."""
        if self.dense is not None:
            features = self.layer_norm(self.activation(self.dense(features)))
        return self.decoder(features)


class LazyFormerForMaskedLM(LazyFormerWithHead):
    """A masked language model.

    During training with `labels`, logits are computed only at predicted tokens: `logits` has the shape (M, V), in the
    order of ``labels[labels != -100]``. Without labels, and during evaluation, its shape is (B, T, V), and Trainer
    passes it to ``compute_metrics``. As in ModernBERT, ``config.sparse_prediction`` overrides this if there are labels:
    the shape is then always (M, V) if it is True, and always (B, T, V) if it is False.
    """

    accepts_loss_kwargs = True  # Trainer passes the number of predicted tokens per update to divide the loss by
    output_class = MaskedLMOutput
    _tied_weights_keys: ClassVar[Any] = TIED_WEIGHTS if TIES_BY_TABLE else list(TIED_WEIGHTS)
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = other_heads("lm_head")

    def __init__(self, config: LazyFormerConfig):
        super().__init__(config)
        self.lm_head = MaskedLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output projection."""
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the output projection."""
        self.lm_head.decoder = new_embeddings

    def compute(
        self,
        x_BTC: Tensor,
        padding_mask_BT: Optional[Tensor],
        labels: Optional[Tensor],
        num_items: Union[Tensor, int, None],
    ) -> tuple[Optional[Tensor], Tensor]:
        """Return the loss (None without labels) and the logits (B, T, V) or (M, V)."""
        if labels is None:
            return None, self.lm_head(x_BTC)
        is_sparse = self.config.sparse_prediction
        if is_sparse is None:
            is_sparse = self.training
        places = labels.flatten().ne(IGNORED).nonzero().squeeze(1)
        if is_sparse:
            logits = predicted = self.lm_head(x_BTC.flatten(0, 1).index_select(0, places))
        else:
            logits = self.lm_head(x_BTC)
            predicted = logits.flatten(0, 1).index_select(0, places)
        if num_items is None:
            num_items = len(places)
        targets = labels.flatten().index_select(0, places)
        loss = mean_cross_entropy(predicted, targets, num_items=num_items)
        return self.with_penalty(loss, len(places) / at_least_one(num_items, loss)), logits


class LazyFormerForSequenceClassification(LazyFormerWithHead):
    """A model that predicts a text's class or regression target from the text's first token."""

    output_class = SequenceClassifierOutput
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = other_heads("classifier")

    def __init__(self, config: LazyFormerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        head_class = CLASSIFICATION_HEADS[config.classifier]
        self.classifier = head_class(config.hidden_size, config.num_labels, config.classifier_dropout)
        self.post_init()

    def logits(self, x_BTC: Tensor, padding_mask_BT: Optional[Tensor]) -> Tensor:
        """Return the logits, (B, classes)."""
        return self.classifier(first_of_text(x_BTC, padding_mask_BT)[:, None])

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared error for regression, or the cross-entropy for single- or multi-label classification.

        ``config.problem_type`` determines the type of loss. If it is None, it is inferred from the labels.
        """
        config = self.config
        if config.problem_type is None:
            if config.num_labels == 1:
                config.problem_type = "regression"
            elif labels.is_floating_point():
                config.problem_type = "multi_label_classification"
            else:
                config.problem_type = "single_label_classification"
        if config.problem_type == "regression":
            if config.num_labels == 1:
                scores = logits.float().view_as(labels)
            else:
                scores = logits.float()
            return F.mse_loss(scores, labels.float())
        if config.problem_type == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits.float(), labels.float())
        return mean_cross_entropy(logits, labels.flatten())


class LazyFormerForTokenClassification(LazyFormerWithHead):
    """A model that classifies each token."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = other_heads("token_classifier")

    def __init__(self, config: LazyFormerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.token_classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def logits(self, x_BTC: Tensor, padding_mask_BT: Optional[Tensor]) -> Tensor:
        """Return the logits, (B, T, classes)."""
        return self.token_classifier(self.dropout(x_BTC))


class LazyFormerForQuestionAnswering(LazyFormerWithHead):
    """A model that predicts where an answer starts and ends."""

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
        return_dict: Optional[bool] = None,
        num_items_in_batch: Union[Tensor, int, None] = None,
        **others: Any,
    ) -> Union[tuple[Any, ...], QuestionAnsweringModelOutput]:
        """Compute the start and end logits, each (B, T), and a loss if answers are passed.

        Args:
            input_ids: The tokens (B, T).
            attention_mask: (B, T), 0 at padding.
            token_type_ids: (B, T), for models with token types only.
            inputs_embeds: Embeddings (B, T, C) in place of `input_ids`.
            global_attention_mask: (B, T), 1 at tokens with global attention in both directions.
            start_positions: The positions where answers start, (B,). Positions beyond the input, as for truncated
                answers, are ignored.
            end_positions: The positions where answers end, (B,), treated like `start_positions`.
            return_dict: Whether to return an object; False for a tuple.
            num_items_in_batch: Ignored; the loss is the mean over the batch.
            **others: Additional arguments; see :meth:`LazyFormerModel.forward`.
        """
        encoded = self.lazyformer(
            input_ids,
            attention_mask,
            token_type_ids,
            inputs_embeds,
            global_attention_mask,
            return_dict=True,
            **others,
        )
        start, end = self.qa_outputs(encoded.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            time = start.size(1)
            starts = start_positions.to(start.device).clamp(0, time)
            ends = end_positions.to(start.device).clamp(0, time)
            loss_of_starts = mean_cross_entropy(start, starts, ignored=time)
            loss_of_ends = mean_cross_entropy(end, ends, ignored=time)
            has_answers = torch.cat([starts, ends]).ne(time).any()
            loss = self.with_penalty((loss_of_starts + loss_of_ends) / 2, has_answers)
        output = QuestionAnsweringModelOutput(loss, start, end, encoded.hidden_states, encoded.attentions)
        if wants_dict(self.config, return_dict):
            return output
        return output.to_tuple()
