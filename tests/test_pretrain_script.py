"""`lazyformer pretrain`: what it would run, what it cannot run, and runs of its script on this machine."""

import re
from functools import partial

import pytest
from helpers import false_nvidia_smi, run_script
from in_process import assert_recipe, dry_run, pretrain, settings_of
from omegaconf import DictConfig, OmegaConf

from lazyformer_fairseq.arguments import CONFIGS
from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors import cpuinfo
from lazyformer_fairseq.fairseq_plugin.launcher.launch import Launch
from lazyformer_fairseq.fairseq_plugin.reliability.options import listed_updates, settle_update_size
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.training.laptop import LAPTOP
from lazyformer_fairseq.training.run_record import RunRecord, write_run

pytestmark = pytest.mark.usefixtures("without_gpus")
script = partial(run_script, "pretrain.sh")


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """``gpus("9.0", "7.0")``: of such compute capabilities, in place of none."""
    return partial(false_nvidia_smi, tmp_path, monkeypatch)


def test_it_is_table_5():
    words = ("lazyformer_m2x6_s", "some data", "--precision", "fp32")
    cfg = settings_of(*words)
    row = ARCHITECTURES["lazyformer_m2x6_s"].options()
    assert {key: cfg.model[key] for key in row} == row
    assert (cfg.model.dropout, cfg.task.data, cfg.task.tokens_per_sample) == (0.1, "some data", 512)
    assert (cfg.task._name, cfg.criterion._name) == ("full_sentences_masked_lm", "masked_lm_accuracy")
    adam = cfg.optimizer
    assert (adam._name, adam.adam_betas, adam.adam_eps) == ("fused_adam", "(0.9, 0.999)", 1e-6)
    assert (adam.weight_decay, cfg.optimization.clip_norm) == (0.01, 1.0)
    assert (cfg.lr_scheduler._name, cfg.lr_scheduler.warmup_ratio) == ("linear_warmup", 0.01)
    assert (cfg.optimization.lr, cfg.optimization.max_update) == ([1e-4], 1_000_000)
    assert cfg.dataset.batch_size * cfg.optimization.update_freq[0] == 256
    assert (cfg.checkpoint.save_interval_updates, cfg.checkpoint.keep_interval_updates) == (5_000, 3)
    assert listed_updates(cfg.task.keep_updates_list) == set(range(100_000, 1_000_000, 100_000))  # 500,000: Table 2
    assert cfg.checkpoint.save_dir == "checkpoints/lazyformer_m2x6_s"
    assert (cfg.common.cpu, cfg.common.fp16, cfg.common.bf16) == (True, False, False)


def test_the_help_begins_with_the_options_that_most_runs_need():
    (block,) = re.findall(r"with their defaults; .*?:\n(.*?)\n\n", main.commands["pretrain"].help, re.DOTALL)
    shown = dict(re.findall(r"--([\w-]+) [A-Z]+ .*\[(.*)\]", block))
    cfg = settings_of("bert_base", "data")
    by_name = {name: value for section in cfg.values() if section for name, value in section.items()}
    by_name |= {"lr": cfg.optimization.lr[0], "save_dir": cfg.checkpoint.save_dir.replace("bert_base", "ARCH")}
    words = {"batch-size": "as many as fit", "sublayer-pattern": "ARCH's", "precision": shown["precision"]}
    assert len(shown) == 10 and shown.items() >= words.items()
    for option in shown.keys() - words.keys():
        value = by_name[option.replace("-", "_")]
        assert type(value)(shown[option]) == value, option


