"""SQuAD v1.1: spans of a text that answer questions (PAR, section 3.2 and Table 4).

The paper prints the metric, F1 on the development set, and that it is the median of five runs. It does not print the
rest: epochs, rate, warm-up and sizes of windows are those of BERT's run_squad.py, the batch that of BERT's paper.
"""

import itertools
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Optional

import numpy as np
import torch
from fairseq.criterions import register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import MISSING
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.data.datasets import question_windows
from lazyformer_fairseq.data.datasets.question_windows import USUAL, FoundAnswer, QuestionWindowsDataset
from lazyformer_fairseq.data.squad import METRICS, SPLITS, SquadFile, read_squad, score
from lazyformer_fairseq.data.text.interface import told_cut
from lazyformer_fairseq.data.text.tokenizer import find_tokenizer_folder
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.hub import find_answers
from lazyformer_fairseq.fairseq_plugin.reliability.options import option
from lazyformer_fairseq.finetuning import fairseq_task, squad_data
from lazyformer_fairseq.finetuning.benchmark import Benchmark, Score, TableRow, TuningProtocol
from lazyformer_fairseq.finetuning.grid import load_finetuned
from lazyformer_fairseq.finetuning.paper_numbers import SEEDS
from lazyformer_fairseq.finetuning.results import BEST, Results, ScoredTask, split_file
from lazyformer_fairseq.finetuning.settings import GridSettings, PredictSettings
from lazyformer_fairseq.finetuning.squad_data import OFFICIAL_QUESTIONS, PreparedSplit, PreparedSquad
from lazyformer_fairseq.modules.networks.heads import SPAN
from lazyformer_fairseq.storage.atomic import write_text

logger = logging.getLogger(__name__)

PAPER_F1 = {"DistilBERT": 86.9, "BERT Base": 88.4, "PAR BERT Base": 87.4}
PREDICTIONS = "predictions.json"
N_BEST = "nbest_predictions.json"


# --- task and criterion of fairseq ------------------------------------------------------------------------------------


@dataclass
class SquadConfig(fairseq_task.FineTuningConfig):
    data: str = option(
        MISSING,
        f"folder of the official files {', '.join(SPLITS.values())}, or of SQuAD as prepared",
    )
    train_file: str = option(
        SPLITS["train"],
        "name of the file to train on, in the folder of official files",
    )
    valid_file: str = option(
        SPLITS["valid"],
        "name of the file to validate on, in the folder of official files",
    )
    skip_mistakes: bool = option(
        False,
        "leave out what is wrong in the files, as answers that are not at their place",
    )
    tokens_per_sample: Optional[int] = option(None, f"tokens of an input; default: {USUAL.longest}, or as prepared")
    doc_stride: Optional[int] = option(
        None,
        f"of a long context's inputs each is so many tokens further on; default: {USUAL.stride}, or as prepared",
    )
    max_question_tokens: Optional[int] = option(
        None,
        f"longer questions are cut to so many tokens; default: {USUAL.longest_question}, or as prepared",
    )
    max_answer_tokens: int = option(30, "longest answer that is predicted")
    squad_head_name: str = option("squad", "name of the head")


