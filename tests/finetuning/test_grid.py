"""Which runs a grid has, the command of each, and what is refused before anything trains."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from glue_grids import glue_grid
from helpers import ROOT, toy_texts, train_tokenizer
from hydra import compose, initialize_config_dir
from in_process import config_of
from squad_grids import START

from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning import commands
from lazyformer_fairseq.finetuning.benchmark import PAPER_TASKS, PROTOCOLS
from lazyformer_fairseq.finetuning.grid import Grid, load_start_models, name_checkpoints
from lazyformer_fairseq.finetuning.launch import choose_epochs, grid_and_executor
from lazyformer_fairseq.finetuning.queue import choose_executor
from lazyformer_fairseq.finetuning.settings import GridSettings
from lazyformer_fairseq.finetuning.tasks.glue import BENCHMARK as GLUE


@pytest.fixture
def grid(prepared, tmp_path):
    """``grid("CoLA", "RTE", lrs=...)``: a grid of one model."""

    def build(*tasks: str, lrs=(2e-5, 3e-5), seeds=(1, 2), epochs=10, **more) -> Grid:
        return glue_grid(tmp_path / "out", START, prepared, tasks, epochs, lrs=lrs, seeds=seeds, **more)

    return build


def test_every_combination_is_a_run_and_the_grid_on_disk_grows(grid, tmp_path):
    runs = grid("CoLA", "RTE").runs
    assert len({run.folder for run in runs}) == len(runs) == 8
    assert runs[0].folder.parts[-4:] == ("runs", "m", "CoLA", "lr2e-05_seed1")
    assert len({json.dumps(run.settings) for run in runs}) == 8
    grid("CoLA", lrs=(2e-5,)).write()
    grid("RTE", lrs=(3e-5,), seeds=(2, 3), epochs=5).write()
    found = json.loads((tmp_path / "out" / "runs" / "grid.json").read_text())
    assert (list(found["models"]), found["tasks"]) == (["m"], ["CoLA", "RTE"])
    assert (found["lrs"], found["seeds"], found["epochs"]) == ([2e-5, 3e-5], [1, 2, 3], {"CoLA": 10, "RTE": 5})


@pytest.mark.filterwarnings(r"ignore:\s*'\S+' is validated against ConfigStore schema")
def test_the_command_is_table_5_as_the_yaml_has_it(grid):
    cfg = config_of(*grid("MNLI", lrs=(4e-5,), max_train_rows=50).runs[0].command(cpu=True))
    with initialize_config_dir(str(ROOT / "configs" / "finetuning"), version_base="1.1"):
        yaml = compose("mnli")
    assert cfg.optimization.lr == [4e-5] and yaml.optimization.max_epoch == 10
    for group, names in {
        "optimization": "max_epoch clip_norm",
        "optimizer": "_name adam_eps weight_decay",
        "lr_scheduler": "_name warmup_ratio",
        "dataset": "batch_size valid_subset",
        "checkpoint": "best_checkpoint_metric maximize_best_checkpoint_metric no_epoch_checkpoints",
        "task": "_name glue_task",
        "criterion": "_name",
    }.items():
        for name in names.split():
            assert cfg[group][name] == yaml[group][name], (group, name)
    assert eval(cfg.optimizer.adam_betas) == eval(yaml.optimizer.adam_betas)
    assert (cfg.model.dropout, cfg.model.sublayer_pattern, cfg.model.max_positions) == (0.1, "M2x2", 64)
    assert cfg.task.max_train_rows == 50 and cfg.checkpoint.finetune_from_model == str(START)
    short, long = (grid("CoLA", epochs=epochs).runs[0].command(cpu=True) for epochs in (10, 10_000))
    assert "--no-last-checkpoints" in short and "--no-last-checkpoints" not in long, "a long one can go on"


def test_a_head_is_what_was_asked_for(grid):
    def settings_of(head) -> tuple[str, float]:
        cfg = config_of(*grid("CoLA", head=head).runs[0].command(cpu=True))
        return str(cfg.task.glue_head), cfg.model.pooler_dropout

    assert settings_of(None) == settings_of("dense") == ("dense", 0.0)
    assert settings_of("dense:0.1") == ("dense", 0.1)
    assert settings_of("linear") == ("linear", 0.1)
    assert settings_of("linear:0") == ("linear", 0.0)
    for text in ("lineal", "dense:1.0", "dense:x"):
        with pytest.raises(UserError, match=f"--glue-head {text}: give dense or linear"):
            settings_of(text)


def test_pars_protocol_is_that_of_its_table_4(prepared, tmp_path, monkeypatch):
    """Of `lazyformer finetune --protocol par`: NVIDIA's run_glue.sh, five runs. Toy tasks stand for SST-2 and MRPC."""

    def settings_of(*words: str) -> tuple:
        command = [str(START), "--output", str(tmp_path / "out"), "--gpus", "none"]
        command += ["--data", str(prepared["CoLA"].folder.parent), "--tasks", "CoLA", *words]
        monkeypatch.setattr(commands, "run_grid", lambda task, settings: seen.append(settings))
        seen: list[GridSettings] = []
        commands.finetune(command, standalone_mode=False)
        runs = grid_and_executor(GLUE, *seen)[0].runs
        cfg = config_of(*runs[0].command(cpu=True))
        of_batches = (cfg.dataset.batch_size, cfg.lr_scheduler.warmup_ratio)
        return (len(runs), cfg.optimization.lr, cfg.optimization.max_epoch, *of_batches)

    assert settings_of("--protocol", "par") == (5, [2.4e-5], 3, 128, 0.1)
    assert settings_of("--protocol", "par", "--batch-size", "16", "--warmup-ratio", "0") == (5, [2.4e-5], 3, 16, 0.0)
    assert settings_of("--epochs", "2") == (20, [2e-5], 2, 32, 0.06)
    assert PROTOCOLS["par"].tasks == ("SST-2", "MRPC")