@pytest.mark.parametrize(
    ("arguments", "world", "batch", "update_freq"),
    [
        ("", 8, 16, 2),
        ("--nodes 2 --node-rank 1 --master other:1234", 16, 16, 1),
        ("--sequences-per-gpu 64", 8, 32, 1),  # as many as there are
        ("--gpus 4 --sequences-per-gpu 24", 4, 16, 4),  # the largest that divides 64
        ("--gpus 3 --sequences-per-update 258", 3, 2, 43),
        ("--gpus 1 --max-restarts 7", 1, 16, 16),
        ("--gpus 2 --max-sentences=32", 2, 32, 4),  # one of fairseq-train's own names for --sequences-per-gpu
    ],
)
def test_an_update_has_256_sequences_and_several_processes_start_again(gpus, arguments, world, batch, update_freq):
    gpus(*["9.0"] * 8)
    launcher, _ = dry_run("bert_base", "data", *arguments.split())
    cfg = settings_of("bert_base", "data", *arguments.split())
    assert cfg.distributed_training.distributed_world_size == world
    assert (cfg.dataset.batch_size, cfg.optimization.update_freq) == (batch, [update_freq])
    restarts = "7" if "--max-restarts" in arguments else "3"
    by_torchrun = world > 1 or "--max-restarts" in arguments
    assert ("lazyformer_fairseq.fairseq_plugin.reliability.torchrun" in launcher) == by_torchrun
    assert (f"--max-restarts {restarts} " in " ".join(launcher)) == by_torchrun
    if world == 16:
        assert "--nnodes 2 --nproc-per-node 8 " in " ".join(launcher)
        assert "--rdzv-endpoint other:1234 --rdzv-id lazyformer --rdzv-conf is_host=0 " in " ".join(launcher)


@pytest.mark.parametrize(
    ("capabilities", "driver_tells", "option", "fp16", "bf16"),
    [
        ("8.6", True, "", False, True),
        ("9.0", False, "", True, False),  # an old driver
        ("9.0", True, "--precision fp16", True, False),
        ("7.0", True, "--precision bf16", False, True),
        ("9.0", True, "--precision fp32", False, False),
    ],
)
def test_precision_is_what_the_gpus_have_or_what_is_asked_for(gpus, capabilities, driver_tells, option, fp16, bf16):
    gpus(*capabilities.split(), knows_capabilities=driver_tells)
    common = settings_of("bert_base", "data", *option.split()).common
    assert (common.cpu, common.fp16, common.bf16) == (False, fp16, bf16)


def test_a_processor_that_multiplies_in_bf16_trains_in_it_unless_told_or_begun_otherwise(
    monkeypatch, tmp_path, data_folder
):
    monkeypatch.setattr(cpuinfo, "first_core", lambda: {"flags": "fpu avx512_bf16"})
    assert not settings_of("bert_base", "data").common.bf16, "without the instruction"
    monkeypatch.setattr(cpuinfo, "WITH_BF16", frozenset({"avx512_bf16"}))
    run, tiny = tmp_path / "run", "--tokens-per-sample 32 --batch-size 2 --max-update 2 --num-workers 0".split()
    here = ("bert_tiny", data_folder, "--save-dir", run, "--sequences-per-update", 2, *tiny)
    said = pretrain(*here, "--dry-run", "--no-fit")
    assert "using bf16" in said.stderr and "--bf16" in said.stdout
    assert not settings_of("bert_base", "data", "--precision", "fp32").common.bf16
    for others in ("bert_base.yaml", "par_transformer_base"):  # a file says it itself; of causal models nobody knows
        assert "bf16" not in pretrain(others, "data", "--dry-run", "--no-fit").stderr
    for began in ("fp32", "bf16"):
        (run / "checkpoint_last.pt").parent.mkdir(exist_ok=True)
        (run / "checkpoint_last.pt").touch()
        sections = {name: {} for name in ("model", "task", "criterion", "data", "optimizer", "schedule", "batch")}
        numbers = {"parameters": 1, "seed": 1, "processes": 1, "precision": began}
        write_run(run, RunRecord(command=(), machine={}, versions={}, **sections, **numbers))
        assert settings_of(*here).common.bf16 == (began == "bf16")
    (run / "run.json").unlink()
    assert not settings_of(*here).common.bf16, "nobody knows in what it began"