@register_task("squad", dataclass=SquadConfig)
class SquadTask(fairseq_task.FineTuningTask):
    """Reads and encodes the files, adds the head to the model, and checks the options before anything is trained.

    Attributes:
        settings: sizes of the windows.
    """

    cfg: SquadConfig

    def __init__(
        self,
        cfg: SquadConfig,
        tokenizer_folder: Path,
        settings: question_windows.WindowSettings,
    ):
        super().__init__(cfg, tokenizer_folder, cfg.squad_head_name, (2, SPAN), settings.longest)
        self.settings = settings

    @classmethod
    def setup_task(cls, cfg: SquadConfig, **kwargs) -> "SquadTask":
        """Find the tokenizer and the sizes of windows.

        Raises:
            UserError: an option that does not fit, or no tokenizer where it should be.
        """
        if not kwargs.get("from_checkpoint"):
            fairseq_task.check_options(cfg, "SQuAD", list(METRICS))
        if cfg.max_answer_tokens < 1:
            raise UserError(f"--max-answer-tokens {cfg.max_answer_tokens}: must be 1 at least")
        prepared = None
        if PreparedSquad.is_at(cfg.data):
            prepared = PreparedSquad.load(cfg.data)
        folder = fairseq_task.find_tokenizer(cfg, prepared and prepared.tokenizer_folder)
        task = cls(cfg, folder, settings_of(cfg, prepared))
        logger.info(
            "SQuAD v1.1: dictionary of %d symbols from %s; %s",
            len(task.dictionary),
            folder,
            task.settings,
        )
        return task

    def read(self, split: str) -> QuestionWindowsDataset:
        """`train` or `valid`."""
        is_prepared = PreparedSquad.is_at(self.cfg.data)
        read = PreparedSquad.load(self.cfg.data).read(split) if is_prepared else self._read_official(split)
        logger.info(
            "%s: %d questions on %d paragraphs, %d windows, the longest of %d tokens, %d questions cut",
            *(read.file.path, len(read.file.questions), len(read.file.contexts)),
            *(
                len(read.windows),
                read.windows.sizes.max(),
                read.windows.cut_questions,
            ),
        )
        return self.dataset_of(read, split)

    def dataset_of(self, read: PreparedSplit, split: str) -> QuestionWindowsDataset:
        """Return a split as the model is fed; answers are needed to train and to validate, not to predict."""
        more = {"marks_questions": self.marks_first_text, **self.order_of(split)}
        return QuestionWindowsDataset(*read, split, self.cfg.max_answer_tokens, **more)

    def _read_official(self, split: str) -> PreparedSplit:
        files = {"train": self.cfg.train_file, "valid": self.cfg.valid_file}
        if split not in files:
            raise UserError(f"SQuAD has no split {split!r}; it has {', '.join(files)}")
        file = read_squad(Path(self.cfg.data) / files[split], self.cfg.skip_mistakes)
        for mistake in file.left_out:
            logger.warning("%s, left out: %s", file.path, mistake)
        return PreparedSplit(file, question_windows.make_windows(self.tokenizer, file, self.settings))

    def marks(self, model: torch.nn.Module, criterion: Any, split: str) -> dict[str, float]:
        """Of the texts that are answered, as the official evaluation has them."""
        dataset = self.dataset(split)
        return score(
            dataset.file,
            best_texts(dataset.file, find_answers(model, self.head_name, dataset, n_best=1)),
        )

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        return baselines(self.dataset(split).file)


def settings_of(cfg: SquadConfig, prepared: Optional[PreparedSquad]) -> question_windows.WindowSettings:
    """Return the sizes of windows that options ask for, or as prepared; UserError where both are there and differ."""
    usual = USUAL
    if prepared:
        usual = prepared.settings
    # Fmt: skip.
    given = {
        "longest": cfg.tokens_per_sample,
        "stride": cfg.doc_stride,
        "longest_question": cfg.max_question_tokens,
    }
    wanted = replace(usual, **{name: size for name, size in given.items() if size is not None})
    if prepared and wanted != usual:
        raise UserError(
            f"{cfg.data}: was prepared with {usual}, the options ask for {wanted}; leave --tokens-per-sample, "
            "--doc-stride and --max-question-tokens out, or prepare the data anew"
        )
    return wanted


@register_criterion("squad", dataclass=FairseqDataclass)
class SquadCriterion(fairseq_task.FineTuningCriterion):
    """The mean of two cross-entropies over the tokens of a window (Devlin et al., 2019, section 4.2).

    As in BERT's run_squad.py all tokens take part, those of the question too; padding alone does not, for here it
    depends on what else is in the batch. In validation the row of a window is the number of its question, its own, the
    score of its best answer, and this one's marks. A question has the best answer of all its windows.
    """

    NAME = "squad"

    def no_targets(self, sample: dict) -> str:
        path = self.task.dataset(sample["split"]).file.path
        return f"{path}: has questions without an answer; they can be predicted, not trained on or marked"

    def score(self, sample: dict, logits: Tensor) -> tuple[Tensor, dict]:
        """Return the summed loss of logits (B, T, 2)."""
        is_padding_BT = sample["net_input"]["src_tokens"].eq(self.task.dictionary.pad())
        loss = span_loss(logits, sample["target"], is_padding_BT)
        return loss, {} if self.training else {"rows": self._rows(sample, logits)}

    def _rows(self, sample: dict, logits_BT2: Tensor) -> np.ndarray:
        """Float64 (B, 5)."""
        dataset = self.task.dataset(sample["split"])
        index = sample["id"].cpu().numpy()
        rows = []
        best = dataset.best_answers(index, logits_BT2.detach().cpu().numpy())
        for window, answer in zip(index.tolist(), best, strict=True):
            number = int(dataset.windows.question[window])
            answers = dataset.file.questions[number].answer_texts
            marks = [metric(answer.text, answers) if answer else 0.0 for metric in METRICS.values()]
            rows.append((number, window, answer.score if answer else -np.inf, *marks))
        return np.array(rows, np.float64).reshape(-1, 3 + len(METRICS))

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict]) -> None:
        """Log the loss (bits a window), and in validation exact match and F1 (0 to 1) over whole questions."""
        fairseq_task.log_loss(logging_outputs)
        if "rows" in logging_outputs[0]:
            means = {name: partial(_mean_over_questions, place) for place, name in enumerate(METRICS)}
            fairseq_task.log_metrics(logging_outputs, means)


