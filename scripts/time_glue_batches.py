"""Times fine-tuning on a prepared GLUE task, with batches by length or in random order, padded or concatenated.

    python scripts/time_glue_batches.py results/glue/tasks/MRPC checkpoints/checkpoint_last.pt --updates 30

All variants train the same model on the same rows, and alternate after every update, so that other load on the machine
affects all of them equally. The script prints the throughput in tokens per second (not counting padding), the
percentage of padding, the time of an epoch, and its ratio to the time of a padded epoch in the same order. `lazyformer
finetune --no-padding` uses concatenated batches.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate

from lazyformer_fairseq.data.prepared_folder import PreparedTask
from lazyformer_fairseq.finetuning.benchmark import head_settings
from lazyformer_fairseq.finetuning.grid import Grid, load_start_models
from lazyformer_fairseq.finetuning.tasks.glue import BENCHMARK
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.training.loop import to_device

BATCH_SIZE = BENCHMARK.default_protocol.batch_size


def batches(dataset, order: np.ndarray, count: int) -> list[dict]:
    """Return `count` random batches of the rows in this order."""
    cut = [order[start : start + BATCH_SIZE] for start in range(0, len(order) - BATCH_SIZE, BATCH_SIZE)]
    drawn = np.random.default_rng(1).choice(len(cut), count, replace=count > len(cut))
    return [dataset.collater([dataset[index] for index in cut[number]]) for number in drawn]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path, help="folder of a prepared task")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--json", type=Path, help="file to write the last column of the table to, by row")
    given = parser.parse_args()

    prepared = PreparedTask.load(given.task)
    models = load_start_models({"model": given.checkpoint}, prepared.tokenizer_folder)
    name = prepared.task.name
    grid = Grid(
        benchmark=BENCHMARK,
        output=Path("unused"),
        models=models,
        tasks={name: prepared},
        lrs=[2e-5],
        seeds=[1],
        epochs={name: 1},
        batch_size=BATCH_SIZE,
        warmup_ratio=BENCHMARK.default_protocol.warmup_ratio,
        extra=head_settings(None),
    )
    objective = BENCHMARK.objective(grid.runs[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = objective.build_model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    dataset = objective.dataset("train")

    orders = {"by length": dataset.ordered_indices(), "random": np.random.default_rng(1).permutation(len(dataset))}
    drawn: dict[tuple[str, bool], list[dict]] = {}
    for name, order in orders.items():
        for dataset.concatenates_texts in (False, True):
            drawn[name, dataset.concatenates_texts] = batches(dataset, order, given.updates)
    seconds = dict.fromkeys(drawn, 0.0)
    for number in range(-2, given.updates):  # two updates for warm-up
        for name in drawn:
            batch = to_device(drawn[name][max(number, 0)], device)
            start = time.perf_counter()
            loss, _, _ = objective.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= 0:
                seconds[name] += time.perf_counter() - start
    rows, shares, tokens_of_epoch = [], {}, int(dataset.sizes.sum())
    for order, in_a_row in drawn:
        found, taken = drawn[order, in_a_row], seconds[order, in_a_row]
        tokens = sum(batch["ntokens"] for batch in found)
        places = tokens if in_a_row else sum(batch["net_input"]["src_tokens"].numel() for batch in found)
        share = taken / seconds[order, False]
        epoch = f"{tokens_of_epoch / tokens * taken:,.0f}"
        name = f"{order}, {'in a row' if in_a_row else 'padded'}"
        shares[name] = share
        rows.append((name, f"{tokens / taken:,.0f}", f"{1 - tokens / places:.1%}", epoch, f"{share:.2f}"))
    heads = ("batches", "tokens per second", "padding", "seconds per epoch", "relative to padded")
    print(tabulate(rows, heads, colalign=("left", *["right"] * 4)))
    if given.json:
        write_json(given.json, shares)


if __name__ == "__main__":
    main()