def test_gpus_that_torch_will_not_see_do_not_count(gpus, monkeypatch):
    gpus(*["9.0"] * 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert "--gpus 4: this node has only 2" in pretrain("bert_base", "data", "--gpus", 4).stderr


def test_a_yaml_file_gets_the_sizes_of_this_machine(gpus):
    launcher, settings = dry_run("bert_base.yaml", "my 'data'", "--gpus", 2, "optimization.max_update=9")
    assert "lazyformer_fairseq.fairseq_plugin.reliability.torchrun" in launcher
    assert settings[:4] == ["--config-dir", str(CONFIGS / "pretraining"), "--config-name", "bert_base"]
    assert r"task.data='my \'data\''" in settings and settings[-1] == "optimization.max_update=9"
    assert {"distributed_training.distributed_world_size=2", "common.cpu=false", "common.fp16=true"} <= set(settings)
    assert not any("update_freq" in word or "batch_size" in word for word in settings)
    gpus(*["9.0"] * 8)
    settings = set(dry_run("bert_base.yaml", "data", "--batch-size", 8)[1])
    assert {"dataset.batch_size=8", "distributed_training.distributed_world_size=8", "common.bf16=true"} <= settings


@pytest.mark.parametrize(
    ("words", "gpus", "refused"),
    [
        ("par_transformer_24b.yaml data", 3, None),
        ("par_transformer_24b.yaml data", 5, 96),
        ("bert_base.yaml data task.sequences_per_update=258", 3, None),
        ("bert_base.yaml data recipe=phase2", 5, 32_768),
        ("others.yaml data", 5, None),
    ],
)
def test_a_yaml_files_update_is_what_processes_share(tmp_path, monkeypatch, words, gpus, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "others.yaml").write_text("model: {_name: roberta}\ndataset: {batch_size: 7}")
    run = pretrain(*words.split(), "--gpus", gpus, "--dry-run", "--no-fit")
    said = f"error: {refused} sequences per update cannot be divided equally among {gpus}" if refused else ""
    assert (run.returncode == 0, said in run.stderr) == (not refused, True), run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bert_base", "Missing argument 'DATA'"),
        ("bert_base data --gpus", "'--gpus' requires an argument"),
        ("bert_base data --gpus 0", "'0' is not a number of GPUs; use, for example, 8 or 8x16GB"),
        ("bert_base data --gpus 3", "error: 256 sequences per update cannot be divided equally among 3 processes"),
        ("bert_base.yaml data --without lr", "error: --without lr works only with --recipe laptop"),
        ("bert_base.yaml data --distill data", "error: --distill requires a trained model's folder, but bert_base"),
        ("bert_base.yaml data --phase2=--lr=1", "error: --phase2 works only with --recipe longformer or phases"),
        ("bert_base data --phase1 x", "error: --phase1 works only with --recipe longformer or phases"),
        ("bert_base data --recipe phases --phase3 x", "error: --phase3 works only with --recipe longformer"),
        ("bert_base data --without lr", "error: --without lr works only with --recipe laptop"),
        (
            "bert_base data --recipe laptop --without lt",
            "error: --without lt: not one of the recipe's options, which are encoder-normalize-before",
        ),
        ("bert_base data --master node0", "error: --master node0: must be HOST:PORT"),
        ("bert_base data --node-rank 1", "error: --node-rank 1: with --nodes 1, must be from 0 to 0"),
        ("bert_bas data", "error: bert_bas: no such arch or folder; did you mean bert_base, "),
        ("bert_bse.yaml data", "did you mean bert_base.yaml"),
        ("par_transformer_base.yaml data --recipe nvidia", "write recipe=nvidia after DATA"),
        ("par_transformer_bas data", "no such arch or folder; did you mean par_transformer_base"),
        ("bert_base nowhere", "error: nowhere is not a folder\n"),
        ("texts bert_base", "bert_base is the name of a model, which must come first: lazyformer pretrain bert_base t"),
        ("M2x6 data", "error: M2x6: no such arch or folder; docs/patterns.md#named-models lists all archs"),
        ("bert_base text.txt", "if it is raw text, run `lazyformer corpus text.txt data` first"),
        ("bert_base texts", "texts contains no dict.txt, so it is not binarized data; if it is raw text, run `lazyf"),
        ("bert_base data --update-freq 4", "error: --update-freq: derived from --sequences-per-update"),
        ("bert_base data --max-tokens=4096", "error: --max-tokens: use --batch-size, which counts sequences"),
        ("bert_base data --user-dir other", "error: --user-dir: omit this option"),
        (
            "bert_base data --tokenizer moses",
            "error: --tokenizer: omit this option; the command uses the tokenizer that",
        ),
        ("bert_base data --distributed-world-size 2", "error: --distributed-world-size: use --gpus and --nodes"),
        ("bert_base.yaml data optimization.lr=[nan]", "error: --lr nan: must be a number, 0 or more"),
        ("bert_base data --sublayer-pattern= --dry-run --no-fit", "error: sublayer pattern '' is empty"),
        ("bert_base data --sublayer-pattern sx", "error: sublayer pattern 'sx', character 2"),
        ("par_transformer_base data --sublayer-pattern s[linformer=4]", "linformer is not for causal models"),
        ("bert_base data --encoder-embed-dim 767 --dry-run", "dimension of 767 is not divisible by 12 attention heads"),
        ("bert_base.yaml data --lr 3", "error: --lr: with a YAML file, write settings as"),
    ],
)
def test_what_cannot_run_is_said(tmp_path, arguments, message):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dict.txt").write_text("a 1\n")
    (tmp_path / "texts").mkdir()
    (tmp_path / "text.txt").touch()
    run = pretrain(*arguments.split())
    assert (run.returncode, run.stdout) == (2 if "argument" in message or "number of GPUs" in message else 1, "")
    assert message in run.stderr