def _mean_over_questions(metric: int, rows: np.ndarray) -> float:
    question, window, logits = rows[:, :3].T
    best_first = np.lexsort((window, -logits, question))
    _, first_of_question = np.unique(question[best_first], return_index=True)
    return float(rows[best_first[first_of_question], 3 + metric].mean())


def span_loss(logits_BT2: Tensor, targets_B2: Tensor, is_padding_BT: Tensor) -> Tensor:
    """Return half the summed cross-entropies of starts and ends, nats.

    Args:
        logits_BT2: of each token as start and as end.
        targets_B2: the tokens that are.
        is_padding_BT: tokens that take no part.
    """
    logits_B2T = logits_BT2.transpose(1, 2).masked_fill(is_padding_BT[:, None], -torch.inf)
    return F.cross_entropy(logits_B2T.flatten(0, 1), targets_B2.flatten(), reduction="sum") / 2


WORD = re.compile(r"\w+(?:['’]\w+)?")
SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s")


def baselines(file: SquadFile) -> dict[str, dict[str, float]]:
    """Exact match and F1, 0.0 to 1.0, of answers without a model, the best F1 first: sentences of the context.

    The better one shares most words with the question, rare ones above all, as the sliding window of Richardson et al.
    (2013), which SQuAD's authors have as a baseline too (Rajpurkar et al., 2016, section 5.1).
    """

    def words(text: str) -> set[str]:
        return {word.lower() for word in WORD.findall(text)}

    seen = Counter(word for context in file.contexts for word in words(context))
    first = {}
    best = {}
    for question, paragraph in zip(file.questions, file.paragraph_of.tolist(), strict=True):
        context = file.contexts[paragraph]
        asked = words(question.text)
        ends = [match.end() for match in SENTENCE_END.finditer(context)]
        edges = [0, *(end for end in ends if end < len(context)), len(context)]
        sentences = [context[start:end].strip() for start, end in itertools.pairwise(edges)]
        rarity = [sum(math.log(len(file.contexts) / seen[word]) for word in words(each) & asked) for each in sentences]
        first[question.id] = sentences[0]
        best[question.id] = sentences[rarity.index(max(rarity))]
    rules = {
        "first sentence": first,
        "sentence that shares most with the question": best,
    }
    marks = {name: score(file, answers) for name, answers in rules.items()}
    return dict(sorted(marks.items(), key=lambda item: -item[1]["f1"]))


# --- the benchmark ----------------------------------------------------------------------------------------------------


SQUAD = SimpleNamespace(  # as finetuning.results.ScoredTask says
    name="SQuAD",
    splits={split: SimpleNamespace(file=file, rows=OFFICIAL_QUESTIONS[split]) for split, file in SPLITS.items()},
    metrics=("f1", "exact_match"),
    selecting_metric="f1",
)


