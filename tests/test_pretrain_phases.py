"""`lazyformer pretrain` in two phases, and from a trained model: what it starts, and that it goes on to the bit."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner
from fairseq.trainer import Trainer
from helpers import ROOT, assert_equal_state, stopped_at, train_here, train_words, updates_of
from hydra import compose, initialize_config_dir
from in_process import dry_run, parsed
from omegaconf import OmegaConf

from lazyformer_fairseq.arguments import CONFIGS, options_by_name
from lazyformer_fairseq.child_process import CommandResult
from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.checkpoints import read_weights
from lazyformer_fairseq.evaluation.export import export
from lazyformer_fairseq.evaluation.planning.job import job_of_yaml
from lazyformer_fairseq.fairseq_plugin.launcher.launch import Launch
from lazyformer_fairseq.fairseq_plugin.launcher.recipes import RECIPES, longformer_phases
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.language_modeling.evaluate import load_model
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import plan

SIZES = (
    "--encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --sublayer-pattern sffl "
    "--max-positions 64 --num-workers 0 --disable-validation --save-interval-updates 2 --dropout 0.1"
)
PHASE1 = "--tokens-per-sample 16 --sequences-per-update 4 --max-update 5 --lr 1e-2"
PHASE2 = "--tokens-per-sample 32 --sequences-per-update 2 --max-update 4 --lr 5e-3"


# --- Recipes


def plain(value: object) -> object:
    """A setting, as YAML and as a word of a command line have it."""
    value = value[0] if isinstance(value, list) else value
    if value in ("", True):  # of a flag
        return True
    try:
        return float(value)
    except ValueError:
        return value.replace(" ", "")


@pytest.mark.parametrize("name", ["table5", "laptop", "phase1", "phase2"])
def test_options_and_yaml_are_the_same_recipe(name):
    recipe, configs = RECIPES[name], CONFIGS / "pretraining"
    given = options_by_name(shlex.split(recipe.options))
    given |= {"max_update": recipe.updates, "sequences_per_update": recipe.sequences}
    given["tokens_per_sample"] = recipe.tokens or 512
    with initialize_config_dir(str(configs), version_base="1.1"):
        composed = compose("bert_base", overrides=[f"recipe={name}"])
    sections = ("common", "task", "dataset", "optimizer", "lr_scheduler", "optimization", "checkpoint", "model")
    parts = {
        section: OmegaConf.to_container(composed[section], resolve=section != "checkpoint") for section in sections
    }
    written = {key: value for part in parts.values() for key, value in part.items() if key != "_name"}
    written |= {"optimizer": parts["optimizer"]["_name"], "lr_scheduler": parts["lr_scheduler"]["_name"]}
    of_launch = {"save_interval_updates", "keep_interval_updates", "keep_updates_list"} if name == "table5" else set()
    for option in given.keys() - of_launch:
        assert plain(written[option]) == plain(given[option]), option
    own = OmegaConf.to_container(OmegaConf.load(configs / "recipe" / f"{name}.yaml"))
    own.pop("defaults", None)
    assert {key for part in own.values() for key in part} - {"_name", "batch_size"} <= given.keys()


@pytest.mark.parametrize(
    ("phase", "sizes"), [("phase1", (128, 65_536, 7_038, 59.0)), ("phase2", (512, 32_768, 1_563, 26.2))]
)
def test_the_papers_sizes(phase, sizes):
    job = job_of_yaml(CONFIGS / "pretraining" / "par_bert_base.yaml", [f"recipe={phase}"])
    assert (job.time, job.per_update, job.max_update, round(job.tokens / 1e9, 1)) == sizes
    assert job.checkpoints == 5


# --- The command


@pytest.fixture
def start(tmp_path, monkeypatch):
    """``start(data, ...)``: the command, which trains in this process. Its update number ``.kill_at`` kills it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lazyformer_fairseq.fairseq_plugin.launcher.launch.count_gpus", lambda: 0)

    def become(launch: Launch, module: str, words: list[str]) -> None:
        assert module == "lazyformer_fairseq.fairseq_plugin.launcher.train"
        train_here(*words)

    def as_a_process(command: list[str]) -> CommandResult:
        assert command[1:4] == ["-m", "lazyformer_fairseq.cli", "pretrain"]
        started.append(Path(options_by_name(command)["save_dir"]).name)
        try:
            main(command[3:], standalone_mode=False)
        except _Killed:
            return CommandResult(-signal.SIGKILL)
        return CommandResult(0)

    train_step, started, updates = Trainer.train_step, [], []

    def train_step_or_die(trainer, samples, *more):
        updates.append(trainer.get_num_updates())
        if len(updates) == run.kill_at:
            raise _Killed
        return train_step(trainer, samples, *more)

    monkeypatch.setattr(Trainer, "train_step", train_step_or_die)
    monkeypatch.setattr(Launch, "_exec", become)
    monkeypatch.setattr("lazyformer_fairseq.fairseq_plugin.launcher.phases.run_forwarding_signals", as_a_process)

    def run(data: Path, *more: str, phase1: str = PHASE1, phase2: str = PHASE2, out: str = "out"):
        started.clear()
        updates.clear()
        words = ["lazyformer_m2x6_s", str(data), "--save-dir", out, *SIZES.split(), "--phase1", phase1]
        return CliRunner().invoke(main, ["pretrain", *words, "--recipe", "phases", "--phase2", phase2, *more])

    run.kill_at, run.started, run.updates = None, started, updates
    return run


