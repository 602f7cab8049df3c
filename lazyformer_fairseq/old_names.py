"""Names of commands and options that changed: what is written today, or what to do now that they are gone."""

import itertools
from collections.abc import Mapping, Sequence

import click

from lazyformer_fairseq.errors import UserError


class Gone(str):
    """Of a name that has no successor: why it went, or what does its work; the end of an error."""


REPLACED = Gone("went, for it gained nothing (docs/huggingface.md); leave it out, or give --distill ORIGINAL")
MATCHED = Gone("went, for it gained nothing (docs/huggingface.md); leave it out: heads stay where they are")
ONE_MACHINE = Gone("went; leave it out: all workers are on one machine, of whose cores --workers says how many work")
FROM_SCRATCH = Gone("went; the table of a search ends with the `lazyformer compare` that trains its patterns")
MEASURED_WHERE_IT_RUNS = Gone(
    "went: a run measures the back ends itself; `lazyformer bench kinds --backend` shows them"
)
EVALUATION = Gone("went; `lazyformer lm evaluate` measures a trained model with lengths of its own")
CONSTANT = Gone("went: no page had a reason for another value than its default; leave it out")
CONSTANTS_OF_SEARCH = (
    "architecture-decay architecture-share check-patterns clip-norm final-temperature latency-memory log-interval "
    "save-interval temperature unchanged-share weights-decay"
)

SIZES = Gone("went: fairseq-train --task squad has --doc-stride and --max-question-tokens; leave it out")

# Each key is a command, or a command and one of its options; an option of a group is one of all commands in it.
# Of a command: today's, before the rest of the line. Of an option: today's; `{}` is its value, and without `{}` it has
# none, or the same. Where today's begin with a command's name, they go to the front; an argument
# without an option goes before the first option, lest one that takes several takes it too.
OLD_NAMES: dict[str, str] = {
    "tasks": "diagnostics",
    "finetune-squad": "finetune --task squad",
    **{
        f"{task}{old}": now.replace("TASK", task)
        for task in ("glue", "squad")
        for old, now in {
            "": "finetune --task TASK",
            " prepare": "finetune --task TASK",
            " run": "finetune --task TASK",
            " report": "evaluate",
            " predict": "predict",
            " predict --output": "{}",
            " predict --run": "{}",
            " predict --checkpoint": "{}",
            " predict --to": "--output {}",
        }.items()
    },
    "predict --file": "--data {}",
    "predict --zip": Gone("went; pack the files of a model with zip -j"),
    "predict --max-length": Gone("went; a model answers with inputs of the length that it was trained on"),
    "finetune --prepared": "--data {}",
    "finetune --task-epochs": "--epochs",
    "finetune --dev-articles": Gone("went; give DATA two files, train-v1.1.json and dev-v1.1.json"),
    "finetune --executor": Gone("went; --slurm NAME=VALUE... sends runs to Slurm"),
    "finetune --from-mnli": Gone("went; fine-tune on MNLI first, and give the folder of its best run as CHECKPOINT"),
    "finetune --pooler-dropout": Gone("is --glue-head dense:0.1 now"),
    **{
        f"{command} --{size}": SIZES
        for command in ("finetune", "predict")
        for size in ("stride", "max-question-length")
    },
    "glue report --squad": Gone("went; give the folder of SQuAD to `lazyformer evaluate`"),
    "glue report --latency": Gone("went; `lazyformer bench` has the latencies"),
    **{f"continue --replace-{what}": REPLACED for what in ("progressively", "until", "start", "order")},
    "import --heads": MATCHED,
    "import --report": Gone("went; --text alone asks for the losses"),
    "import --no-report": Gone("went; leave --text out"),
    "search compress --heads": MATCHED,
    "search --from": "compress {}",
    "search --latency-budget": "--budgets {}",
    **{f"search --train-{what}": FROM_SCRATCH for what in ("updates", "patterns", "lr", "seeds")},
    **{f"search --{what}": CONSTANT for what in CONSTANTS_OF_SEARCH.split()},
    "search --judged-batches": Gone("went; patterns are judged by short trainings, of which --rungs says how many"),
    "search --time-only": Gone("went; docs/search.md has what updates cost"),
    "search orders": Gone("went; `lazyformer compare --random-orders N` trains random orders"),
    "compare --shares": "--time-fractions {}",
    "compare --rates": "--lr {}",
    "compare --threads": Gone("went; set OMP_NUM_THREADS"),
    "compare --workers": Gone("went; leave it out: with --alone a GPU trains one model at a time, or a processor does"),
    "compare run --target": Gone("went; `lazyformer compare report OUT --target LOSS` times another target"),
    **{f"compare --{what}": CONSTANT for what in ("points", "evaluation-batch-size")},
    **{
        f"compare --{what}": Gone(f"is fairseq-train's: give it behind --, as in `-- --{what} {value}`")
        for what, value in (("max-positions", 512), ("warmup-ratio", 0.1))
    },
    **{
        f"compare --{what}": EVALUATION
        for what in ("same-length", "clamp-len", "evaluation-tgt-len", "evaluation-mem-len")
    },
    "diagnostics run": Gone(
        "is `lazyformer compare DATA OUT --task listops` now, or --task pairs, with --model in place of --pattern, and "
        "--model 'NAME=PATTERN; pretrain=UPDATES' of --self-pretrain"
    ),
    "lm compare": Gone(
        "is `lazyformer compare DATA OUT --task language-model` now, with --model in place of --pattern, --presets of "
        "--sublayers, --budget 8min of --minutes 8"
    ),
    "lm evaluate --precision": Gone("went; leave it out: the number is fp32's, and --batch-size makes it quicker"),
    "import --checkpoint-file": Gone("went; give the checkpoint itself in place of its folder"),
    "corpus bench": Gone(
        "went; every corpus says what it cost: see `timing` in its manifest.json, or its report.html, for core-seconds "
        "by step, megabytes a second, memory and disk; build it with --workers 1, then 2, to see it scale"
    ),
    **{f"corpus --{what}": ONE_MACHINE for what in ("executor", "slurm")},
    "corpus --unit-megabytes": Gone("went; leave it out: a unit fits the input"),
    "corpus --min-word-count": Gone("went; give --word-coverage, the share of the text that frequent words make up"),
    "continue": "pretrain",
    "pretrain-phases --tiny": Gone("went; docs/reproduce.md has the sizes of both phases in miniature"),
    "pretrain-phases": "pretrain --recipe phases",
    **{f"pretrain --{precision}": f"--precision {precision}" for precision in ("fp16", "bf16", "fp32")},
    "lm train": "pretrain",
    "pretrain --rows-per-update": "--sequences-per-update {}",
    "pretrain --rows-per-gpu": "--sequences-per-gpu {}",
    "demo --minutes": "--budget {}min",
    "plan --batch": "--sequences-per-update {}",
    "plan --lazy-backend": "--attention-backend {}",
    "pattern show --direction": Gone("went; give a causal --arch, such as transformer_xl_base, for causal models"),
    "pattern show --vocab-size": Gone("went; embeddings are counted for the symbols of the arch's usual text"),
    "plan --measure": Gone("went; `lazyformer bench --what training` prints GFLOP/s: give a thousandth as --teraflops"),
    "plan --vocab-size": Gone("went; --data says it"),
    "bench --minutes": "--budget {}min",
    "reproduce --commands": "--plan",
    "reproduce --devices": Gone("went; --teraflops is of all devices together: 21.4 for each V100"),
    "reproduce --glue": Gone("went; put GLUE's download, or a link to it, into RAW as `glue`"),
    "reproduce --batch-size": Gone("went; leave it out: pre-training finds the batch that fits the GPU"),
    "bench loader": Gone("is scripts/bench_loader.py now"),
    "bench startup": Gone("is scripts/bench_start_up.py now"),
    "bench draw": Gone("went; `lazyformer bench` draws what it has measured"),
    "bench table4 --tokens": "--lengths {}",
    "bench table4": (
        "bench models --lengths 384 --tokens 1 --what inference --arch "
        "distilbert_base,bert_base_absolute,bert_base,par_bert_base,lazy_par_bert_base,lazyformer_m2x6_s"
    ),
    **{
        f"bench backends --{option}": MEASURED_WHERE_IT_RUNS
        for option in ("batches", "layers", "output", "show", "windows")
    },
    "bench backends": "bench kinds --backend eager,materialize,recompute,fused --kinds s,sl",
    "bench --batch": Gone("went; --tokens N makes batches of N tokens, --tokens 1 of one sequence"),
    "bench --tgt-len": Gone("went; causal models score 64 tokens, as in PAR Transformer's Table 6"),
    "bench --mem-len": Gone("went; causal models remember 640 tokens, as in PAR Transformer's Table 6"),
    "bench --threads": Gone("went; set OMP_NUM_THREADS"),
}


