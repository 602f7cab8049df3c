"""The encoder with a head for each task."""

from typing import Any, ClassVar, Optional, Union

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from lazyformer_fairseq.huggingface.exported.checksums import other_heads
from lazyformer_fairseq.huggingface.exported.modelling import (
    TIES_BY_TABLE,
    LazyFormerConfig,
    LazyFormerModel,
    LazyFormerPreTrainedModel,
    first_of_text,
    wants_dict,
)
from lazyformer_fairseq.modules.networks.heads import CLASSIFICATION_HEADS

TIED = {"lm_head.decoder.weight": "lazyformer.embed_tokens.weight"}


class MaskedLMHead(nn.Module):
    """Dense, activation, LayerNorm, then a decoder tied to the token embedding, with bias."""

    def __init__(self, config: LazyFormerConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.head_act]
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, features: Tensor) -> Tensor:
        return self.decoder(self.layer_norm(self.activation(self.dense(features))))


class LazyFormerWithHead(LazyFormerPreTrainedModel):
    """The encoder, and weights that it shares among sublayers declared for the whole.

    Attributes:
        output_class: what `forward` returns, of a loss, logits, hidden states and attention probabilities.
    """

    output_class: ClassVar[Any] = TokenClassifierOutput

    def __init__(self, config: LazyFormerConfig):
        super().__init__(config)
        self.lazyformer = LazyFormerModel(config)
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
    ) -> Any:
        """As :meth:`LazyFormerModel.forward`; `labels` are (B, T), -100 where nothing is predicted, or of a text (B,):
        classes or, of one output, scores."""
        given = (input_ids, attention_mask, token_type_ids, inputs_embeds, global_attention_mask)
        encoded = self.lazyformer(*given, output_attentions, output_hidden_states, return_dict=True)
        logits = self.score(encoded.last_hidden_state, input_ids, attention_mask)
        loss = None if labels is None else self.loss(logits, labels.to(logits.device))
        output = self.output_class(loss, logits, encoded.hidden_states, encoded.attentions)
        return output if wants_dict(self.config, return_dict) else output.to_tuple()

    def score(self, x_BTC: Tensor, input_ids: Optional[Tensor], attention_mask: Optional[Tensor]) -> Tensor:
        """Logits: of each token, if a class does not say otherwise."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of each token's class."""
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class LazyFormerForMaskedLM(LazyFormerWithHead):
    """Logits of the masked-LM head, at all positions."""

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

    def score(self, x_BTC: Tensor, input_ids: Optional[Tensor], attention_mask: Optional[Tensor]) -> Tensor:
        """(B, T, V)."""
        return self.lm_head(x_BTC)


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

    def score(self, x_BTC: Tensor, input_ids: Optional[Tensor], attention_mask: Optional[Tensor]) -> Tensor:
        """(B, classes)."""
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
    return F.cross_entropy(logits.float(), labels.flatten())


class LazyFormerForTokenClassification(LazyFormerWithHead):
    """A class for each token."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = other_heads("token_classifier")

    def __init__(self, config: LazyFormerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.token_classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def score(self, x_BTC: Tensor, input_ids: Optional[Tensor], attention_mask: Optional[Tensor]) -> Tensor:
        """(B, T, classes)."""
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
    ) -> Union[tuple[Any, ...], QuestionAnsweringModelOutput]:
        """As :meth:`LazyFormerModel.forward`; positions (B,) beyond the input, as of cut answers, are left out."""
        given = (input_ids, attention_mask, token_type_ids, inputs_embeds, global_attention_mask)
        encoded = self.lazyformer(*given, output_attentions, output_hidden_states, return_dict=True)
        start, end = self.qa_outputs(encoded.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = (place_loss(start, start_positions) + place_loss(end, end_positions)) / 2
        output = QuestionAnsweringModelOutput(loss, start, end, encoded.hidden_states, encoded.attentions)
        return output if wants_dict(self.config, return_dict) else output.to_tuple()


def place_loss(logits_BT: Tensor, places_B: Tensor) -> Tensor:
    time = logits_BT.size(1)
    return F.cross_entropy(logits_BT.float(), places_B.to(logits_BT.device).clamp(0, time), ignore_index=time)