class _Killed(BaseException):
    """In place of a SIGKILL: nothing is saved any more."""


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def weights(folder: str) -> dict[str, torch.Tensor]:
    return torch.load(Path(folder) / "checkpoint_last.pt")["model"]


@pytest.mark.slow
def test_killed_anywhere_it_goes_on_to_the_bit(start, data_folder):
    done = start(data_folder)
    assert (done.exit_code, start.started) == (0, ["phase1", "phase2"]), done.output
    assert "lazyformer finetune out/phase2/checkpoint_last.pt --data GLUE_DATA --output RESULTS" in done.output
    assert start.updates == [0, 1, 2, 3, 4, 0, 1, 2, 3], "phase 2 counts from 0"
    state = torch.load("out/phase2/checkpoint_last.pt")
    assert (updates_of(state), state["cfg"]["task"]["tokens_per_sample"]) == (4, 32)
    assert state["cfg"]["optimizer"]["_name"] == "nvlamb"

    for kill_at, before, redone in ((4, ["phase1"], ["phase1", "phase2"]), (9, ["phase1", "phase2"], ["phase2"])):
        out, start.kill_at = f"killed_{kill_at}", kill_at
        killed = start(data_folder, out=out)
        assert (killed.exit_code, start.started) == (137, before)
        assert f"{before[-1]}: ended with exit code -9; rerun to resume" in killed.output
        start.kill_at = None
        other = start(data_folder, phase1=PHASE1.replace("1e-2", "2e-2"), out=out)
        differs = "(phase1 --lr is '1e-2' there, '2e-2' here)"
        assert f"{out} contains a pre-training run with different settings {differs}" in str(other.exception)
        again = start(data_folder, "--log-interval", "3", out=out)  # which changes nothing of what is trained
        assert (again.exit_code, start.started) == (0, redone), again.output
        assert start.updates[0] == 2, "it resumes from what it saved at update 2"
        assert_equal_state(weights("out/phase2"), weights(f"{out}/phase2"))

    shutil.copytree("out", "lost")
    shutil.rmtree("lost/phase2")
    cut_short(Path("lost/phase1/checkpoint_last.pt"))
    said = str(start(data_folder, out="lost").exception)
    assert "lost/phase1/checkpoint_last.pt: truncated, damaged" in said and start.started == []
    assert "restore it, or remove lost/phase1/finished.json" in said
    Path("lost/phase1/finished.json").unlink()
    assert start(data_folder, out="lost").exit_code == 0 and start.updates[0] == 4
    assert_equal_state(weights("lost/phase2"), weights("out/phase2"))

    shutil.copytree("out", "swapped")
    for old, new in (("phase1", "phase3"), ("phase2", "phase1"), ("phase3", "phase2")):
        Path("swapped", old).rename(Path("swapped", new))
    said = str(start(data_folder, out="swapped").exception)
    assert "swapped/phase1/checkpoint_last.pt is not a checkpoint of phase1: its tokens_per_sample is 32, but" in said
    shutil.copytree("out", "forged")
    shutil.copy("forged/phase2/checkpoint_last.pt", "forged/phase1/checkpoint_last.pt")
    assert "forged/phase1/checkpoint_last.pt is not a checkpoint of phase1" in str(
        start(data_folder, out="forged").exception
    )
    shutil.copy("out/phase1/checkpoint_1_2.pt", "forged/phase1/checkpoint_last.pt")
    shutil.rmtree("forged/phase2")
    assert start(data_folder, out="forged").exit_code == 0 and start.updates[0] == 2, "whatever finished.json says"

    (Path("out") / "phase1" / "finished.json").unlink()  # killed between the phases
    assert start(data_folder).exit_code == 0 and start.updates == []
    assert start(data_folder, "--batch-size", "2").exit_code == 0 and start.started == []