def test_what_decides_a_result_must_match_it(grid):
    run = grid("CoLA").runs[0]
    run.folder.mkdir(parents=True)
    (run.folder / "result.json").write_text(json.dumps({"settings": run.settings}))
    assert run.result() == {"settings": run.settings}
    with pytest.raises(UserError, match="result of another run \\(epochs is 10 there, 3 here\\)"):
        grid("CoLA", epochs=3).runs[0].result()
    older = {name: value for name, value in run.settings.items() if not name.startswith("head")}
    (run.folder / "result.json").write_text(json.dumps({"settings": older}))
    assert run.result() == {"settings": older}
    with pytest.raises(UserError, match="result of another run \\(head is None there, 'linear' here"):
        grid("CoLA", head="linear:0.1").runs[0].result()
    (run.folder / "result.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        run.result()


def test_a_model_is_described_and_options_younger_than_it_have_their_defaults():
    checkpoints = name_checkpoints([str(START)])
    assert checkpoints == name_checkpoints([str(START.parent)]) == {"checkpoint_of_0.1.0": START}
    (model,) = load_start_models(checkpoints, START.parent / "tokenizer")
    assert (model.name, model.updates, model.max_positions) == ("checkpoint_of_0.1.0", 30, 64)
    assert model.parameters > 10_000
    assert ("--attention-backend", "auto") in zip(model.options, model.options[1:], strict=False)
    assert "--compile" not in model.options


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    def message(*given) -> str:
        with pytest.raises(UserError) as caught:
            load_start_models(name_checkpoints(map(str, given)), START.parent / "tokenizer")
        return str(caught.value)

    assert "no such file or folder; give a checkpoint" in message(tmp_path / "nowhere.pt")
    assert f"{tmp_path}: holds no checkpoint_best.pt or checkpoint_last.pt" in message(f"m={tmp_path}")
    assert "is called checkpoint_of_0.1.0 too" in message(START, START)
    assert "cannot name a model's folder" in message(f"../m={START}")
    broken = tmp_path / "broken.pt"
    broken.write_bytes(START.read_bytes()[:1000])
    assert f"{broken}: truncated, damaged or no checkpoint" in message(f"m={broken}")
    state = torch.load(START)
    torch.save({**state, "model": {}}, broken)
    assert "not a checkpoint of this package's models" in message(f"m={broken}")
    state["model"]["dictionary_sha256"] += 1
    torch.save(state, broken)
    assert "trained with another dictionary" in message(f"m={broken}")
    shutil.copy(START, broken)
    train_tokenizer(tmp_path / "tokenizer", toy_texts(60), 120, TextSettings())
    assert "the tokenizer beside it has other settings" in message(f"m={broken}")


def test_tasks_and_epochs():
    assert GLUE.choose_tasks(()) == list(PAPER_TASKS)
    tasks = GLUE.choose_tasks(("mnli", "RTE"))
    assert choose_epochs(GLUE, tasks, 10, ("MNLI=3",)) == {"MNLI": 3, "RTE": 10}
    assert choose_epochs(GLUE, tasks, 2, ()) == {"MNLI": 2, "RTE": 2}
    assert choose_epochs(GLUE, tasks, 10, ("MNLI=3", "5")) == {"MNLI": 3, "RTE": 5}
    for names, words in ((("RTE", "rte"), "twice"), (("RTEE",), "no GLUE task")):
        with pytest.raises(UserError, match=words):
            GLUE.choose_tasks(names)
    for text in ("MNLI", "MNLI=0", "CoLA=3"):
        with pytest.raises(UserError, match="--epochs"):
            choose_epochs(GLUE, tasks, 10, (text,))


def test_what_is_not_prepared_is_told(prepared, tmp_path):
    folder = prepared["CoLA"].folder.parent
    assert list(GLUE.load(folder, ["RTE", "CoLA"])) == ["RTE", "CoLA"]
    with pytest.raises(UserError, match="QQP, WNLI not prepared"):
        GLUE.load(folder, ["QQP", "CoLA", "WNLI"])
    copy = shutil.copytree(folder, tmp_path / "tasks")
    (copy / "RTE" / "valid.bin").unlink()
    with pytest.raises(UserError, match=r"RTE/valid.\*: damaged"):
        GLUE.load(copy, ["RTE"])
    manifest = json.loads((copy / "CoLA" / "manifest.json").read_text())
    manifest["tokenizer"]["dict.txt"] = "0"
    (copy / "CoLA" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="CoLA was prepared with another tokenizer than MNLI"):
        GLUE.load(copy, ["MNLI", "CoLA"])


def test_options_of_executors(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    given = GridSettings(workers=3, output=tmp_path)
    assert choose_executor(given, "jobs").free == 3
    for change, words in (
        ({"gpus": "0"}, "nvidia-smi shows no GPU"),
        ({"slurm": ("partition",)}, "give NAME=VALUE"),
        ({"slurm": ("slurm_partition=x",)}, "no sbatch here"),
    ):
        with pytest.raises(UserError, match=words):
            choose_executor(replace(given, **change), "jobs")
