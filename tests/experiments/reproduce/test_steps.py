"""Every step is a command that the real parsers take; steps run once, resume and fail in words; the page."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from glue_results import write_grid, write_result
from helpers import ROOT, write_toy_glue
from in_process import invoke, parser_of, refusal, settings_of
from reproductions import record, rows_of
from run_records import BERT, LAZY, write_record

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.bench.settings import BenchSettings
from lazyformer_fairseq.experiments.prose import PROSE
from lazyformer_fairseq.experiments.reproduce.engine import CLI, Step, run_steps
from lazyformer_fairseq.experiments.reproduce.lazyformer import (
    PAPER,
    PRINTED,
    TABLE_1,
    TABLE_4,
    TINY,
    Size,
    find_inputs,
    list_steps,
    reproduction,
)
from lazyformer_fairseq.finetuning.paper_numbers import PAPER_TASKS
from lazyformer_fairseq.finetuning.results import RunKey
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES

SIZES = pytest.mark.parametrize("size", [PAPER, TINY], ids=["paper", "tiny"])


@pytest.fixture
def raw(tmp_path):
    """A folder of text, with books and GLUE's files."""
    for name in ("wikipedia", "books"):
        (tmp_path / "raw" / name).mkdir(parents=True)
        (tmp_path / "raw" / name / "text.txt").write_text("A text.\n")
    write_toy_glue(tmp_path / "raw" / "glue", train=40, valid=10)
    (tmp_path / "raw" / "glue.download").mkdir()  # scripts/download_glue.sh leaves MRPC's texts there
    (tmp_path / "raw" / "glue.download" / "msr_paraphrase_test.txt").write_text("A test.\n")
    return tmp_path / "raw"


def steps_of(raw, size, out) -> list[Step]:
    return list_steps(size, find_inputs(str(raw), out, size), out, "fp16")


@SIZES
def test_the_real_parsers_take_every_command(raw, tmp_path, size, monkeypatch):
    parsed = parser_of(monkeypatch, "corpus", "bench models", "finetune", "pretrain")
    out = tmp_path / "out"
    for arch in ARCHITECTURES:
        for updates in size.kept:
            path = out / "pretraining" / arch / f"checkpoint_update_{updates}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    for step in steps_of(raw, size, out):
        module, *words = step.command
        assert module == CLI
        given = parsed(words)
        if words[0] == "bench":
            given = {name: value for name, value in given.items() if name != "output"}
            assert BenchSettings(**{**given, "device": "cpu"}).workloads == ("training",)
        if words[0] == "finetune":
            files = {Path(word.partition("=")[2]) for word in given["checkpoints"]}
            assert files <= set((out / "pretraining" / step.name[5:]).iterdir())
            assert (given["lrs"], given["seeds"]) == (((), ()) if size is PAPER else ((1e-3,), (1, 2)))
        if words[0] == "corpus":
            assert given["inputs"] == (f"book:{raw / 'books'}", str(raw / "wikipedia"))