def with_new_names(args: Sequence[str], names: Mapping[str, str] = OLD_NAMES) -> list[str]:
    """A command line in today's names; of each old one a line on standard error says what it is now.

    Raises:
        UserError: a name that is gone.
    """
    args = list(args)
    while True:
        args = _with_new_options(args, names)
        words = [*itertools.takewhile(lambda word: not word.startswith("-"), args)]
        count = next((count for count in (2, 1) if count <= len(words) and " ".join(words[:count]) in names), 0)
        if not count:
            return args
        old = " ".join(args[:count])
        args = [*_now(old, names[old], ""), *args[count:]]


def _with_new_options(args: list[str], names: Mapping[str, str]) -> list[str]:
    command = next((place for place, word in enumerate(args) if word.startswith("-")), len(args))
    rows: dict[str, tuple[int, str]] = {}
    for key, now in sorted(names.items(), key=lambda row: row[0].count(" ")):  # those of a command before a group's
        *words, option = key.split()
        if option.startswith("--") and len(words) <= command and args[: len(words)] == words:
            rows[option] = (len(words), now)
    found, rest = [], list(args)
    while rest and rest[0] != "--":
        option, equals, value = (word := rest.pop(0)).partition("=")
        if option not in rows:
            found.append(word)
            continue
        depth, now = rows[option]
        if "{}" in now and not equals and rest:
            value = rest.pop(0)
        words = _now(option, now, value)
        if "{}" not in now and equals:
            words[-1] += f"={value}"
        options = (place for place, word in enumerate(found) if word.startswith("-"))
        place = depth if now[0].isalpha() else next(options, len(found)) if now == "{}" else len(found)
        found[place:place] = words
    return [*found, *rest]


def _now(old: str, now: str, value: str) -> list[str]:
    if isinstance(now, Gone):
        raise UserError(f"{old}: {now}")
    words = [word.replace("{}", value) for word in now.split()]
    click.echo(f"{old}: is {' '.join(words)} now", err=True)
    return words
