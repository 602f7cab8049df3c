"""Fine-tuned models -> the official evaluation's file of predictions, and the best answers with their probabilities."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from omegaconf import open_dict

from lazyformer_fairseq.data.squad.answers import FoundAnswer
from lazyformer_fairseq.data.squad.metrics import score
from lazyformer_fairseq.data.squad.official import SquadFile, read_squad
from lazyformer_fairseq.data.squad.prepared_data import PreparedSplit
from lazyformer_fairseq.data.squad.windows import make_windows
from lazyformer_fairseq.data.text.load_tokenizer import find_tokenizer_folder
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import heads_in_checkpoint
from lazyformer_fairseq.fairseq_plugin.models.spans import find_answers
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_loading import load_safely
from lazyformer_fairseq.finetuning.load_finetuned import load_finetuned
from lazyformer_fairseq.finetuning.run.grid import BEST
from lazyformer_fairseq.finetuning.squad.best_texts import best_texts
from lazyformer_fairseq.finetuning.squad.report.read_results import read_results
from lazyformer_fairseq.finetuning.squad_family import SQUAD
from lazyformer_fairseq.modules.networks.heads import SPAN
from lazyformer_fairseq.storage.atomic import atomic_folder, write_text

PREDICTIONS, N_BEST = "predictions.json", "nbest_predictions.json"


@dataclass(frozen=True)
class Prediction:
    """What to answer, and how.

    Attributes:
        file: of the official layout, with answers or without; None: the development file that a grid was run on.
        tokenizer: its folder; None: the one beside the checkpoint.
        sizes: of windows, by the names of options of task ``squad``; what is missing is as the checkpoint was trained.
        n_best: answers to a question in nbest_predictions.json.
        max_answer_tokens: longest answer.
        max_tokens: of a batch, padding included.
        skip_mistakes: leave out questions that are wrong in the file.
    """

    file: Optional[Path]
    tokenizer: Optional[Path]
    sizes: dict[str, int]
    n_best: int = 20
    max_answer_tokens: int = 30
    max_tokens: int = 8192
    skip_mistakes: bool = False


@dataclass(frozen=True)
class Predicted:
    """What was written: a folder, its number of answers, and their marks (0 to 1) where the file has answers."""

    folder: Path
    questions: int
    marks: Optional[dict[str, float]]


def predict_checkpoint(checkpoint: Path, target: Path, wanted: Prediction) -> Predicted:
    """Writes the predictions of one checkpoint into `target`.

    Raises:
        UserError: no file was given; whatever is wrong with it, the checkpoint or its tokenizer. Nothing is written.
    """
    if wanted.file is None:
        raise UserError("--checkpoint: give the questions too, by --file dev-v1.1.json")
    with atomic_folder(target) as unfinished:
        predicted = _predict(checkpoint, wanted.file, unfinished, wanted)
    return Predicted(target, predicted.questions, predicted.marks)


def predict_best(output: Path, target: Path, wanted: Prediction) -> list[Predicted]:
    """Predicts with each model's best run by the development F1, into `target`/MODEL.

    Args:
        output: the folder that ``lazyformer squad run`` wrote.

    Raises:
        UserError: no run has ended well or kept its checkpoint, or as :func:`predict_checkpoint`. Nothing is written.
    """
    results = read_results(output)
    if not results.runs:
        raise UserError(f"{output / 'runs'}: no run has ended well")
    file = wanted.file or output / "data" / "valid.json"
    if not file.is_file():
        raise UserError(f"{file}: no such file; give the questions by --file dev-v1.1.json")
    predicted = []
    with atomic_folder(target) as unfinished:
        for model in results.grid.models:
            if best := [run.folder for run in results.of(model, SQUAD.name).best]:
                run = next((run for run in best if (run / BEST).is_file()), best[0])
                one = _predict(run / BEST, file, unfinished / model, wanted)
                predicted.append(Predicted(target / model, one.questions, one.marks))
    return predicted


def _predict(checkpoint: Path, file: Path, folder: Path, wanted: Prediction) -> Predicted:
    read = read_squad(file, wanted.skip_mistakes, needs_answers=False)
    model, task = load_squad_model(checkpoint, wanted)
    dataset = task.dataset_of(PreparedSplit(read, make_windows(task.tokenizer, read, task.settings)), "valid")
    answers = find_answers(model, task.head_name, dataset, wanted.n_best, wanted.max_tokens, file.name)
    texts = best_texts(read, answers)
    write_json(folder / PREDICTIONS, texts)
    write_json(folder / N_BEST, _n_best(read, answers))
    has_answers = all(question.answers for question in read.questions)
    return Predicted(folder, len(texts), score(read, texts) if has_answers else None)


def _n_best(file: SquadFile, answers: Sequence[Sequence[FoundAnswer]]) -> dict[str, list[dict[str, Any]]]:
    """By question its best answers: text, probability among them, sum of logits, characters of the context."""
    return {
        question.id: [
            {name: getattr(answer, name) for name in ("text", "probability", "score", "start", "end")}
            for answer in found
        ]
        for question, found in zip(file.questions, answers, strict=True)
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As run_squad.py writes it: one line a question."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def load_squad_model(checkpoint: Path, wanted: Prediction) -> tuple[Any, Any]:
    """The model, in evaluation mode and on the GPU if there is one, and its task ``squad``.

    Raises:
        UserError: no such checkpoint, no span head in it, no tokenizer, windows longer than the model's inputs.
    """
    if not checkpoint.is_file():
        raise UserError(f"{checkpoint}: no such checkpoint; run it again with --keep-checkpoints best")
    state = load_safely(checkpoint)
    settings = state["cfg"]["task"]
    head = settings.get("squad_head_name", "squad")
    found = heads_in_checkpoint(state["model"]).get(head)
    if found is None or found.kind != SPAN:
        raise UserError(f"{checkpoint}: has no span head {head!r}; give a checkpoint fine-tuned on SQuAD")
    with open_dict(settings):
        settings.data = str(checkpoint.parent)
        settings.tokenizer_folder = str(find_tokenizer_folder(wanted.tokenizer or checkpoint))
        settings.max_answer_tokens = wanted.max_answer_tokens
        settings.update(wanted.sizes)
    return load_finetuned(checkpoint, state, checkpoint.parent)