@pytest.mark.parametrize(("size", "arch"), [(PAPER, "lazyformer_m2x6"), (TINY, "bert_base")], ids=["paper", "tiny"])
def test_fairseq_takes_what_the_pretrainings_become(raw, tmp_path, size, arch):
    [step] = [step for step in steps_of(raw, size, tmp_path) if step.name == f"pretrain_{arch}"]
    assert step.command[1] == "pretrain"
    cfg, row = settings_of(*step.command[2:], "--gpus", "1", "--max-restarts", "0"), ARCHITECTURES[arch]
    assert (cfg.optimization.max_update, cfg.task.sequences_per_update) == (size.updates, size.sequences)
    assert cfg.task.keep_updates_list == ",".join(map(str, size.kept))
    model, shrunk = cfg.model, 16 if size is TINY else 1
    assert (model.sublayer_pattern, model.attention_dropout) == (row.sublayer_pattern, row.attention_dropout)
    widths = (row.encoder_embed_dim // shrunk, row.encoder_ffn_embed_dim // shrunk)
    assert (model.encoder_embed_dim, model.encoder_ffn_embed_dim) == widths
    if size is PAPER:
        paper = (cfg.optimization.lr, cfg.lr_scheduler.warmup_ratio, cfg.task.tokens_per_sample)
        assert paper == ([1e-4], 0.01, 512)


def test_a_million_updates_cost_what_arithmetic_says(raw, tmp_path):
    inputs = find_inputs(str(raw), tmp_path, PAPER)
    plan = reproduction(PAPER, inputs, tmp_path, "fp32").plan(tmp_path, ["pretrain_*"], 8 * PAPER.flops_per_second)
    [bert] = rows_of(plan, "| pretrain_bert_base ")
    flops, hours, gigabytes = (float(cell) for cell in bert[3:])
    tokens = 1_000_000 * 256 * 512
    feed_forward = 2 * 768 * 3072
    head = 768**2 + 768 * 32_768
    attention = 12 * 2 * 512 * 768
    # Multiply-adds of a token. Our last feed-forward computes masked tokens alone, as the head does.
    of_paper = attention + 12 * (4 * 768**2 + feed_forward) + 0.15 * head
    ours = of_paper - 0.85 * feed_forward
    assert flops == pytest.approx(6 * ours * tokens, rel=0.03)
    hours_of_paper = 45 * 10_000 / 3600  # Table 2: 45 seconds for 100 updates
    assert hours == pytest.approx(hours_of_paper * ours / of_paper, rel=0.01)
    assert gigabytes == pytest.approx(11 * 16 * 0.112, rel=0.01)
    [lazy] = rows_of(plan, "| pretrain_lazyformer_m2x6_s ")
    assert 0.9 < float(lazy[4]) / hours < 1


def test_models_and_steps_choose(raw, tmp_path):
    words = ("reproduce", "lazyformer", raw, tmp_path / "out", "--plan")
    assert "Only timed: lazyformer_m3x4_sd, " in invoke(*words)
    said = invoke(*words, "--models", "all")
    assert re.findall(r"^\| pretrain_(\w+)", said, re.MULTILINE) == [*PRINTED]
    said = invoke(*words, "--models", "lazyformer_m6x2_sd", "--steps", "bench_t*,glue_*")
    names = re.findall(r"^\| (\w+_?\w+) .*\| to do", said, re.MULTILINE)
    assert names == ["corpus", "bench_tables", "pretrain_lazyformer_m6x2_sd", "glue_lazyformer_m6x2_sd"]
    assert (
        "glue_lazyformer_m6x2_sd: python -m " in said and "checkpoint_update_200000.pt" not in said.split("glue_")[-1]
    )
    made = reproduction(TINY, find_inputs(str(raw), tmp_path, TINY), tmp_path, "fp32")
    assert [each.name for each in made.chosen(["pretrain_lazyformer_m2x7"])] == ["corpus", "pretrain_lazyformer_m2x7"]


def test_jobs_run_where_the_user_says(raw, tmp_path):
    """In a reproduction only a corpus and fine-tuning are made of jobs."""
    words = ("--plan", "--executor", "slurm", "--slurm", "slurm_partition=x,timeout_min=9", "--workers", "3")
    said = invoke("reproduce", raw, tmp_path / "out", *words)
    place = "--executor slurm --workers 3 --slurm slurm_partition=x,timeout_min=9"
    commands = dict(re.findall(r"^(\w+): python -m (.*)$", said, re.MULTILINE))
    assert {name.split("_")[0] for name, command in commands.items() if place in command} == {"corpus", "glue"}


def test_the_plan_is_printed_and_nothing_runs(raw, tmp_path):
    said = invoke("reproduce", raw, tmp_path / "out", "--plan")
    assert len(re.findall(r"^\| (?:corpus|bench|pretrain|glue)_?\w* .*\| to do", said, re.MULTILINE)) == 15
    assert re.search(r"runs take [\d,.]+ hours, and their checkpoints take [\d,.]+ GB; [\d,.]+ GB are free", said)
    assert "pretrain_bert_base: python -m lazyformer_fairseq.cli pretrain bert_base" in said
    assert not (tmp_path / "out").exists()
    # Without a text the demo's is made.
    out = tmp_path / "new"
    first, corpus, *_ = steps_of("demo", TINY, out)
    assert first.command[1:] == (str(out / "raw"), "0.1") and str(out / "raw" / PROSE) in corpus.command
    assert corpus.needs == (first.name,)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere out", "nowhere: no such folder; create it with scripts/download_wikipedia.sh"),
        ("demo out", "demo: this text is only about a megabyte long and works only with --tiny"),
        ("bare out", "bare/glue does not contain MNLI/train.tsv, .*a link to it"),
        ("bare out --tiny", "does not contain CoLA/train.tsv"),
        ("some out", "does not contain MNLI/train.tsv"),
        ("some out --tasks WNLI", "does not contain WNLI/train.tsv"),
        ("some out --tasks GLUE", "GLUE"),
        ("empty out --tiny", "empty contains no text"),
        ("demo out --tiny --models lazyformer_m2x6,lazyformer_m3x4", "--models lazyformer_m3x4: .*did you mean"),
        ("demo out --tiny --steps bench,glue_*", "--steps bench: no such step"),
    ],
)
def test_what_is_missing_is_said(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    for name in ("some", "empty"):
        write_toy_glue(tmp_path / name / "glue", train=4, valid=2)
        for path in (tmp_path / name / "glue").iterdir():
            if path.name != "CoLA":
                path.rename(tmp_path / f"{name}_{path.name}")
    assert re.search(message, refusal("reproduce", *words.split()))
    assert not (tmp_path / "out").exists()


STUB = """
import sys
from pathlib import Path

behaviour, made = sys.argv[1], Path(sys.argv[2])
with Path("called").open("a") as file:
    print(behaviour, made.name, file=file)
if behaviour == "refuses what is there" and made.parent.exists():
    sys.exit("is there already")
if behaviour == "fails once" and not Path("tried").exists():
    Path("tried").touch()
    sys.exit("no room for it")
if behaviour != "makes nothing":
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text(behaviour)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return tmp_path


def step(name: str, behaviour: str = "works", **more) -> Step:
    made = Path("out") / name / "result"
    return Step(name, f"the step {name}", ("stub", behaviour, str(made)), made, **more)


def calls() -> list[str]:
    return Path("called").read_text().splitlines()


def run(*steps: Step, settings=None) -> list[str]:
    return run_steps(steps, Path("out"), settings or {"size": "tiny"})


def test_what_is_done_is_not_done_again_unless_it_was_removed():
    run(step("a"), step("b"))
    run(step("a"), step("b"), step("c"))
    assert len(calls()) == 3
    assert step("b").record(Path("out"))["command"] == "stub works out/b/result"
    assert not list(Path("out").glob("*.unfinished"))
    Path("out/a/result").unlink()
    assert step("a").record(Path("out")) is None
    run(step("a"))
    assert Path("out/a/result").exists() and len(calls()) == 4
    with pytest.raises(UserError, match="with different settings .size is 'tiny' there, 'paper' here"):
        run(step("a"), settings={"size": "paper"})


def test_a_step_that_fails_is_named_and_tried_again():
    first, second, third = step("a", "fails once"), step("b", needs=("a",)), step("c")
    failed, left_out = run(first, second, third)
    assert failed == "step a failed with exit code 1; see its log messages above for the reason"
    assert left_out == "step b was skipped because it depends on a"
    assert [bool(each.record(Path("out"))) for each in (first, second, third)] == [False, False, True]
    assert run(first, second, third) == []
    assert Path("out/b/result").exists() and len(calls()) == 4
    [failed] = run(step("d", "makes nothing"))
    assert failed == "step d finished without creating out/d/result; see its log messages above for the reason"


def test_what_a_command_would_refuse_is_cleared_first_but_only_where_the_step_says_so():
    Path("out/a").mkdir(parents=True)
    Path("out/a/half").touch()
    [failed] = run(step("a", "refuses what is there"))
    assert failed.startswith("step a failed with exit code 1")
    assert Path("out/a/half").exists()
    run(step("a", "refuses what is there", removes_partial_output=True))
    assert os.listdir("out/a") == ["result"]


COMMAND = ["bash", str(ROOT / "scripts" / "reproduce_lazyformer.sh"), "demo"]


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_it_goes_the_whole_way_and_resumes(tmp_path, interruptible):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [*COMMAND, str(tmp_path / "out"), "--tiny"]
    kept = tmp_path / "out" / "pretraining" / "bert_base" / "checkpoint_update_300.pt"
    with subprocess.Popen(command, env=environment) as process:
        while not kept.exists():
            assert process.poll() is None
            time.sleep(1)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "[2/16] corpus: already done" in run.stdout
    page = (tmp_path / "out" / "report" / "report.md").read_text()
    assert "No results yet" not in page and "not done" not in page
    glue = (tmp_path / "out" / "report" / "glue" / "glue.md").read_text()
    scored = set(re.findall(r"^\| (\w+)-(\d+) ", glue, re.MULTILINE))
    wanted = {(arch, "1200") for arch in (*TABLE_1, *TABLE_4)}
    wanted |= {(arch, updates) for arch in TABLE_1 for updates in ("300", "600")}
    assert scored == wanted
    losses = re.findall(r"^\| \w+ +\| M\dx\d+ +\| +(\d+) \| +1,200 .*\| +([\d.]+) \| +([\d.]+) \|", page, re.MULTILINE)
    assert len(losses) == 6
    for validations, last, _ in losses:
        assert int(validations) == 12 and float(last) < 11


# --- The page: what was measured beside what the paper prints, and what is not there yet


def prepare(tmp_path: Path, size: Size):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "text.txt").write_text("A text.\n")
    write_toy_glue(tmp_path / "raw" / "glue", train=4, valid=2)
    inputs = find_inputs(str(tmp_path / "raw"), tmp_path / "out", size)
    return reproduction(size, inputs, tmp_path / "out", "fp32"), tmp_path / "out"


def page_of(out: Path) -> str:
    return (out / "report" / "report.md").read_text()


def write_bench(out: Path, name: str, lengths: tuple[int, ...]) -> None:
    ours, registered = "our bert_base", "bert_base as registered"
    rows = [
        {"model": model, "baseline": baseline, "back_end": back_end, "seconds": {"median": seconds}}
        | {"against": {ours: {"speedup": 0.09 / seconds}, registered: {"speedup": 0.12 / seconds}}}
        for model, baseline, back_end, seconds in (
            (ours, ours, "eager", 0.1),
            (ours, ours, "recompute", 0.09),
            ("bert_base", registered, "auto", 0.12),
            ("lazyformer_m2x6_s", None, "eager", 0.08),
        )
    ]
    cells = [{"time": length, "batch": 2, "precision": "fp32", "rows": rows} for length in lengths]
    (out / "bench" / name).mkdir(parents=True)
    (out / "bench" / name / "results.json").write_text(json.dumps({"cells": cells, "machine": {"device": "an abacus"}}))
    (out / "bench" / name / "speedup_training_fp32.png").write_bytes(b"\x89PNG")


def write_glue(out: Path, scores: dict[str, float]) -> None:
    write_grid(out / "glue", {name: f"{name}.pt" for name in scores}, list(PAPER_TASKS), [2e-5], [1])
    for name, score in scores.items():
        for task in PAPER_TASKS:
            arch, updates = name.rsplit("-", 1)
            more = {"updates": int(updates), "checkpoint": f"{arch}/checkpoint_update_{updates}.pt"}
            write_result(out / "glue", RunKey(name, task, 2e-5, 1), score, **more)


def test_the_papers_numbers_stand_beside_ours(tmp_path):
    made, out = prepare(tmp_path, PAPER)
    write_glue(out, {"bert_base-1000000": 0.5, "lazyformer_m2x6-500000": 0.6, "lazyformer_m2x6-1000000": 0.75})
    for name, lengths in (("tables", (512,)), ("figure_3", (512, 1024))):
        write_bench(out, name, lengths)
    write_record(out / "pretraining" / "bert_base", [9.0, 8.0], BERT)
    write_record(out / "pretraining" / "lazyformer_m2x6_s", [9.0, 7.5], LAZY)
    record(out, "bench_tables", "bench_figure_3")
    made.report(out)
    page = page_of(out)
    of_glue = (out / "report" / "glue" / "glue.md").read_text()
    assert "| bert_base-1000000 " in of_glue and "| M2x6 mid " in of_glue
    [without] = rows_of(page, "| BERT, no attention dropout (ours)")
    assert without[1:] == ["90.0", "1.33x", "1.00x", "recompute", "-", "-", "-"]
    scores, bert = rows_of(page, "| BERT  ")
    assert scores[1:] == ["3072, 768, 12", "50.00/50.00", "-", "50.00", "83.52"]
    assert bert[1:] == ["120.0", "1.00x", "0.75x", "auto", "50.00", "1.00x", "83.52"]
    assert rows_of(page, "| M2x6-S  ")[1][1:4] == ["80.0", "1.50x", "1.12x"]
    assert rows_of(page, "| M2x6-S  ")[1][6] == "1.29x"  # 45 / 35
    assert rows_of(page, "| M6x2-SD ")[1] == ["M6x2-SD", "-", "-", "-", "-", "-", "1.36x", "82.47"]
    assert "Only timed: lazyformer_m3x4_sd, lazyformer_m4x3_sd" in page
    assert rows_of(page, "| M2x6  ")[0][2:] == ["75.00/75.00", "86.34/86.31", "75.00", "84.56"]
    assert rows_of(page, "| lazyformer_m2x6_s ")[-1][1:] == ["1.50x", "1.50x"]  # of Figure 3
    assert "0.500" in [row[-1] for row in rows_of(page, "| bench_tables ")]
    for name in ("loss.png", "glue/glue.png", "speedup_training_fp32.png"):
        assert f"]({name})" in page
        assert (out / "report" / name).read_bytes().startswith(b"\x89PNG")
    assert "in miniature" not in page


def test_what_is_not_there_is_named_and_a_miniature_says_that_it_is_one(tmp_path):
    made, out = prepare(tmp_path, TINY)
    with pytest.raises(UserError, match="no step is done yet"):
        made.report(out)
    write_record(out / "pretraining" / "bert_base", [9.0], BERT)
    (out / "data").mkdir()
    (out / "data" / "manifest.json").touch()
    record(out, "corpus")
    made.report(out)
    page = page_of(out)
    for missing in ("glue_*", "bench_tables", "bench_figure_3"):
        assert f"No results yet from `{missing}`." in page
    assert "This shows that everything runs, not which model is better" in page
    assert "not done" in [row[-1] for row in rows_of(page, "| glue_bert_base ")]