def test_a_finished_pretraining_makes_no_more_updates(start, data_folder):
    """The command alone, which has no record of phases."""
    sizes = "--tokens-per-sample 16 --sequences-per-update 4 --max-update 3 --save-dir out"
    for _ in range(2):
        words = ["pretrain", "lazyformer_m2x6_s", str(data_folder), *SIZES.split(), *sizes.split()]
        done = CliRunner().invoke(main, words)
        assert (done.exit_code, start.updates) == (0, [0, 1, 2]), done.output
    assert "nothing is left to do: out/checkpoint_last.pt has completed 3 updates" in Path("out/train.log").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_in_the_last_update_of_a_phase_starts_no_other(monkeypatch, tmp_path, number, code):
    run = Mock(return_value=CommandResult(0, (number,)))
    monkeypatch.setattr("lazyformer_fairseq.fairseq_plugin.launcher.phases.run_forwarding_signals", run)
    (tmp_path / "dict.txt").touch()
    words = ["pretrain", "bert_base", str(tmp_path), "--recipe", "phases", "--save-dir", str(tmp_path / "out")]
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, run.call_count) == (code, 1) and "phase1: stopped; rerun to resume" in done.output


@pytest.mark.slow
def test_an_end_before_the_last_update_is_no_finish(start, data_folder):
    early = start(data_folder, "--stop-min-lr", "1")
    assert "phase1 ended before its last update; to resume, rerun" in str(early.exception)
    assert not Path("out/phase1/finished.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--recipe phase1", "--recipe phase1: bert_base.yaml is a YAML file; write recipe=phase1"),
        ("--phase1 '--recipe phase1'", "--recipe: each phase has its own"),
        ("--finetune-from-model x.pt", "--finetune-from-model: each phase starts from the previous one; to start"),
        ("--phase2 '--finetune-from-model x.pt'", "--finetune-from-model: each phase starts from the previous one"),
        ("--phase1 '--save-dir x'", "--save-dir: set this option once"),
        ("""--phase1 "--lr '3" """, "--phase1 --lr '3: No closing quotation"),
    ],
)
def test_what_cannot_be_is_said(data_folder, words, message):
    is_yaml = "YAML" in message
    command = ["pretrain", "bert_base.yaml" if is_yaml else "bert_base", str(data_folder)]
    if not is_yaml:
        command += ["--recipe", "phases"]
    with pytest.raises(UserError, match=re.escape(message)):
        main([*command, *shlex.split(words), "--dry-run"], standalone_mode=False)


