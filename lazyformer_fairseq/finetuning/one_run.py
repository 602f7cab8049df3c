"""One fine-tuning run in this process: fairseq-train, then the metrics of its best epoch, then result.json."""

import logging
import shlex
import shutil
import time
from datetime import datetime
from typing import Any

import fairseq_cli.train
import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from omegaconf import DictConfig

from lazyformer_fairseq.child_process import output_to
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.machine import PRECISIONS
from lazyformer_fairseq.extras import versions
from lazyformer_fairseq.fairseq_plugin.reliability import checkpoints
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import load_safely
from lazyformer_fairseq.fairseq_plugin.replacements import start_run
from lazyformer_fairseq.finetuning.grid import Run
from lazyformer_fairseq.finetuning.results import ATTEMPT, BEST, LAST, LOG, RESULT, SETTINGS, split_file
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import file_lock

logger = logging.getLogger(__name__)


def fine_tune(run: Run, threads: int = 1) -> None:
    """Fine-tunes, and writes the run's folder: train.log, checkpoint_best.pt, result.json.

    A killed run resumes where its last epoch was saved; otherwise its files are removed. A second process in the
    folder waits until the first is gone, and does nothing if the run is finished by then.

    Args:
        threads: of torch on a CPU; the last digits of a result depend on their number.

    Raises:
        UserError: the folder holds the result of a run of other settings, or what training raises.
    """
    start_run(command_line=True)  # the process is this run's alone
    torch.set_num_threads(threads)
    run.folder.mkdir(parents=True, exist_ok=True)
    with file_lock(run.folder / ".lock"), output_to(run.folder / LOG):
        if run.result() is None:
            _clear_unless_resumable(run)
            write_json(run.folder / SETTINGS, run.settings)
            write_json(run.folder / RESULT, _train(run))


def _train(run: Run) -> dict[str, Any]:
    """Trains. Returns the content of result.json."""
    began = time.perf_counter()
    arguments = run.command(cpu=not torch.cuda.is_available())
    print(f"{ATTEMPT}{shlex.join(arguments)}\n{datetime.now().isoformat(timespec='seconds')}", flush=True)
    parser = options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, arguments))
    vars(checkpoint_utils.save_checkpoint).pop("best", None)  # fairseq keeps the best score of the process, not the run
    fairseq_cli.train.main(cfg)
    # A run that was killed in its last evaluation trains nothing more: then there is no meter.
    meters = [metrics.get_meter("default", name) for name in ("train_wall", "wpb")]
    train_seconds, tokens = (meter.sum if meter else 0.0 for meter in meters)
    best = torch.load(run.folder / BEST, map_location="cpu", weights_only=True)
    found = evaluate(run, cfg, best)
    if best.pop("last_optimizer_state", None) is not None:  # two thirds of the file
        checkpoints.save(best, run.folder / BEST)
    (run.folder / LAST).unlink(missing_ok=True)
    in_file, _ = run.data.size_of("train")
    return {
        "format_version": 1,
        **{name: run.settings[name] for name in ("model", "task", "lr", "seed", "epochs", "max_train_rows")},
        "checkpoint": str(run.model.checkpoint),
        "updates": run.model.updates,
        "best_epoch": int(best["extra_state"]["train_iterator"]["epoch"]) - 1,
        "selected_by": run.task.selecting_metric,
        "splits": [facts.as_json() for facts in run.facts],
        **{**found, "train_rows": run.train_rows, "rows_in_file": in_file},
        **{"seconds": time.perf_counter() - began, "train_seconds": train_seconds},
        "tokens_per_second": float(tokens) / max(train_seconds, 1e-9),
        **{**run.recorded, "start": str(run.model.checkpoint), "parameters": run.model.parameters},
        **{"settings": run.settings, "threads": torch.get_num_threads()},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": versions(("fairseq-fixed", "torch", "numpy", "scikit-learn", "scipy")),
    }


def evaluate(run: Run, cfg: DictConfig, best: dict[str, Any]) -> dict[str, Any]:
    """Fields of the result, by development file: ``metrics`` of the best epoch's weights, on the GPU if there is one
    and in the precision of training; ``baseline``, the best answers that need no model; ``baselines``, all of several.

    Args:
        best: the content of the checkpoint.
    """
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    model.load_state_dict(best["model"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device=device, dtype=PRECISIONS[run.grid.precision]).eval()
    criterion = task.build_criterion(cfg.criterion).eval()
    task.load_dataset("train")
    found: dict[str, Any] = {"metrics": {}, "baseline": {}}
    for split in cfg.dataset.valid_subset.split(","):
        task.load_dataset(split)
        file, baselines = split_file(run.task, split), task.baselines(split)
        found["metrics"][file] = task.marks(model, criterion, split)
        found["baseline"][file] = max(baselines.values(), key=lambda marks: marks[run.task.selecting_metric])
        for name, marks in baselines.items() if len(baselines) > 1 else ():
            found.setdefault("baselines", {}).setdefault(name, {})[file] = marks
    return found


def _clear_unless_resumable(run: Run) -> None:
    last = run.folder / LAST
    if run.is_worth_resuming and last.exists() and (run.folder / SETTINGS).exists():
        try:
            load_safely(last)
            if not run.differs_from(read_json(run.folder / SETTINGS)):
                return
        except UserError as error:
            logger.warning("starting anew: %s", error)
    for path in (*run.folder.glob("*.pt"), run.folder / SETTINGS):
        path.unlink(missing_ok=True)
    shutil.rmtree(run.folder / "tokenizer", ignore_errors=True)
