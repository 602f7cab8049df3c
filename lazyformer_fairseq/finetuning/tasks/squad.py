"""SQuAD v1.1, extractive question answering (PAR, section 3.2 and Table 4).

The PAR paper reports the median F1 of five runs on the development set, but not the other settings. Epochs, learning
rate, warm-up and window sizes are therefore taken from BERT's run_squad.py, and the batch size from the BERT paper.
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Optional

import torch

from lazyformer_fairseq.data import prepared_squad
from lazyformer_fairseq.data.datasets import question_windows
from lazyformer_fairseq.data.datasets.question_windows import USUAL
from lazyformer_fairseq.data.prepared_squad import OFFICIAL_QUESTIONS, PreparedSplit, PreparedSquad
from lazyformer_fairseq.data.squad import SPLITS, SquadFile, read_squad, score
from lazyformer_fairseq.data.text.interface import truncation_message
from lazyformer_fairseq.data.text.tokenizer import find_tokenizer_folder, load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, inference, loading
from lazyformer_fairseq.evaluation.match import heads_in_checkpoint
from lazyformer_fairseq.finetuning.benchmark import Benchmark, Score, TableRow, TuningProtocol
from lazyformer_fairseq.finetuning.grid import Run
from lazyformer_fairseq.finetuning.paper_numbers import SEEDS
from lazyformer_fairseq.finetuning.results import Results, kept_checkpoint
from lazyformer_fairseq.finetuning.settings import GridSettings, PredictSettings
from lazyformer_fairseq.modules.networks.heads import SPAN
from lazyformer_fairseq.storage.atomic import write_text
from lazyformer_fairseq.training.objectives.spans import SpansObjective

PAPER_F1 = {"DistilBERT": 86.9, "BERT Base": 88.4, "PAR BERT Base": 87.4}
PREDICTIONS = "predictions.json"
N_BEST = "nbest_predictions.json"
FIELDS = ("text", "probability", "score", "start", "end")  # the fields of each answer in N_BEST

WORD = re.compile(r"\w+(?:['’]\w+)?")
SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s")


def baseline_of(file: SquadFile) -> dict[str, float]:
    """Return exact match and F1, as fractions, of a baseline that answers with one sentence of the context.

    The baseline picks the sentence that shares the most words with the question, and weights rare words more heavily.
    It follows the sliding-window baseline of Richardson et al. (2013), which SQuAD's authors also use (Rajpurkar et
    al., 2016, section 5.1).
    """

    def words(text: str) -> set[str]:
        return {word.lower() for word in WORD.findall(text)}

    contexts_with = Counter(word for context in file.contexts for word in words(context))
    best = {}
    for question, paragraph in zip(file.questions, file.paragraph_of.tolist(), strict=True):
        context = file.contexts[paragraph]
        asked = words(question.question)
        ends = [match.end() for match in SENTENCE_END.finditer(context)]
        edges = [0, *(end for end in ends if end < len(context)), len(context)]
        sentences = [context[start:end].strip() for start, end in itertools.pairwise(edges)]
        rarity = []
        for sentence in sentences:
            shared = words(sentence) & asked
            weights = [math.log(len(file.contexts) / contexts_with[word]) for word in shared]
            rarity.append(sum(weights))
        best[question.id] = sentences[rarity.index(max(rarity))]
    return score(file, best)


SQUAD = SimpleNamespace(  # implements finetuning.results.ScoredTask
    name="SQuAD",
    splits={split: SimpleNamespace(file=file, rows=OFFICIAL_QUESTIONS[split]) for split, file in SPLITS.items()},
    metrics=("f1", "exact_match"),
    selecting_metric="f1",
)


class Squad(Benchmark):
    """The SQuAD benchmark; its windows are ten times as long as GLUE's rows, so runs with fewer rows are resumable."""

    name = "SQuAD"
    key = "squad"
    tasks: ClassVar = {SQUAD.name: SQUAD}
    protocols: ClassVar = {
        "par": TuningProtocol(tasks=(SQUAD.name,), lrs=(3e-5,), seeds=SEEDS, epochs=2, batch_size=32, warmup_ratio=0.1)
    }
    options = frozenset(("max_length", "skip_mistakes"))
    rows_worth_resuming = 20_000
    prepared_subfolder = "data"
    scores = (Score("F1", SQUAD.name, "f1"), Score("exact match", SQUAD.name, "exact_match"))
    baseline_name = "sentence that shares the most words with the question"

    def prepare(self, wanted: GridSettings, positions: Collection[int] = ()) -> str:  # noqa: ARG002  windows must fit
        """Prepare the official files in OUT/data, or reuse existing data, and return an overview."""
        prepared = prepared_squad.prepare_squad(
            {split: wanted.data / name for split, name in SPLITS.items()},
            wanted.tokenizer,
            wanted.output / self.prepared_subfolder,
            prepared_squad.window_settings(wanted.max_length),
            wanted.skip_mistakes,
        )
        return prepared_squad.overview(prepared)

    def longest_input(self, wanted: GridSettings, prepared: Optional[PreparedSquad] = None) -> int:
        """Return the window length in tokens."""
        if prepared is not None:
            return prepared.longest
        return prepared_squad.window_settings(wanted.max_length).max_length

    def load(self, folder: Path, names: Sequence[str]) -> dict[str, PreparedSquad]:  # noqa: ARG002  all there is
        """Load and check the prepared data; raise a UserError if it is missing or lacks answers."""
        if not PreparedSquad.is_at(folder):
            raise UserError(f"{folder} contains no prepared data; pass the official files with --data")
        prepared = PreparedSquad.load(folder)
        for split in SPLITS:
            if not prepared.read(split).windows.has_targets:
                raise UserError(
                    f"{folder}: some questions in {split}.json have no answers; prepare a file in which every "
                    "question has one"
                )
        return {SQUAD.name: prepared}

    def extra_settings(self, given: GridSettings, prepared: Mapping[str, PreparedSquad]) -> dict[str, Any]:  # noqa: ARG002
        """Return the window sizes used to prepare the data."""
        return {name: prepared[SQUAD.name].manifest[name] for name in ("stride", "max_question_length")}

    def num_examples(self, run: Run) -> int:
        """Return the number of windows per epoch."""
        return run.data.manifest["splits"]["train"]["windows"]

    def objective(self, run: Run) -> SpansObjective:
        """Return the objective that predicts answer spans."""
        prepared: PreparedSquad = run.data
        settings = {
            "data": str(prepared.folder),
            "tokens_per_sample": run.tokens_per_sample,
            "doc_stride": prepared.settings.stride,
            "max_question_tokens": prepared.settings.max_question_length,
        }
        return SpansObjective(
            read=prepared.read,
            tokenizer_folder=prepared.tokenizer_folder,
            task_settings=settings,
            **run.objective_arguments(),
        )

    def baseline(self, run: Run, split: str) -> dict[str, float]:
        """Return the metrics of a baseline that answers with a sentence from the context."""
        return baseline_of(run.data.read(split).file)

    def other_rows(self, results: Results) -> Iterable[TableRow]:
        """Return the table rows of the baseline and of the models in Table 4 of the PAR paper."""
        papers = [TableRow(f"{name} (paper)", None, {"F1": f1}) for name, f1 in PAPER_F1.items()]
        return [*super().other_rows(results), *papers]

    def notes(self, results: Results) -> Iterator[str]:  # noqa: ARG002
        """Yield short notes that help the reader compare the scores with other work."""
        yield (
            "Each score is the median over seeds at the learning rate with the best F1. F1 and exact match are "
            "computed as in the official evaluation of version 1.1, and multiplied by 100."
        )
        yield (
            "Rows marked (paper) are quoted from PAR, arXiv 2009.04534, Table 4, which reports only the median F1 of "
            "five runs on the official development set. They were not measured here."
        )

    def predict(self, runs: Mapping[str, Path], folder: Path, wanted: PredictSettings) -> list[str]:
        """Write predictions.json for the official evaluation, and nbest_predictions.json with probabilities.

        Args:
            runs: the SQuAD run, or a checkpoint.
            folder: the output folder.
            wanted: the command's options.

        Raises:
            UserError: the file of questions, the checkpoint or its tokenizer is missing or invalid.
        """
        run = runs.get(SQUAD.name)
        if run is None:
            return []
        checkpoint = run
        if not run.is_file():
            checkpoint = kept_checkpoint(run)
        file = wanted.data
        if file is None and len(run.absolute().parents) > 3:
            file = run.absolute().parents[3] / self.prepared_subfolder / "valid.json"  # OUT in OUT/runs/MODEL/TASK/RUN
        if file is None:
            raise UserError(
                f"{run} belongs to no grid with questions; pass a file of questions, as in --data dev-v1.1.json"
            )
        if not file.is_file():
            raise UserError(f"{file}: no such file; pass a file of questions, as in --data dev-v1.1.json")

        read = read_squad(file, wanted.skip_mistakes, needs_answers=False)
        loaded, objective, settings = load_squad_model(checkpoint, wanted)
        windows = question_windows.make_windows(loaded.tokenizer, read, settings)
        answers = inference.find_answers(
            loaded.model,
            objective.head_name,
            objective.dataset_of(PreparedSplit(read, windows), "valid"),
            wanted.n_best,
            max_tokens=wanted.max_tokens,
            name=file.name,
        )
        texts = {}
        n_best = {}
        for question, found in zip(read.questions, answers, strict=True):
            texts[question.id] = ""  # stays empty if the context contains no tokens
            if found:
                texts[question.id] = found[0].text
            n_best[question.id] = [{name: getattr(answer, name) for name in FIELDS} for answer in found]
        for name, content in {PREDICTIONS: texts, N_BEST: n_best}.items():
            write_text(folder / name, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

        said = [f"{len(texts):,} answers"]
        if all(question.answers for question in read.questions):
            said += [f"{name.replace('_', ' ')} {100 * value:.2f}" for name, value in score(read, texts).items()]
        lines = [", ".join(said)]
        if windows.cut_questions:
            what = f"questions of {file.name}"
            lines.append(truncation_message(windows.cut_questions, len(texts), settings.max_question_length, what))
        return lines


def load_squad_model(
    checkpoint: Path,
    wanted: PredictSettings,
) -> tuple[inference.TrainedModel, SpansObjective, question_windows.WindowSettings]:
    """Load a model for inference, on the GPU if available, and return it with its objective and window settings.

    Raises:
        UserError: the checkpoint has no span head or no tokenizer.
    """
    state = checkpoints.load(checkpoint)
    task = state["cfg"].get("task") or {}
    name = task.get("squad_head_name") or "squad"
    head = heads_in_checkpoint(state["model"]).get(name)
    if head is None or head.type != SPAN:
        raise UserError(f"{checkpoint} has no span head {name!r}; use a checkpoint fine-tuned on SQuAD")
    folder = find_tokenizer_folder(wanted.tokenizer or checkpoint)
    loaded = loading.load_state(state, checkpoint, load_tokenizer(folder))
    loaded.to("cuda" if torch.cuda.is_available() else "cpu")

    settings = question_windows.WindowSettings(
        max_length=task.get("tokens_per_sample") or USUAL.max_length,
        stride=task.get("doc_stride") or USUAL.stride,
        max_question_length=task.get("max_question_tokens") or USUAL.max_question_length,
    )
    objective = SpansObjective(
        read=PreparedSquad(checkpoint.parent, {}).read,  # never called, because the questions are in a different file
        tokenizer_folder=folder,
        task_settings={},
        head_name=name,
        longest=settings.max_length,
        longest_answer=wanted.max_answer_tokens,
    )
    objective.observe(loaded.model)
    return loaded, objective, settings


BENCHMARK = Squad()