@pytest.mark.slow
def test_the_script_in_miniature_with_real_signals(data_folder, tmp_path):
    small = f"--phase1 '{PHASE1} --max-update 100' --phase2 '{PHASE2} --max-update 2' --save-interval-updates 20"
    small += " --log-seconds 0"
    script = str(ROOT / "scripts" / "pretrain_par_bert.sh")
    command = ["bash", script, str(data_folder), *SIZES.split(), *shlex.split(small)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        assert any("Saved checkpoint" in line and "@ 20 updates" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert process.returncode == 75
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-2000:]
    assert (tmp_path / "checkpoints" / "par_bert_base_phases" / "phase2" / "finished.json").is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process does not hear of its parent's end")
def test_a_killed_parent_ends_its_command(tmp_path):
    """Else the training would go on, unseen, and its folder stay locked."""
    child = (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); print('ready', flush=True); "
        "signal.sigwait({signal.SIGTERM}); print('heard', flush=True)"
    )
    program = (
        "import sys; from lazyformer_fairseq.child_process import run_forwarding_signals\n"
        f"run_forwarding_signals([sys.executable, '-c', {child!r}])"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
        assert process.stdout.readline() == "heard\n"


# --- `lazyformer pretrain FOLDER DATA`, which goes on with a trained model

TINY = "--encoder-embed-dim 16 --encoder-attention-heads 2 --encoder-ffn-embed-dim 32 --max-positions 32 --dropout 0"
V_PROJ = "encoder.sentence_encoder.sublayers.2.inner.v_proj.weight"


def train(words: list[str], save_dir: Path) -> dict:
    """fairseq-train in this process; returns the last checkpoint."""
    train_here(*words, "--save-dir", save_dir)
    return torch.load(save_dir / "checkpoint_last.pt", weights_only=True)


@pytest.fixture(scope="module")
def folders(data_folder, tmp_path_factory) -> Path:
    """`original`: checkpoints of a tiny BERT; `warm`: as `lazyformer import` makes another pattern of one.

    (The weights are fresh: whose they are makes no difference to a launch.)
    """
    folder = tmp_path_factory.mktemp("warm start")
    options = (
        f"--batch-size 4 --max-update 1 --disable-validation --criterion masked_lm_accuracy --arch bert_base {TINY}"
    )
    for name, pattern in (("original", "(sf)x2"), ("new", "M2")):
        train([*train_words(data_folder, options, folder), "--sublayer-pattern", pattern], folder / name)
    export(folder / "new", folder / "warm")
    return folder


def words_of(folders: Path, data: object, *more: str) -> list[str]:
    """The arguments of fairseq-train."""
    return dry_run(folders / "warm", data, "--distill", folders / "original", *more)[1]


def test_it_is_a_tenth_of_pretraining_on_the_model_of_the_folder(without_gpus, folders):
    cfg = parsed(words_of(folders, "some data", "--lr", "5e-5"))
    assert (cfg.task.data, cfg.task.tokens_per_sample) == ("some data", 32)
    assert (cfg.model.sublayer_pattern, cfg.model.encoder_embed_dim, cfg.model.dropout) == ("M2", 16, 0.0)
    assert (cfg.criterion._name, cfg.criterion.distill) == ("continued_masked_lm", str(folders / "original"))
    assert cfg.checkpoint.finetune_from_model == str(folders / "warm" / "model.safetensors")
    assert (cfg.optimization.max_update, cfg.optimization.lr) == (100_000, [5e-5])
    assert (cfg.task.sequences_per_update, cfg.checkpoint.save_dir) == (256, "checkpoints/warm")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere data", "nowhere: no such arch or folder; docs/patterns.md#named-models lists all"),
        ("data data", "data/model.safetensors: no such file or folder"),
        ("warm nowhere", "nowhere is not a folder"),
        ("warm data --distill nowhere", "nowhere: no such file or folder"),
        ("bert_base data --distill warm", "--distill requires a trained model's folder, but bert_base is not one"),
        ("warm data --recipe phase1", "--recipe phase1: warm is a trained model's folder"),
        ("warm data --fp16", "--fp16: use --precision fp16"),
        ("warm data --bf16", "--bf16: use --precision bf16"),
    ],
)
def test_what_cannot_go_on_is_said(without_gpus, folders, tmp_path, arguments, message):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dict.txt").touch()
    (tmp_path / "warm").symlink_to(folders / "warm")
    with pytest.raises(UserError, match=message):
        main(["pretrain", *arguments.split()], standalone_mode=False)