class Squad(Benchmark):
    """SQuAD alone. Its windows are ten times as long as GLUE's rows, so that fewer are worth resuming."""

    name = "SQuAD"
    key = "squad"
    tasks: ClassVar = {SQUAD.name: SQUAD}
    protocols: ClassVar = {"par": TuningProtocol((SQUAD.name,), (3e-5,), SEEDS, 2, 32, 0.1)}
    options = frozenset(("max_length", "skip_mistakes"))
    rows_worth_resuming = 20_000
    prepared_in = squad_data.PREPARED_IN
    cuts_inputs = False
    scores = (
        Score("F1", SQUAD.name, "valid", "f1", "f1"),
        Score("exact match", SQUAD.name, "valid", "exact_match", "exact_match"),
    )
    baseline_name = "the best sentence by F1"

    def prepare(self, wanted: GridSettings, positions: Collection[int] = ()) -> str:
        return squad_data.overview(squad_data.prepare(wanted))

    def longest_input(self, wanted: GridSettings) -> int:
        return squad_data.window_settings(wanted.max_length).longest

    def load(self, folder: Path, names: Sequence[str]) -> dict[str, PreparedSquad]:
        if not PreparedSquad.is_at(folder):
            raise UserError(f"{folder}: not prepared; give the official files by --data")
        prepared = PreparedSquad.load(folder)
        for split in SPLITS:
            if not prepared.read(split).windows.has_targets:
                raise UserError(f"{folder}: some questions of {split}.json have no answers; prepare one that has them")
        return {SQUAD.name: prepared}

    def extra_settings(self, given: GridSettings, prepared: Mapping[str, PreparedSquad]) -> dict[str, Any]:
        return {name: prepared[SQUAD.name].manifest[name] for name in ("stride", "max_question_length")}

    def train_options(
        self,
        task: ScoredTask,
        tokens: int,
        max_rows: Optional[int],
        own: Mapping[str, Any],
    ) -> list[str]:
        return [
            *(
                "--task",
                "squad",
                "--criterion",
                "squad",
                "--tokens-per-sample",
                str(tokens),
            ),
            *(
                "--doc-stride",
                str(own["stride"]),
                "--max-question-tokens",
                str(own["max_question_length"]),
            ),
        ]

    def other_rows(self, results: Results) -> Iterable[TableRow]:
        """Return the heuristics, the best first, and the models of PAR's Table 4."""
        file = split_file(SQUAD, "valid")
        run = next(iter(results.runs.values()))
        of_file = {name: found[file] for name, found in (run.baselines or {"heuristic": run.baseline}).items()}
        for name, marks in sorted(of_file.items(), key=lambda each: -each[1][SQUAD.selecting_metric]):
            yield TableRow(
                name,
                "baseline",
                None,
                {score.name: 100 * marks[score.metric] for score in self.scores},
            )
        for name, f1 in PAPER_F1.items():
            yield TableRow(f"{name} (paper)", "paper", None, {"F1": f1})

    def notes(self, results: Results) -> Iterator[str]:
        yield (
            "A score is the median over seeds at each learning rate, and of these medians the best by F1; exact match "
            "stands at the same rate. Both as the official evaluation of version 1.1 defines them, times 100."
        )
        yield (
            "Rows marked (paper) are those of PAR, arXiv 2009.04534, Table 4: medians of five runs on the official "
            "development set, F1 alone; theirs, not measured here. The other rows without updates are sentences "
            "of the context, which need no model."
        )

    def predict(self, runs: Mapping[str, Path], folder: Path, wanted: PredictSettings) -> list[str]:
        """Write predictions.json, for the official evaluation, and nbest_predictions.json, with probabilities.

        Args:
            runs: SQuAD's run, or a checkpoint.

        Raises:
            UserError: whatever is wrong with the file, the checkpoint or its tokenizer.
        """
        if not (run := runs.get(SQUAD.name)):
            return []
        checkpoint = run
        if not run.is_file():
            checkpoint = run / BEST
        file = wanted.data or next(iter(run.absolute().parents[3:4]), run) / squad_data.PREPARED_IN / "valid.json"
        if not file.is_file():
            raise UserError(f"{file}: no such file; give the questions too, by --data dev-v1.1.json")
        read = read_squad(file, wanted.skip_mistakes, needs_answers=False)
        model, task = load_squad_model(checkpoint, wanted)
        windows = question_windows.make_windows(task.tokenizer, read, task.settings)
        dataset = task.dataset_of(PreparedSplit(read, windows), "valid")
        answers = find_answers(
            model,
            task.head_name,
            dataset,
            wanted.n_best,
            wanted.max_tokens,
            file.name,
        )
        texts = best_texts(read, answers)
        fields = ("text", "probability", "score", "start", "end")
        best = [[{name: getattr(answer, name) for name in fields} for answer in found] for found in answers]
        n_best = {question.id: found for question, found in zip(read.questions, best, strict=True)}
        for name, content in (
            (PREDICTIONS, texts),
            (N_BEST, n_best),
        ):  # one line a question
            write_text(
                folder / name,
                json.dumps(content, indent=1, ensure_ascii=False) + "\n",
            )
        has_answers = all(question.answers for question in read.questions)
        marks = ()
        if has_answers:
            marks = score(read, texts).items()
        said = [f"{name.replace('_', ' ')} {100 * value:.2f}" for name, value in marks]
        lines = [", ".join([f"{len(texts):,} answers", *said])]
        if windows.cut_questions:
            lines.append(
                told_cut(
                    windows.cut_questions,
                    len(texts),
                    task.settings.longest_question,
                    f"questions of {file.name}",
                )
            )
        return lines


def best_texts(file: SquadFile, answers: Sequence[Sequence[FoundAnswer]]) -> dict[str, str]:
    """Return each question's id with the text of its best answer; "" where its context has no token of text."""
    return {one.id: found[0].text if found else "" for one, found in zip(file.questions, answers, strict=True)}


def load_squad_model(checkpoint: Path, wanted: PredictSettings) -> tuple[torch.nn.Module, Any]:
    """Return the model, in evaluation mode and on the GPU if there is one, and its task ``squad``.

    Raises:
        UserError: no such checkpoint, no span head in it, no tokenizer.
    """

    def changes() -> dict[str, Any]:
        tokenizer = str(find_tokenizer_folder(wanted.tokenizer or checkpoint))
        return {
            "tokenizer_folder": tokenizer,
            "max_answer_tokens": wanted.max_answer_tokens,
        }

    head = ("squad_head_name", "squad")
    words = "no span head %r; give a checkpoint fine-tuned on SQuAD"
    return load_finetuned(
        checkpoint,
        checkpoint.parent,
        head,
        lambda found: found.kind == SPAN,
        words,
        changes,
    )


BENCHMARK = Squad()