def test_the_recipe_laptop_is_its_table_less_what_is_given_or_left_out():
    words = ("bert_laptop", "some data", "--recipe", "laptop")
    cfg = settings_of(*words)
    parts = (cfg.model, cfg.task, cfg.optimizer, cfg.lr_scheduler, cfg.optimization)
    found = {name: part[name] for part in parts for name in LAPTOP if name in part and name != "lr"}
    assert {**LAPTOP, **found} == LAPTOP and LAPTOP.keys() - found.keys() == {"optimizer", "lr_scheduler", "lr"}
    assert (cfg.optimizer._name, cfg.lr_scheduler._name, cfg.optimization.lr) == ("muon", "wsd", [0.005])
    sizes = cfg.dataset.batch_size * cfg.optimization.update_freq[0], cfg.task.tokens_per_sample
    assert (*sizes, cfg.optimization.max_update) == (2, 512, 20_000)
    given = "--optimizer fused_adam --lr-scheduler linear_warmup --mask-prob 0.2 --max-update 9"
    cfg = settings_of(*words, "--without", "local-heads,length-schedule", *given.split())
    assert (cfg.optimizer._name, cfg.optimization.lr, cfg.task.mask_prob) == ("fused_adam", [LAPTOP["adam_lr"]], "0.2")
    assert not cfg.model.local_heads and not cfg.task.length_schedule and cfg.model.zero_last_maps


def test_an_optimizer_or_a_schedule_in_place_of_the_recipes_comes_without_its_options():
    cfg = settings_of("bert_base", "data", *"--optimizer nvlamb --lr-scheduler cosine --warmup-updates 9".split())
    assert (cfg.optimizer._name, cfg.optimizer.weight_decay, cfg.optimization.lr) == ("nvlamb", 0.01, [1e-4])
    assert (cfg.lr_scheduler._name, cfg.lr_scheduler.warmup_updates) == ("cosine", 9)
    cfg = settings_of("bert_laptop", "data", *"--recipe laptop --optimizer sgd --momentum 0.9".split())
    assert (cfg.optimizer._name, cfg.lr_scheduler._name) == ("sgd", "wsd")


def test_a_machine_without_a_gpu_is_told_of_the_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Launch, "_exec", lambda *_: None)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dict.txt").touch()
    for words, count in (((), 1), (("--recipe", "laptop"), 0), (("--recipe", "table5"), 0)):
        main(["pretrain", "bert_base", str(tmp_path / "data"), *words], standalone_mode=False)
        assert capsys.readouterr().err.count("no GPU found; bert_laptop with --recipe laptop") == count