def test_a_killed_run_ends_with_the_same_bits(without_gpus, folders, data_folder, tmp_path):
    small = "--sequences-per-update 4 --batch-size 4 --max-update 6 --num-workers 0 --disable-validation --lr 1e-2"
    words = words_of(folders, data_folder, *small.split(), "--dropout", "0.1", "--save-interval-updates", "2")
    at_once = train(words, tmp_path / "at once")
    with stopped_at(3):
        train(words, tmp_path / "killed")
    assert updates_of(tmp_path / "killed" / "checkpoint_last.pt") == 2
    resumed = train(words, tmp_path / "killed")
    assert updates_of(resumed) == 6
    assert_equal_state(resumed["model"], at_once["model"])
    fresh = read_weights(folders / "warm" / "model.safetensors")[0]
    assert list(at_once["model"]) == list(torch.load(folders / "new" / "checkpoint_last.pt")["model"])
    assert not torch.equal(at_once["model"][V_PROJ], fresh[V_PROJ])  # a plain model, and it has learned
    LazyFormerModel.from_pretrained(tmp_path / "killed").fill_mask("the <mask> is here")


# --- Longformer's five phases

TABLE_12 = [
    (2_048, 2.5e-4, 32, 32, 430_000, 10_000),
    (4_096, 1.25e-4, 64, 32, 50_000, 5_000),
    (8_192, 6.25e-5, 128, 16, 50_000, 5_000),
    (16_384, 3.125e-5, 256, 16, 35_000, 3_500),
    (23_040, 1.5625e-5, 512, 16, 5_000, 500),
]
NAMES = ("tgt_len", "lr", "window", "sequences_per_update", "max_update", "warmup_updates")


def window_of(pattern: str) -> int:
    return dict(plan(pattern)[0].settings)["window"]


def schedule(phases: dict[str, dict[str, str]]) -> list[tuple[float, ...]]:
    rows = [options | {"window": window_of(options["sublayer_pattern"])} for options in phases.values()]
    return [tuple(float(row[name]) for name in NAMES) for row in rows]


def test_longformers_phases_are_table_12():
    pattern = CAUSAL_ARCHITECTURES["longformer_small"].sublayer_pattern
    phases = longformer_phases(pattern, {})
    assert schedule(phases) == TABLE_12
    last = plan(phases["phase5"]["sublayer_pattern"])
    assert max(dict(each.settings).get("window", 0) for each in last) == 8_192
    assert [dict(each.settings).get("dilation") for each in last] == [
        dict(each.settings).get("dilation") for each in plan(pattern)
    ]
    with pytest.raises(UserError, match=r"doubles windows, but \(sf\)x2 has none"):
        longformer_phases("(sf)x2", {})
    short = longformer_phases(pattern, {"max_update": "5"})
    assert {row["warmup_updates"] for row in short.values()} == {"1"}, "inverse_sqrt divides by it"
    with pytest.raises(UserError, match="--max-update 1e3: must be a whole number"):
        longformer_phases(pattern, {"max_update": "1e3"})


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", ("8", "0.001", {"warmup_updates": "3"})),
        ("wsd", ("8", "0.001", {"warmup_updates": "3"})),
        ("linear_warmup", ("8", "0.001", {"warmup_ratio": "0.1"})),
        ("polynomial_warmup", ("8", "0.001", {"warmup_ratio": "0.1"})),
        ("pass_through", ("8", "0.001", {})),
    ],
)
def test_a_phase_warms_up_as_its_schedule_counts(start, lm_data, monkeypatch, schedule, expected):
    """In updates or as a share; for one phase alone, too."""
    commands = []
    end = Mock(side_effect=lambda command: commands.append(options_by_name(command)) or CommandResult(0))
    monkeypatch.setattr("lazyformer_fairseq.fairseq_plugin.launcher.phases.run_forwarding_signals", end)
    words = "--tgt-len 8 --lr 1e-3 --max-update 30 --recipe longformer --dry-run"
    for more in (["--lr-scheduler", schedule], ["--phase1", f"--lr-scheduler {schedule}"]):
        commands.clear()
        main(["pretrain", "longformer_small_tiny", str(lm_data), *words.split(), *more], standalone_mode=False)
        first, second = commands[:2]
        warmup = {name: value for name, value in first.items() if name.startswith("warmup")}
        assert (first["tgt_len"], first["lr"], warmup) == expected
        assert ("warmup_updates" in second) == (more[0] == "--phase1" or "warmup_updates" in warmup)


