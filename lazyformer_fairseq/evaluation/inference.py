"""Inference on raw text: features, classification, regression, tagging, mask filling and question answering."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import torch
from scipy.special import expit, softmax
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from lazyformer_fairseq.data.datasets import question_windows
from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset, token_types_of
from lazyformer_fairseq.data.datasets.question_windows import DEFAULT_N_BEST, FoundAnswer, QuestionWindowsDataset
from lazyformer_fairseq.data.datasets.tagged_words import first_tokens
from lazyformer_fairseq.data.labelled_files import OUTSIDE, TaskDescription, words_of
from lazyformer_fairseq.data.squad import Paragraph, Question, SquadFile
from lazyformer_fairseq.data.text.interface import TextTokenizer, cut_input, lacks_text, truncation_message
from lazyformer_fairseq.data.text.normalisation import MASK
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import match
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE, SpanHead
from lazyformer_fairseq.progress import Progress


class Filling(NamedTuple):
    """A result of :meth:`TrainedModel.fill_mask`: the filled text, its probability, and the predicted word."""

    text: str
    probability: float
    word: str


class Prediction(NamedTuple):
    """A prediction of :meth:`TrainedModel.predict` for one text.

    Attributes:
        label: the most probable class, or the predicted value in regression. In multi-label tasks, it is the list of
            labels with a probability above 0.5. In tagging tasks, it is a list with one tag per word; words are
            separated by spaces, and truncated words are tagged ``O``. If the input is empty, the label is None and
            there are no probabilities.
        probability: the label's probability; None for lists and in regression.
        probabilities: the probabilities of all labels.
        is_cut: True if the text exceeds the model's maximum length, so that the prediction ignores the text's end.
        is_unknown: True if the text consists only of unknown tokens, which makes the prediction meaningless.
        cut_words: in tagging tasks, the number of words that were truncated.
    """

    label: Optional[Union[str, float, list[str]]]
    probability: Optional[float]
    probabilities: Mapping[str, float]
    is_cut: bool = False
    is_unknown: bool = False
    cut_words: int = 0


class TrainedModel(nn.Module):
    """A trained model with its tokenizer, which accepts raw text.

    Attributes:
        tasks: the tasks that the model's classification heads were trained on, by head name. A task that the
            checkpoint does not describe has generic class names and no splits.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TextTokenizer,
        tasks: Optional[Mapping[str, TaskDescription]] = None,
    ):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.tasks = tasks or {}
        self.eval()

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return self.model.dictionary_sha256.device

    def encode(self, *texts: str) -> Tensor:
        """Tokenize texts as ``<s> text </s>``, and pad them to the same length.

        The texts may also be passed as one list. Texts that exceed the model's maximum length are truncated, with a
        warning.

        Returns:
            The token ids (B, T).

        Raises:
            UserError: there are no texts, or an argument is not a string.
        """
        if len(texts) == 1 and isinstance(texts[0], (list, tuple)):
            (texts,) = texts
        if not texts:
            raise UserError("expected at least one text, as in extract_features('One text.', 'Another.')")
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise UserError(
                f"{wrong[0]!r} is not a text; pass strings, as in extract_features('One text.', 'Another.')"
            )
        longest = self.model.max_positions()
        inputs, is_cut = self._inputs(((text,) for text in texts), longest)
        _warn_of_cuts(is_cut, longest)
        rows = list(map(torch.from_numpy, inputs))
        return pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.special.pad).to(self.device)

    def _inputs(self, rows: Iterable[Sequence[str]], longest: int) -> tuple[list[np.ndarray], list[bool]]:
        """Return each row's token ids (int64), truncated to `longest`, and flags that are True for truncated rows."""
        whole = [np.array(self.tokenizer.build_input(*texts)) for texts in rows]
        cut = [cut_input(ids, longest, self.tokenizer.special.eos) for ids in whole]
        return cut, [len(ids) > longest for ids in whole]

    @torch.no_grad()
    def extract_features(self, *texts: str, global_positions: Optional[Tensor] = None) -> Tensor:
        """Compute the encoder's output (B, T, C) for raw texts; rows are padded on the right.

        Args:
            *texts: see :meth:`encode`.
            global_positions: a mask (B, T) over the ids returned by :meth:`encode`, True at tokens that attend to all
                tokens and are attended to by all tokens. Models with ``global=given`` require it.
        """
        features, _ = self.model(self.encode(*texts), features_only=True, global_positions=global_positions)
        return features

    def predict(
        self,
        texts: Iterable[Union[str, Sequence[str]]],
        head: Optional[str] = None,
        max_tokens: int = 8192,
    ) -> list[Prediction]:
        """Predict labels for texts or text pairs with a fine-tuned model, as in ``predict(["One text.", "Another."])``.

        The label of an empty text, or of a pair with an empty text, is None. Warnings report empty texts, truncated
        texts, and texts that consist only of unknown tokens.

        Args:
            texts: the texts or text pairs.
            head: the name of a head; by default the only fine-tuned head.
            max_tokens: the maximum number of tokens per batch, including padding.

        Raises:
            UserError: the checkpoint has no such head, or the inputs are not the texts or text pairs that the task
                requires.
        """
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise UserError(f"{texts!r}: predict([...]) takes one list of texts or pairs")
        answers = self.predict_rows(texts, head, max_tokens)
        _warn_of_cuts([answer.is_cut for answer in answers], self.longest_of(self.choose_head(head)))
        if empty := sum(answer.label is None for answer in answers):
            warnings.warn(f"{empty:,} of {len(answers):,} texts are empty; their label is None", stacklevel=2)
        if unknown := sum(answer.is_unknown for answer in answers):
            said = f"{unknown:,} of {len(answers):,} texts have no known tokens; their labels are meaningless"
            warnings.warn(said, stacklevel=2)
        return answers

    def choose_head(self, name: Optional[str] = None) -> str:
        """Return `name` if it is the name of a classification head; if it is None, return the only head's name.

        Raises:
            UserError: there is no such head, or there are several heads and `name` is None.
        """
        if not self.tasks:
            raise UserError("this model was not fine-tuned on a task; fine-tune it with `lazyformer finetune`")
        return _named_or_only(name, list(self.tasks), "classification head")

    def longest_of(self, head: str) -> int:
        """Return the maximum input length used to train a head, in tokens, limited by the model's positions."""
        positions = self.model.max_positions()
        return min(positions, self.tasks[head].longest or positions)

    @torch.no_grad()
    def predict_rows(
        self,
        texts: Iterable[Union[str, Sequence[str]]],
        head: Optional[str] = None,
        max_tokens: int = 8192,
    ) -> list[Prediction]:
        """Predict like :meth:`predict`, but without warnings, for callers that count truncated and empty texts."""
        name = self.choose_head(head)
        task = self.tasks[name]
        rows = []
        for given in texts:
            parts = (given,)
            if isinstance(given, (list, tuple)):
                parts = tuple(given)
            expected = 1 + task.is_pair
            is_right = len(parts) == expected or (not task.splits and len(parts) == 2)
            if not is_right or not all(isinstance(part, str) for part in parts):
                wanted = "pairs of texts" if task.is_pair else "texts"
                raise UserError(f"{given!r}: {task.name}'s model was trained on {wanted}")
            if task.tags_words:
                parts = (" ".join(words_of(parts[0])),)
            rows.append(parts)

        inputs, is_cut = self._inputs(rows, self.longest_of(name))
        eos = self.tokenizer.special.eos
        filled = [number for number, ids in enumerate(inputs) if not lacks_text(ids, eos)]
        answers = [Prediction(None, None, {})] * len(inputs)
        if task.tags_words:
            sentences = [(inputs[number], *rows[number]) for number in filled]
            found = self._tags(sentences, name, max_tokens)
        else:
            found = self._answers([inputs[number] for number in filled], name, max_tokens)

        for number, answer in zip(filled, found, strict=True):
            answers[number] = answer
        return [
            answer._replace(is_cut=cut, is_unknown=self.tokenizer.has_only_unknown_tokens(ids))
            for answer, cut, ids in zip(answers, is_cut, inputs, strict=True)
        ]

    def _answers(self, inputs: Sequence[np.ndarray], name: str, max_tokens: int) -> list[Prediction]:
        """Predict labels or regression values for non-empty inputs."""
        if not inputs:
            return []
        task = self.tasks[name]
        logits = np.empty((len(inputs), task.num_classes))
        for index, found in logits_of(self.model, name, self._unlabelled(inputs), max_tokens):
            logits[index] = found
        if not np.isfinite(logits).all():
            raise UserError(f"{task.name}: the model predicts {logits[~np.isfinite(logits)][0]}; retrain the model")
        if task.is_regression:
            low, high = task.score_range or (-np.inf, np.inf)
            scores = self._in_unit_of_files(name, logits)[:, 0].clip(low, high)
            return [Prediction(float(score), None, {}) for score in scores]
        answers = []
        if task.is_multi_label:
            for row in expit(logits).tolist():
                shares = dict(zip(task.labels, row, strict=True))
                likely = [label for label, share in shares.items() if share > 0.5]
                answers.append(Prediction(likely, None, shares))
            return answers
        for row in softmax(logits, axis=-1).tolist():
            shares = dict(zip(task.labels, row, strict=True))
            best = max(shares, key=shares.get)
            answers.append(Prediction(best, shares[best], shares))
        return answers

    def _tags(self, sentences: Sequence[tuple[np.ndarray, str]], name: str, max_tokens: int) -> list[Prediction]:
        """Tag the words in sentences; each sentence is a pair of token ids and text."""
        labels = self.tasks[name].labels
        answers = [Prediction(None, None, {})] * len(sentences)
        dataset = self._unlabelled([ids for ids, _ in sentences])
        for index, logits in logits_of(self.model, name, dataset, max_tokens):
            for number, logits_TL in zip(index, logits, strict=True):
                ids, text = sentences[number]
                tags = []
                cut_words = 0
                for place in first_tokens(self.tokenizer, words_of(text)):
                    if place < len(ids) - 1:
                        tags.append(labels[logits_TL[place].argmax()])
                    else:
                        tags.append(OUTSIDE)
                        cut_words += 1
                answers[number] = Prediction(tags, None, {}, cut_words=cut_words)
        return answers

    def _unlabelled(self, inputs: Sequence[np.ndarray]) -> LabelledTextsDataset:
        """Wrap inputs without labels as a dataset in the model's input format."""
        marks = None
        if self.model.encoder.sentence_encoder.sublayers_with_given_global:
            marks = self.tokenizer.special.eos
        return LabelledTextsDataset(inputs, None, global_attention_eos=marks, **self._dataset_options)

    def _in_unit_of_files(self, head: str, logits: Any) -> Any:
        """Convert a regression head's standardized outputs to the unit of the scores in the task's files."""
        standard = self.tasks[head].standard if head in self.tasks else None
        mean, deviation = standard or (0.0, 1.0)
        return logits * deviation + mean

    def fold_unit(self, head: str) -> None:
        """Fold the targets' mean and standard deviation into a regression head, so its outputs need no conversion."""
        if head in self.tasks and self.tasks[head].standard is not None:
            last = self.model.classification_heads[head].out_proj
            weights = {"weight": last.weight * self.tasks[head].standard[1]}
            last.load_state_dict({**weights, "bias": self._in_unit_of_files(head, last.bias)})
            folded = replace(self.tasks[head], standard=(0.0, 1.0))
            self.tasks = {**self.tasks, head: folded}

    @property
    def _dataset_options(self) -> dict[str, Any]:
        """The dataset settings for padding, order and token types."""
        special = self.tokenizer.special
        token_type_eos = None
        if self.model.cfg.token_types > 1:
            token_type_eos = special.eos
        return {"pad": special.pad, "shuffle": False, "token_type_eos": token_type_eos}

    @torch.no_grad()
    def follows(self, first: str, second: str) -> float:
        """Return the probability that the second text follows the first, for models trained with ``--next-sentence``.

        Raises:
            UserError: the checkpoint has no next-sentence head, or the pair exceeds the model's maximum length.
        """
        if NEXT_SENTENCE not in self.model.classification_heads:
            raise UserError("this model was not trained on next-sentence prediction; pre-train it with --next-sentence")
        special = self.tokenizer.special
        longest = self.model.max_positions()
        inputs, is_cut = self._inputs([(first, second)], longest)
        _warn_of_cuts(is_cut, longest, "pairs")
        ids = torch.tensor(np.stack(inputs), device=self.device)
        types = None
        if self.model.cfg.token_types > 1:
            types = token_types_of(ids, special.eos, special.pad)
        logits, _ = self.model(ids, classification_head_name=NEXT_SENTENCE, token_types=types)
        return float(logits.float().softmax(-1)[0, 0])

    @torch.no_grad()
    def fill_mask(self, text: str, topk: int = 5) -> list[Filling]:
        """Return the `topk` most probable words for the ``<mask>`` in a text, in descending order of probability.

        If the model's tokenizer has a different mask token, such as ``[MASK]``, it is accepted too.

        Raises:
            UserError: `text` is not a string or does not contain ``<mask>`` exactly once, or the masked-LM head was
                never trained.
        """
        if match.lm_head_never_trained(self.model.state_dict()):
            raise UserError(
                "fill_mask: this model's masked-LM head was never trained, for example because the model was imported "
                "without that head; first pre-train the model with fairseq-train --finetune-from-model"
            )
        if not isinstance(text, str):
            raise UserError(f"fill_mask({text!r}): expected a single text")
        if topk < 1:
            raise UserError(f"fill_mask: topk is {topk}, but must be at least 1")

        ids = self.encode(text.replace(MASK, self.tokenizer.mask_word))[0]
        at_mask = ids.eq(self.tokenizer.mask_index)
        if at_mask.sum() != 1:
            read = "in the text"
            if len(ids) == self.model.max_positions():
                read = f"in the first {len(ids)} tokens, the model's maximum"
            raise UserError(
                f"fill_mask({text!r}): found <mask> {int(at_mask.sum())} times {read}; <mask> must occur exactly once"
            )

        logits, _ = self.model(ids[None], masked_tokens=at_mask[None])
        count = min(topk, logits.size(-1))
        probabilities, words = logits.softmax(dim=-1)[0].topk(count)
        decode = self.tokenizer.decode
        fillings = []
        for probability, word in zip(probabilities.tolist(), words.tolist(), strict=True):
            filled_ids = torch.where(at_mask, word, ids)
            fillings.append(Filling(decode(filled_ids.tolist()), probability, decode([word])))
        return fillings

    def answer(
        self,
        question: str,
        context: str,
        *,
        n_best: int = 1,
        head: Optional[str] = None,
        settings: question_windows.WindowSettings = question_windows.USUAL,
        longest_answer: int = 30,
    ) -> list[FoundAnswer]:
        """Return the most probable answers to a question about a text, as spans of the text, best first.

        The model always answers. Probabilities are normalized over its 20 best answers, or over the `n_best` best
        answers if `n_best` is larger. They rank the answers, but do not indicate whether the text contains an answer.
        Long texts are split into several windows.

        Args:
            question: the question.
            context: the text.
            n_best: the maximum number of answers.
            head: the name of the span head; by default the only one.
            settings: the window sizes, which are limited by the model's maximum length.
            longest_answer: the maximum length of an answer in tokens.

        Raises:
            UserError: the question or the text is empty, or the checkpoint has no such head.
        """
        for name, text in (("question", question), ("context", context)):
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"{name} {text!r}: must be a non-empty text, as in answer('Who walks?', 'Anna walks.')")
        if n_best < 1 or longest_answer < 1:
            raise UserError(f"n_best {n_best}, longest_answer {longest_answer}: both must be at least 1")
        known = [name for name, each in self.model.classification_heads.items() if isinstance(each, SpanHead)]
        if not known:
            raise UserError("the model has no span head; fine-tune it with --task squad")
        head = _named_or_only(head, known, "span head")
        longest = min(settings.max_length, self.model.max_positions())
        longest_question = min(settings.max_question_length, longest // 2)
        settings = replace(settings, max_length=longest, max_question_length=longest_question)
        paragraph = Paragraph(context, (Question("", question),))
        file = SquadFile(Path("the text"), [paragraph])
        windows = question_windows.make_windows(self.tokenizer, file, settings)
        if windows.cut_questions:
            _warn_of_cuts([True], longest_question, "questions")
        how = {
            "marks_questions": bool(self.model.encoder.sentence_encoder.sublayers_with_given_global),
            **self._dataset_options,
        }
        dataset = QuestionWindowsDataset(file, windows, "", longest_answer, **how)
        (answers,) = find_answers(self.model, head, dataset, max(n_best, DEFAULT_N_BEST))
        return answers[:n_best]


def _named_or_only(name: Optional[str], known: Sequence[str], what: str) -> str:
    """Return `name` if it is known, or the only known name if it is None; otherwise raise a UserError."""
    if name in known:
        return name
    if name is None and len(known) == 1:
        return known[0]
    wanted = f"more than one {what}"
    if name is not None:
        wanted = f"no {what} {name!r}"
    raise UserError(f"the checkpoint has {wanted}; set head to one of {', '.join(known)}")


def _warn_of_cuts(is_cut: Sequence[bool], longest: int, what: str = "texts") -> None:
    """Warn the caller of a :class:`TrainedModel` method if texts were truncated."""
    if any(is_cut):
        warnings.warn(truncation_message(sum(is_cut), len(is_cut), longest, what), stacklevel=3)


def find_answers(
    model: nn.Module,
    head: str,
    dataset: QuestionWindowsDataset,
    n_best: int = DEFAULT_N_BEST,
    **how: Any,
) -> list[list[FoundAnswer]]:
    """Return the `n_best` answers to each question in a dataset, best first, as spans of the context.

    Args:
        model: the model, in evaluation mode, on any device.
        head: the name of the model's span head.
        dataset: the questions' windows.
        n_best: the number of answers per question.
        how: `max_tokens` and `name`; see :func:`logits_of`.
    """
    collector = dataset.collector(n_best)
    for index, logits_BT2 in logits_of(model, head, dataset, **how):
        collector.add(index, logits_BT2[..., 0], logits_BT2[..., 1])
    return collector.answers()


@torch.no_grad()
def logits_of(
    model: nn.Module,
    head: str,
    dataset: LabelledTextsDataset,
    max_tokens: int = 4096,
    name: Optional[str] = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield, for each batch, the example indices (B,) and a head's logits in fp32.

    Batches contain examples of similar lengths.

    Args:
        model: the model, in evaluation mode, on any device.
        head: the head's name.
        dataset: the examples.
        max_tokens: the maximum number of tokens per batch, including padding; a batch has at least one example.
        name: the label of the progress bar; None for no bar.
    """
    device = next(model.parameters()).device
    longest = int(dataset.sizes.max())
    batches = dataset.batch_by_size(dataset.ordered_indices(), max_tokens=max(max_tokens, longest))
    with Progress(total=len(dataset), desc=name, unit=" rows", delay=2, disable=not name, leave=False) as progress:
        for batch in batches:
            sample = dataset.collater([dataset[index] for index in batch])
            inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), sample["net_input"])
            logits = model(**inputs, classification_head_name=head)[0]
            yield sample["id"].numpy(), logits.float().cpu().numpy()
            progress.update(len(batch))
