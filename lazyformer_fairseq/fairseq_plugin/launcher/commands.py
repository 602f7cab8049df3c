"""The command ``lazyformer pretrain``."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.arguments import (
    find_config,
    options_by_name,
    refuse_missing,
    refuse_missing_folders,
    to_arguments,
)
from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.evaluation.planning import ON_PROCESSOR
from lazyformer_fairseq.extras import needs_fairseq
from lazyformer_fairseq.fairseq_plugin.launcher.launch import Launch, words_of_options
from lazyformer_fairseq.fairseq_plugin.launcher.phases import Phase, pretrain_in_phases
from lazyformer_fairseq.fairseq_plugin.launcher.recipes import (
    CAUSAL_CHOICES,
    LONGFORMER,
    LONGFORMER_PHASE,
    PHASES,
    RECIPES,
    SAVES,
    causal_options,
    drop_unsupported_options,
    longformer_phases,
)
from lazyformer_fairseq.options import Command, option, refuse_out_of_bounds, with_options_from
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES, MASKED_LM
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER
from lazyformer_fairseq.storage.atomic import refuse_unwritable
from lazyformer_fairseq.training.laptop import LAPTOP_ARCH, laptop

WEIGHTS = "model.safetensors"
MASKED_CHOICES = ("table5", "laptop", *PHASES, "phases")


@dataclass(frozen=True)
class Pretraining(Launch):
    """Options of ``lazyformer pretrain``."""

    per_gpu: Optional[int] = option(
        None,
        "Maximum number of sequences per process in one forward pass.",
        "--sequences-per-gpu",
        "--batch-size",
        "--max-sentences",
        low=1,
        shown="as many as fit in GPU memory (see --fit); otherwise 16 (causal: an eighth of an update), or 4 on a CPU",
    )
    sequences_per_update: Optional[int] = option(
        None,
        "Number of sequences per update over all processes; must be a multiple of nodes x gpus.",
        low=1,
        shown="set by the recipe (256 for table5) or by the causal arch",
    )
    recipe: Optional[str] = option(
        None,
        "Training recipe; see above. The last five are for causal archs.",
        choices=(*MASKED_CHOICES, *CAUSAL_CHOICES),
        shown="table5, or the causal arch's own recipe",
    )
    without: tuple[str, ...] = option((), "Options to omit from --recipe laptop.", metavar="NAME,...")
    phase1: str = option(
        "",
        "With --recipe phases or longformer: options for phase 1 only, such as '--max-update 9'.",
        metavar="'OPTIONS'",
    )
    phase2: str = option("", "Options for phase 2 only.", metavar="'OPTIONS'")
    phase3: str = option("", "Options for phase 3 only, with --recipe longformer.", metavar="'OPTIONS'")
    phase4: str = option("", "Options for phase 4 only, with --recipe longformer.", metavar="'OPTIONS'")
    phase5: str = option("", "Options for phase 5 only, with --recipe longformer.", metavar="'OPTIONS'")
    distill: Optional[Path] = option(
        None,
        "Teacher to distill from, if ARCH is a folder: a checkpoint, or a folder that contains one.",
        metavar="ORIGINAL",
    )


@click.command(cls=Command, context_settings={"ignore_unknown_options": True})
@click.argument("arch")
@click.argument("data")
@click.argument("given", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF FAIRSEQ-TRAIN]...")
@with_options_from(Pretraining, "run")
def pretrain(arch: str, data: str, given: tuple[str, ...], run: Pretraining) -> None:
    r"""Pre-train ARCH (lazyformer_m2x6_s, bert_base, ...) on DATA as in the LazyFormer paper (Table 5).

    \b
    The options that most runs need, with their defaults; docs/options.md lists the others:
      --save-dir DIR            folder for the checkpoints and the log  [checkpoints/ARCH]
      --sublayer-pattern TEXT   a different pattern, such as '(sff)x5 (f)x9'  [ARCH's]
      --max-update N            number of updates  [1000000]
      --lr RATE                 peak learning rate  [1e-4]
      --warmup-ratio RATIO      fraction of the updates spent on warm-up  [0.01]
      --tokens-per-sample N     tokens per sequence  [512]
      --sequences-per-update N  sequences per update, over all GPUs  [256]
      --batch-size N            maximum sequences per forward pass  [as many as fit]
      --precision NAME          fp32, bf16 or fp16  [bf16 if supported; else fp16 on GPUs, fp32 on a CPU]
      --seed N                  seed for weights, batches and masks  [1]

    DATA is a folder of binarized data, or several folders as a:b:c. Training runs on all of the machine's GPUs, or on
    its CPU, for 1,000,000 updates of 256 sequences of 512 tokens with Adam (0.9, 0.999), epsilon 1e-6, peak learning
    rate 1e-4, 1% warm-up, linear decay to zero, gradient clipping at 1.0, dropout 0.1 and weight decay 0.01. Options of
    fairseq-train may follow and take precedence.

    \b
    --recipe laptop: 20,000 updates of 2 x 512 tokens, Muon, for one core and a small arch, such as bert_laptop
    --recipe phase1: 7,038 updates of 65,536 x 128 tokens, LAMB, peak learning rate 6e-3, 28.43% warm-up
    --recipe phase2: 1,563 updates of 32,768 x 512 tokens, LAMB, peak learning rate 4e-3, 12.8% warm-up
    --recipe phases: phase1, then phase2 from phase1's weights, in DIR/phase1 and DIR/phase2; see docs/reproduce.md

    If you rerun the command, it resumes from its last checkpoint on however many GPUs are available. It saves a
    checkpoint every 5,000 updates and keeps the last three. It also keeps the checkpoint of every 100,000th update
    permanently (--keep-updates-list), because the paper fine-tunes some of these. On SIGTERM, SIGUSR1 or Ctrl-C it
    finishes the current update, saves, and exits with code 75 (Ctrl-C: 130). On a CPU, Ctrl-C abandons the current
    update and saves the state from before it.

    On data written by `lazyformer corpus`, --checkpoint-words 1M,2M,5M also saves the encoder after about 1, 2 and 5
    million words, and --word-budget 100M rejects a run that would read more words, counting repetitions.

    The screen shows a summary of the run (on a CPU, with a time estimate), then one line per minute (--log-seconds 60).
    All other output goes to train.log in --save-dir. --log-seconds 0 shows fairseq-train's output instead.

    ARCH may be a folder written by `lazyformer import` or `lazyformer export`. Masked-LM training of its model then
    continues for 100,000 updates, a tenth of a pre-training run. With --distill the model also learns from ORIGINAL's
    token distribution (--distill-words-weight, --distill-temperature) and last attention distribution
    (--distill-attention-weight). See docs/huggingface.md.

    ARCH may be a YAML file, either your own or one from this package (bert_base.yaml). The command then runs
    fairseq-hydra-train with a batch size for this machine. Settings may follow, such as optimization.max_update=1000 or
    recipe=phase1.

    A causal ARCH (par_transformer_base, ...) trains on data written by `lazyformer lm prepare` in the setting of the
    PAR Transformer paper: segments and memory of 192 tokens, 256 rows per update and 40,000 updates (which the paper
    states for the base models). *_large uses 384 tokens, 128 rows and 100,000 updates. *_24b uses 512 tokens and 96
    rows, which keeps all updates at 49,152 tokens (our choice; the paper does not say). longformer_small uses 32 rows
    of 2,048 tokens without memory, as in the first phase of the Longformer paper (Table 12), and
    sparse_transformer_base uses 4 rows of 12,288 tokens, the Sparse Transformer's context. Dropout is set by the arch
    (0.1 for the base models).

    \b
    --recipe nvidia: the default for the paper's models, from the code linked in its footnote: LAMB without bias
        correction, 1,000 updates of warm-up to 0.01, cosine decay to 0.001, clipping at 0.25, and streams with a
        different start in each epoch; *_large: 16,000 updates of warm-up, decay to 0.0001, weights from N(0, 0.005)
    --recipe transformer-xl: the default for other papers' archs: Transformer-XL's Adam, 1,000 updates of warm-up to
        2.5e-4, cosine decay to zero, clipping at 0.25
    --recipe igpt: the default for igpt_s, igpt_m and igpt_l: Image GPT's Adam, 9,609 updates of warm-up to 3e-3
        (igpt_l: 1e-3, our choice), cosine decay to zero
    --recipe longformer: for longformer_small, all five phases of the Longformer paper (Table 12), in DIR/phase1 to
        DIR/phase5, each initialized from the weights of the previous one. From phase to phase, windows and segments
        double (2,048 to 23,040 tokens) and the learning rate halves (2.5e-4 to 1.5625e-5). --tgt-len, --lr and
        --sublayer-pattern apply to the first phase
    --recipe longformer-phase: the optimizer for a single phase of Longformer

    Rows are streams through the text, each with its own memory; the options call them sequences. On fewer GPUs, an
    update consists of several consecutive segments of fewer streams. The command saves a checkpoint, including the
    memory, every 1,000 updates. If the number of streams has changed, a resumed run starts with empty memory. To
    evaluate: lazyformer lm evaluate CHECKPOINT DATA --tgt-len 64 --mem-len 640 --clamp-len 400 --same-length
    """
    needs_fairseq("lazyformer pretrain", "transformers' Trainer (see docs/trainers.md)")
    from lazyformer_fairseq.fairseq_plugin.option_bounds import BOUNDS

    wanted = options_by_name(given)
    refuse_out_of_bounds(wanted, BOUNDS)
    if "save_dir" in wanted and not run.dry_run:
        refuse_unwritable(Path(wanted["save_dir"]))
    known = [*ARCHITECTURES, *CAUSAL_ARCHITECTURES]
    warm = None
    if arch not in known and Path(arch).is_dir():
        warm = Path(arch)
    of_phases = {name: value for name, value in vars(run).items() if name.startswith("phase")}
    _check_option_combinations(arch, data, run, warm, of_phases)
    if arch.endswith(".yaml"):
        _from_yaml(arch, data, given, run)
        return
    if warm is None and arch not in known:
        raise UserError(
            f"{arch}: no such arch or folder{nearest(arch, known)}; docs/patterns.md#named-models lists all archs; to "
            "train your own pattern, use --sublayer-pattern"
        )

    is_causal = arch in CAUSAL_ARCHITECTURES
    refuse_missing(run.distill)
    if run.recipe and warm:
        raise UserError(
            f"--recipe {run.recipe}: {arch} is a trained model's folder, and its training always continues with the "
            "table5 settings; omit --recipe"
        )
    choices = CAUSAL_CHOICES if is_causal else MASKED_CHOICES
    if run.recipe and run.recipe not in choices:
        trained_as = "causal" if is_causal else "masked"
        raise UserError(f"--recipe {run.recipe}: {arch} is a {trained_as} language model; use {' or '.join(choices)}")
    if "sublayer_pattern" in wanted:
        plan(wanted["sublayer_pattern"], CAUSAL if is_causal else ENCODER)
    _refuse_missing(data, run)

    if run.recipe in ("phases", LONGFORMER):
        for_all = [*words_of_options(run, without=("recipe", *of_phases)), *given]
        if run.recipe == LONGFORMER:
            pattern = wanted.get("sublayer_pattern") or CAUSAL_ARCHITECTURES[arch].sublayer_pattern
            options = longformer_phases(pattern, options_by_name(for_all))
            phases = [Phase(name, LONGFORMER_PHASE, options[name], of_phases[name]) for name in options]
        else:
            phases = [Phase(name, recipe=name, options={}, own=of_phases[name]) for name in PHASES]
        pretrain_in_phases(arch, data, for_all, phases, run.dry_run)
    elif is_causal:
        _pretrain_causal(arch, data, given, run)
    else:
        _pretrain_masked(arch, warm, data, given, run)


def _check_option_combinations(
    arch: str,
    data: str,
    run: Pretraining,
    warm: Optional[Path],
    of_phases: dict[str, str],
) -> None:
    """Raise a UserError for options that require a different recipe or type of ARCH, or if DATA is a model's name."""
    if data in (*ARCHITECTURES, *CAUSAL_ARCHITECTURES) and not Path(data).is_dir():
        raise UserError(f"{data} is the name of a model, which must come first: lazyformer pretrain {data} {arch}")
    if run.distill and not warm:
        raise UserError(f"--distill requires a trained model's folder, but {arch} is not one")
    if run.without and run.recipe != "laptop":
        raise UserError(f"--without {','.join(run.without)} works only with --recipe laptop")
    its_phases = {"phases": PHASES, LONGFORMER: of_phases}.get(run.recipe, ())
    for name, value in of_phases.items():
        if value and name not in its_phases:
            recipes = LONGFORMER
            if name in PHASES:
                recipes = f"{LONGFORMER} or phases"
            raise UserError(f"--{name} works only with --recipe {recipes}")


def _pretrain_masked(arch: str, warm: Optional[Path], data: str, given: tuple[str, ...], run: Pretraining) -> None:
    """Pre-train an encoder, or continue training the model in the folder `warm`."""
    wanted = options_by_name(given)
    save_dir = wanted.get("save_dir") or f"checkpoints/{Path(arch).absolute().name}"
    if not warm:
        run = run.in_fast_precision(Path(save_dir))
    recipe = RECIPES["continue" if warm else run.recipe or "table5"]
    of_recipe = shlex.split(recipe.options)
    if run.recipe == "laptop":
        of_recipe = [*to_arguments(laptop(run.without, wanted)), *SAVES.split()]
    elif not (run.recipe or warm or run.found or run.dry_run):
        click.echo(f"no GPU found; {LAPTOP_ARCH} with --recipe laptop shows progress within minutes", err=True)
    of_recipe = drop_unsupported_options(of_recipe, wanted)
    sequences = run.sequences_per_update or recipe.sequences
    run.refuse_uneven(sequences)

    if warm:
        model = _options_of_model(warm)
        named = "bert_base"
        task = MASKED_LM
        criterion = "continued_masked_lm"
        at_once = 1
    else:
        model = ["--arch", arch]
        named = arch
        task = ARCHITECTURES[arch].task
        criterion = "masked_lm_accuracy"

    tokens = recipe.tokens or options_by_name(model).get("max_positions") or ARCHITECTURES[arch].max_positions or 512
    if not warm:
        at_once = max(1, 512 // tokens)
    at_once *= 16 if run.found else ON_PROCESSOR

    sizes = f"--tokens-per-sample {tokens} --max-update {recipe.updates} --sequences-per-update {sequences}".split()
    of_job = (*sizes, *model[2:], *of_recipe, *given)
    job = (named, None, data, of_job, run.sequences_per_update)
    batch = run.per_gpu or at_once
    if not run.distill:  # a teacher's memory is not estimated
        run.show_plan(job)
        batch = run.per_gpu or run.batch(job, at_once)

    options = f"""
        --task {task} --criterion {criterion}
        --batch-size {batch} --required-batch-size-multiple 1
        --no-epoch-checkpoints --num-workers 2 --log-format simple --seed 1"""
    words = [*model, *sizes, *of_recipe, *options.split(), "--save-dir", save_dir]
    if warm:
        words += ["--finetune-from-model", str(warm / WEIGHTS)]
    if run.distill:
        words += ["--distill", str(run.distill)]
    run.train(data, words, given)


def _pretrain_causal(arch: str, data: str, given: tuple[str, ...], run: Pretraining) -> None:
    known = CAUSAL_ARCHITECTURES[arch]
    rows = run.sequences_per_update or known.rows
    run.refuse_uneven(rows)
    of_recipe = drop_unsupported_options(causal_options(known, run.recipe).split(), options_by_name(given))
    job = (arch, None, data, (*of_recipe, *given), rows)
    run.show_plan(job)
    at_once = ON_PROCESSOR
    if run.found:
        at_once = -(-rows // 8)
    per_gpu = run.per_gpu or run.batch(job, at_once)
    options = f"""
        --task stream_language_modeling --tgt-len {known.tgt_len} --arch {arch} --criterion causal_lm
        --max-update {known.updates}
        --sequences-per-update {rows} --batch-size {per_gpu}
        --batch-size-valid 8 --required-batch-size-multiple 1 --save-dir checkpoints/{arch} --no-epoch-checkpoints
        --save-interval-updates 1000 --keep-interval-updates 3
        --num-workers 1 --log-format simple --log-interval 100 --seed 1"""
    run.train(data, [*options.split(), *of_recipe], given)


def _from_yaml(name: str, data: str, given: tuple[str, ...], run: Pretraining) -> None:
    if run.recipe:
        behind = run.recipe.replace("-", "_")
        raise UserError(f"--recipe {run.recipe}: {name} is a YAML file; write recipe={behind} after DATA instead")
    config = find_config(name)
    per_gpu = run.per_gpu
    per_update = run.sequences_per_update
    if run.world_size > 1:
        from lazyformer_fairseq.evaluation.planning.job import compose_yaml  # imports torch

        per_update_there = compose_yaml(config, given)["task"].get("sequences_per_update")
        run.refuse_uneven(per_update or per_update_there or run.world_size)
    _refuse_missing(data, run)
    job = (None, config, data, given, per_update)
    run.show_plan(job)
    if per_gpu is None and not any(word.startswith("dataset.batch_size=") for word in given):
        per_gpu = run.batch(job, 0) or None  # None: use the file's batch size
    sizes = {"task.data": data, "dataset.batch_size": per_gpu, "task.sequences_per_update": per_update}
    known_sizes = {name: size for name, size in sizes.items() if size is not None}
    run.train_from_yaml(config, known_sizes, given)


def _refuse_missing(data: str, run: Launch) -> None:
    if not run.dry_run:  # a dry run may be for another machine
        refuse_missing_folders(data)


def _options_of_model(warm: Path) -> list[str]:
    """Return the fairseq-train options that build a folder's model.

    Raises:
        UserError: the folder has no model.
    """
    refuse_missing(warm / WEIGHTS)
    from lazyformer_fairseq.evaluation.checkpoints import CONFIG_FILE, read_config

    return to_arguments({"arch": "lazyformer", **vars(read_config(warm / CONFIG_FILE))})
