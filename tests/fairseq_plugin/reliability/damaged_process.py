"""One process of a run under torchrun in which only the second process damages its numbers.

``python damaged_process.py OUTPUT '{"2": "nan gradient", "from": 50}' fairseq-train's options ...``; "from": every call
from there on has a NaN gradient. Writes OUTPUT/rank<R>.json: updates after each call, calls that moved no weight, and a
hash of the last weights.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from damage import WEIGHT, DamagedRun
from fairseq_cli.train import cli_main

import lazyformer_fairseq  # noqa: F401


def main(output: Path, kinds: dict, options: list[str]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    since = kinds.pop("from", sys.maxsize)

    def kind_of(call: int):
        return None if rank == 0 else "nan gradient" if call >= since else kinds.get(str(call))

    sys.argv = ["fairseq-train", *options]
    with DamagedRun(kind_of) as run:
        try:
            cli_main()
        finally:
            if run.updates:
                (output / f"rank{rank}.json").write_text(json.dumps(seen_of(run)))


def seen_of(run: DamagedRun) -> dict:
    weights = run.updates[-1].after["model"]
    digest = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights)))
    unmoved = [torch.equal(update.after["model"][WEIGHT], update.before["model"][WEIGHT]) for update in run.updates]
    return {
        "updates": [update.after["updates"] for update in run.updates],
        "skipped": [call for call, stays in enumerate(unmoved) if stays],
        "weights": digest.hexdigest(),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
