"""Answers of a trained model on raw text: features, classes, scores, filled masks and spans."""

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
from lazyformer_fairseq.data.datasets.question_windows import USUAL_ANSWERS, FoundAnswer, QuestionWindowsDataset
from lazyformer_fairseq.data.datasets.tagged_words import first_tokens
from lazyformer_fairseq.data.labelled_files import OUTSIDE, TaskDescription, words_of
from lazyformer_fairseq.data.squad import Paragraph, Question, SquadFile
from lazyformer_fairseq.data.text.interface import TextTokenizer, cut_input, lacks_text, told_cut
from lazyformer_fairseq.data.text.normalisation import MASK
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import match
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE, SpanHead
from lazyformer_fairseq.progress import Progress


class Filling(NamedTuple):
    """One answer of :meth:`TrainedModel.fill_mask`: the text, its probability, and the word that fills the mask."""

    text: str
    probability: float
    word: str


class Prediction(NamedTuple):
    """An answer of :meth:`TrainedModel.predict` on a text: the likeliest class, or a score without probabilities.

    Attributes:
        label: None where there is no text to answer on; then there are no probabilities. A list of those that are
            likelier than not, where texts have several. A list of the tag of each word, where words have tags: words
            are divided by spaces, and those that are cut off have the tag ``O``.
        probability: of the label; None of a list.
        probabilities: of all labels.
        is_cut: whether the text is longer than the model reads, so that the answer is on a part of it.
        is_unknown: whether the tokenizer knows no token of the text, so that the answer says nothing.
        cut_words: how many words have no token in what the model reads, where words have tags.
    """

    label: Optional[Union[str, float, list[str]]]
    probability: Optional[float]
    probabilities: Mapping[str, float]
    is_cut: bool = False
    is_unknown: bool = False
    cut_words: int = 0