def test_one_command_trains_all_phases_and_each_checkpoint_has_its_own_pattern(start, lm_data):
    words = "--tgt-len 8 --lr 1e-3 --max-update 2 --batch-size 2 --sequences-per-update 2 --num-workers 0"
    words = f"{words} --disable-validation --sublayer-pattern s[window=2]s[window=3]f --decoder-embed-dim 16"
    command = ["pretrain", "longformer_small_tiny", str(lm_data), *words.split(), "--save-dir", "out"]
    command += ["--mem-len", "0", "--recipe", "longformer", "--phase5", "--max-update 3"]
    start.kill_at = 4  # in phase 2
    killed = CliRunner().invoke(main, command)
    assert (killed.exit_code, start.started) == (137, ["phase1", "phase2"]), killed.output
    start.kill_at = None
    done = CliRunner().invoke(main, command)
    assert (done.exit_code, start.started[2:]) == (0, ["phase2", "phase3", "phase4", "phase5"]), done.output
    assert f"lazyformer lm evaluate out/phase5/checkpoint_last.pt {lm_data}" in done.output
    log = []
    for number in range(1, 6):
        path = Path(f"out/phase{number}/checkpoint_last.pt")
        state = torch.load(path)
        cfg = state["cfg"]
        windows = window_of(cfg["model"]["sublayer_pattern"])
        log.append((cfg["task"]["tgt_len"], cfg["optimization"]["lr"][0], windows, updates_of(state)))
        model = load_model(path, lm_data, "cpu")[0]
        assert [row.values["window"] for row in model.decoder.plan if row.kind.letter == "s"] == [
            2 * 2 ** (number - 1), 3 * 2 ** (number - 1)
        ]  # fmt: skip
    assert log == [(8, 1e-3, 2, 2), (16, 5e-4, 4, 2), (32, 2.5e-4, 8, 2), (64, 1.25e-4, 16, 2), (90, 6.25e-5, 32, 3)]
    first, second = (weights(f"out/phase{number}")["decoder.sublayers.0.inner.out_proj.weight"] for number in (1, 2))
    assert 0 < (first - second).abs().max() < 0.01, "phase 2 goes on with the weights of phase 1"


@pytest.mark.slow
@pytest.mark.reliability
def test_killed_in_any_update_of_any_phase_it_ends_as_if_nothing_had_been(start, lm_data):
    words = "--tgt-len 8 --lr 1e-3 --max-update 3 --batch-size 2 --sequences-per-update 2 --num-workers 0 --dropout 0.1"
    words += " --disable-validation --sublayer-pattern s[window=2]fs[window=3]lf --decoder-embed-dim 16 --mem-len 0"
    words += " --save-interval-updates 2 --recipe longformer"

    def train(out: str) -> int:
        start.updates.clear()
        command = ["pretrain", "longformer_small_tiny", str(lm_data), *words.split(), "--save-dir", out]
        return CliRunner().invoke(main, command).exit_code

    assert train("whole") == 0 and len(start.updates) == 15
    for update in range(1, 16):
        start.kill_at = update
        assert train(f"killed_{update}") == 137
        start.kill_at = None
        assert train(f"killed_{update}") == 0
        assert_equal_state(weights(f"killed_{update}/phase5"), weights("whole/phase5"))