def cfg_of(text: str) -> DictConfig:
    cfg = OmegaConf.create({"task": {"sequences_per_update": 8}, "distributed_training": {"distributed_world_size": 2}})
    cfg.dataset, cfg.optimization = {"batch_size": 4, "max_tokens": None}, {"update_freq": [1]}
    cfg.merge_with_dotlist(text.split())
    return cfg


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("task.sequences_per_update=9", "--sequences-per-update 9: an update cannot be divided among 2 processes"),
        ("dataset.max_tokens=100", "--max-tokens 100: conflicts with --sequences-per-update"),
        ("dataset.batch_size=null", "--batch-size None"),
        ("optimization.update_freq=[3]", "--update-freq 3: already determined by --sequences-per-update 8"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_and_settling_twice_changes_nothing(settings, message):
    with pytest.raises(UserError, match=message):
        settle_update_size(cfg_of(settings))
    cfg = cfg_of("dataset.batch_size=3")
    for _ in range(2):
        settle_update_size(cfg)
        assert (cfg.dataset.batch_size, cfg.optimization.update_freq) == (2, [2])


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_yaml_file_trains_on_any_number_of_processes_on_data_with_spaces_in_its_path(
    data_folder, tmp_path, processes
):
    (tmp_path / "my data").symlink_to(data_folder)
    size = ("--gpus", processes, "--sequences-per-update", 8, "--batch-size", 2)
    settings = (
        "optimization.max_update=1 task.tokens_per_sample=32 dataset.num_workers=0 checkpoint.save_dir=run "
        "model.encoder_embed_dim=32 model.encoder_attention_heads=2 model.encoder_ffn_embed_dim=64"
    )
    run = script("bert_base.yaml", "my data", *size, *settings.split())
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    screen, log = run.stdout + run.stderr, (tmp_path / "run" / "train.log").read_text()
    assert re.search(r"^model   lazyformer, M1x12: ", screen, re.MULTILINE)
    assert screen.count("INFO") == (0 if processes == 1 else processes), "the update's size, before there is a log"
    assert f"an update is 8 sequences: {processes} processes x 2 sequences" in screen + log
    assert re.search(r"\bbsz 8 ", log), "what was said is what was trained on"
    assert (tmp_path / "run" / "checkpoint_last.pt").is_file()
    assert (tmp_path / "run" / "tokenizer").is_dir()


# --- language models


@pytest.mark.parametrize(
    ("arch", "number", "tgt_len", "streams", "update_freq"),
    [
        ("transformer_xl_base", 2, 192, 32, 4),
        ("sandwich_transformer_large", 8, 384, 16, 1),
    ],
)
def test_it_is_the_papers_setting(gpus, arch, number, tgt_len, streams, update_freq):
    gpus(*["9.0"] * 8)
    cfg = settings_of(arch, "some data", "--gpus", number)
    row = CAUSAL_ARCHITECTURES[arch].options()
    assert {key: cfg.model[key] for key in row} == row
    assert (cfg.task._name, cfg.task.data, cfg.task.tgt_len) == ("stream_language_modeling", "some data", tgt_len)
    assert cfg.model.mem_len == tgt_len and number * streams * update_freq * tgt_len == 49_152
    assert (cfg.dataset.batch_size, list(cfg.optimization.update_freq)) == (streams, [update_freq])
    assert cfg.criterion._name == "causal_lm"
    assert_recipe(cfg, CAUSAL_ARCHITECTURES[arch].recipe)
    assert cfg.optimization.max_update == (100_000 if arch.endswith("large") else 40_000)
    assert (cfg.common.cpu, cfg.common.bf16) == (False, True)


@pytest.mark.parametrize(
    ("arch", "recipe", "trained_by"),
    [
        ("par_transformer_large", "transformer-xl", "transformer_xl"),
        ("longformer_small", None, "transformer_xl"),
        ("longformer_small", "nvidia", "nvidia"),
    ],
)
def test_the_recipe_may_be_chosen(arch, recipe, trained_by):
    assert_recipe(settings_of(arch, "data", *(["--recipe", recipe] if recipe else [])), trained_by)


def test_options_of_fairseq_train_win():
    words = "par_transformer_base data --max-update 7 --sublayer-pattern (sff)x5 --sequences-per-update 8".split()
    cfg = settings_of(*words)
    assert (cfg.optimization.max_update, cfg.model.sublayer_pattern, cfg.common.cpu) == (7, "(sff)x5", True)
    assert (cfg.dataset.batch_size, cfg.optimization.update_freq) == (4, [2])