class TrainedModel(nn.Module):
    """A trained model with its tokenizer: raw text in.

    Attributes:
        tasks: what its classification heads were trained on, by name; those without names of classes have no splits.
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
        """The device of the weights."""
        return self.model.dictionary_sha256.device

    def encode(self, *texts: str) -> Tensor:
        """Return ids (B, T) of texts, ``<s> text </s>`` each, padded and cut at the model's longest sequence.

        Texts may also come as one list. Warns where one is cut.

        Raises:
            UserError: there is none, or one is no text.
        """
        if len(texts) == 1 and isinstance(texts[0], (list, tuple)):
            (texts,) = texts
        if not texts:
            raise UserError("no text: give one or more, as in extract_features('One text.', 'Another.')")
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise UserError(f"{wrong[0]!r} is no text: give strings, as in extract_features('One text.', 'Another.')")
        longest = self.model.max_positions()
        inputs, is_cut = self._inputs(((text,) for text in texts), longest)
        _warn_of_cuts(is_cut, longest)
        rows = list(map(torch.from_numpy, inputs))
        return pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.special.pad).to(self.device)

    def _inputs(self, rows: Iterable[Sequence[str]], longest: int) -> tuple[list[np.ndarray], list[bool]]:
        """Return the ids of each text or pair, int64, cut to `longest`, and whether it had to be cut."""
        whole = [np.array(self.tokenizer.build_input(*texts)) for texts in rows]
        cut = [cut_input(ids, longest, self.tokenizer.special.eos) for ids in whole]
        return cut, [len(ids) > longest for ids in whole]

    @torch.no_grad()
    def extract_features(self, *texts: str, global_positions: Optional[Tensor] = None) -> Tensor:
        """Return the encoder's output (B, T, C) for raw texts; rows are padded on the right.

        Args:
            *texts: see :meth:`encode`.
            global_positions: (B, T), True at ids of :meth:`encode` that see and are seen by all; for models with
                ``global=given``, which need it.
        """
        features, _ = self.model(self.encode(*texts), features_only=True, global_positions=global_positions)
        return features

    def predict(
        self,
        texts: Iterable[Union[str, Sequence[str]]],
        head: Optional[str] = None,
        max_tokens: int = 8192,
    ) -> list[Prediction]:
        """Answer on texts by a fine-tuned model, as in ``predict(["One text.", "Another."])``, or on pairs of texts.

        A text that holds nothing, or a pair of which one text does, is not answered on: its label is None. Warns where
        there are such texts, and where some are cut.

        Args:
            texts: the texts, or the pairs.
            head: the name of a head; by default the only one that was fine-tuned.
            max_tokens: of a batch, padding included.

        Raises:
            UserError: the checkpoint has no such head, or the texts are no texts, or no pairs where it knows pairs.
        """
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise UserError(f"{texts!r}: predict([...]) takes one list, of texts or of pairs")
        answers = self.predict_rows(texts, head, max_tokens)
        _warn_of_cuts([answer.is_cut for answer in answers], self.longest_of(self.choose_head(head)))
        if empty := sum(answer.label is None for answer in answers):
            warnings.warn(f"{empty:,} of {len(answers):,} texts are empty: their label is None", stacklevel=2)
        if unknown := sum(answer.is_unknown for answer in answers):
            said = f"{unknown:,} of {len(answers):,} texts have no token that is known: their label says nothing"
            warnings.warn(said, stacklevel=2)
        return answers

    def choose_head(self, name: Optional[str] = None) -> str:
        """Return the fine-tuned classification head of this name, or the only one; UserError for none or several."""
        if not self.tasks:
            raise UserError("this model was not fine-tuned on labels or scores; `lazyformer finetune` does that")
        return _named_or_only(name, list(self.tasks), "classification head")

    def longest_of(self, head: str) -> int:
        """Return how many tokens of an input a head reads: as many as in training, and as the model has positions."""
        return min(self.model.max_positions(), self.tasks[head].longest or self.model.max_positions())

    @torch.no_grad()
    def predict_rows(
        self,
        texts: Iterable[Union[str, Sequence[str]]],
        head: Optional[str] = None,
        max_tokens: int = 8192,
    ) -> list[Prediction]:
        """Answer on texts or pairs as :meth:`predict` does, for callers that count cut and empty ones themselves."""
        name = self.choose_head(head)
        task = self.tasks[name]
        rows = []
        for given in texts:
            parts = (given,)
            if isinstance(given, (list, tuple)):
                parts = tuple(given)
            is_right = len(parts) == 1 + task.is_pair or (not task.splits and len(parts) == 2)
            if not is_right or not all(isinstance(part, str) for part in parts):
                wanted = "pairs of texts" if task.is_pair else "texts"
                raise UserError(f"{given!r}: {task.name}'s model was trained on {wanted}")
            if task.tags_words:
                parts = (" ".join(words_of(parts[0])),)
            rows.append(parts)
        inputs, is_cut = self._inputs(rows, self.longest_of(name))
        filled = [number for number, ids in enumerate(inputs) if not lacks_text(ids, self.tokenizer.special.eos)]
        answers = [Prediction(None, None, {})] * len(inputs)
        if task.tags_words:
            found = self._tags([(inputs[number], *rows[number]) for number in filled], name, max_tokens)
        else:
            found = self._answers([inputs[number] for number in filled], name, max_tokens)
        for number, answer in zip(filled, found, strict=True):
            answers[number] = answer
        return [
            answer._replace(is_cut=cut, is_unknown=self.tokenizer.knows_nothing_of(ids))
            for answer, cut, ids in zip(answers, is_cut, inputs, strict=True)
        ]

    def _answers(self, inputs: Sequence[np.ndarray], name: str, max_tokens: int) -> list[Prediction]:
        """Answer by a head on inputs that hold text."""
        if not inputs:
            return []
        task = self.tasks[name]
        logits = np.empty((len(inputs), task.num_classes))
        for index, found in logits_of(self.model, name, self._unlabelled(inputs), max_tokens):
            logits[index] = found
        if not np.isfinite(logits).all():
            raise UserError(f"{task.name}: the model predicts {logits[~np.isfinite(logits)][0]}; train it anew")
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
        """Tag the words of sentences, of which an input and the text are given."""
        answers = [Prediction(None, None, {})] * len(sentences)
        dataset = self._unlabelled([ids for ids, _ in sentences])
        for index, logits in logits_of(self.model, name, dataset, max_tokens):
            for number, logits_TL in zip(index, logits, strict=True):
                ids, text = sentences[number]
                tags = []
                cut_words = 0
                for place in first_tokens(self.tokenizer, words_of(text)):
                    if place < len(ids) - 1:
                        tags.append(self.tasks[name].labels[logits_TL[place].argmax()])
                    else:
                        tags.append(OUTSIDE)
                        cut_words += 1
                answers[number] = Prediction(tags, None, {}, cut_words=cut_words)
        return answers

    def _unlabelled(self, inputs: Sequence[np.ndarray]) -> LabelledTextsDataset:
        """Return inputs as the model reads them."""
        marks = None
        if self.model.encoder.sentence_encoder.asking:
            marks = self.tokenizer.special.eos
        return LabelledTextsDataset(inputs, None, marks_before=marks, **self._fed)

    def _in_unit_of_files(self, head: str, logits: Any) -> Any:
        """Return scores, which a head gives in standard deviations from their mean, in the unit of the files."""
        mean, deviation = (head in self.tasks and self.tasks[head].standard) or (0.0, 1.0)
        return logits * deviation + mean

    def fold_unit(self, head: str) -> None:
        """Let the head itself give scores as the files have them, for programs that know of no unit."""
        if head in self.tasks and self.tasks[head].standard is not None:
            last = self.model.classification_heads[head].out_proj
            weights = {"weight": last.weight * self.tasks[head].standard[1]}
            last.load_state_dict({**weights, "bias": self._in_unit_of_files(head, last.bias)})
            self.tasks = {**self.tasks, head: replace(self.tasks[head], standard=(0.0, 1.0))}

    @property
    def _fed(self) -> dict[str, Any]:
        """Return the datasets' settings of padding, order and token types."""
        special = self.tokenizer.special
        types_after = None
        if self.model.cfg.token_types > 1:
            types_after = special.eos
        return {"pad": special.pad, "shuffle": False, "types_after": types_after}

    @torch.no_grad()
    def follows(self, first: str, second: str) -> float:
        """Return the probability that the second text follows the first, by a model trained with ``--next-sentence``.

        Raises:
            UserError: the checkpoint has no such head, or the pair has no room.
        """
        if NEXT_SENTENCE not in self.model.classification_heads:
            raise UserError("this model was not trained to tell what follows what; pre-train it with --next-sentence")
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
        """Return the `topk` likeliest words for the one ``<mask>`` in a text, the likeliest first.

        A model that calls it otherwise, such as ``[MASK]``, takes that word too.

        Raises:
            UserError: there are several texts, or the text has no ``<mask>`` or several, or the masked-LM head never
                trained.
        """
        if match.lm_head_never_trained(self.model.state_dict()):
            raise UserError(
                "fill_mask: the masked-LM head of this model never trained, as of a model that was imported without "
                "one, so that its words would be noise: pre-train it first, by fairseq-train --finetune-from-model"
            )
        if not isinstance(text, str):
            raise UserError(f"fill_mask({text!r}): takes one text at a time")
        if topk < 1:
            raise UserError(f"fill_mask: topk is {topk}, must be at least 1")
        ids = self.encode(text.replace(MASK, self.tokenizer.mask_word))[0]
        at_mask = ids.eq(self.tokenizer.mask_index)
        if at_mask.sum() != 1:
            read = "in the text"
            if len(ids) == self.model.max_positions():
                read = f"in the {len(ids)} tokens that are read"
            raise UserError(f"fill_mask({text!r}): {int(at_mask.sum())} times <mask> {read}, must be once")
        logits, _ = self.model(ids[None], masked_tokens=at_mask[None])
        probabilities, words = logits.softmax(dim=-1)[0].topk(min(topk, logits.size(-1)))
        decode = self.tokenizer.decode
        return [
            Filling(decode(torch.where(at_mask, word, ids).tolist()), probability, decode([word]))
            for probability, word in zip(probabilities.tolist(), words.tolist(), strict=True)
        ]

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
        """Return the likeliest answers to a question in a text, the likeliest first, as they stand there.

        A model always answers; a probability is among the 20 best (or `n_best`, if more) and tells good answers from
        better ones, not whether the text has any. A long text goes through the model in several windows.

        Args:
            question: the question.
            context: the text.
            n_best: how many at most.
            head: name of the head for spans; by default the only one.
            settings: sizes of the windows; cut to the model's longest sequence.
            longest_answer: in tokens.

        Raises:
            UserError: there is no question or no text, or the checkpoint has no such head.
        """
        for name, text in (("question", question), ("context", context)):
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"{name} {text!r}: give some text, as in answer('Who walks?', 'Anna walks.')")
        if n_best < 1 or longest_answer < 1:
            raise UserError(f"n_best {n_best}, longest_answer {longest_answer}: must be 1 at least")
        known = [name for name, each in self.model.classification_heads.items() if isinstance(each, SpanHead)]
        if not known:
            raise UserError("the checkpoint has no head for spans: fine-tune it with --task squad")
        head = _named_or_only(head, known, "head for spans")
        longest = min(settings.max_length, self.model.max_positions())
        longest_question = min(settings.max_question_length, longest // 2)
        settings = replace(settings, max_length=longest, max_question_length=longest_question)
        file = SquadFile(Path("the text"), [Paragraph(context, (Question("", question),))])
        windows = question_windows.make_windows(self.tokenizer, file, settings)
        if windows.cut_questions:
            _warn_of_cuts([True], longest_question, "questions")
        how = {"marks_questions": bool(self.model.encoder.sentence_encoder.asking), **self._fed}
        dataset = QuestionWindowsDataset(file, windows, "", longest_answer, **how)
        (answers,) = find_answers(self.model, head, dataset, max(n_best, USUAL_ANSWERS))
        return answers[:n_best]


def _named_or_only(name: Optional[str], known: Sequence[str], what: str) -> str:
    """Return the name if it is known, or without one the only known one."""
    if name in known:
        return name
    if name is None and len(known) == 1:
        return known[0]
    wanted = f"more than one {what}"
    if name is not None:
        wanted = f"no {what} {name!r}"
    raise UserError(f"the checkpoint has {wanted}; give one of {', '.join(known)} as head")


def _warn_of_cuts(is_cut: Sequence[bool], longest: int, what: str = "texts") -> None:
    """Warn the caller of a method of :class:`TrainedModel` where texts had to be cut."""
    if any(is_cut):
        warnings.warn(told_cut(sum(is_cut), len(is_cut), longest, what), stacklevel=3)


def find_answers(
    model: nn.Module,
    head: str,
    dataset: QuestionWindowsDataset,
    n_best: int = USUAL_ANSWERS,
    **how: Any,
) -> list[list[FoundAnswer]]:
    """Return for each question of a dataset the `n_best` answers, the best first, as the context has them.

    Args:
        model: in evaluation mode, on any device.
        head: the name of its head for spans.
        dataset: windows of the questions.
        n_best: how many.
        how: `max_tokens` and `name`, see :func:`logits_of`.
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
    """Yield, for batches of like lengths, the numbers of the examples (B,) and a head's logits, float32.

    Args:
        model: in evaluation mode, on any device.
        head: the name of its head.
        dataset: the examples.
        max_tokens: of a batch, padding included; one example at least.
        name: of the progress bar; None for no bar.
    """
    device = next(model.parameters()).device
    batches = dataset.batch_by_size(dataset.ordered_indices(), max_tokens=max(max_tokens, int(dataset.sizes.max())))
    with Progress(total=len(dataset), desc=name, unit=" rows", delay=2, disable=not name, leave=False) as progress:
        for batch in batches:
            sample = dataset.collater([dataset[index] for index in batch])
            inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), sample["net_input"])
            yield sample["id"].numpy(), model(**inputs, classification_head_name=head)[0].float().cpu().numpy()
            progress.update(len(batch))
