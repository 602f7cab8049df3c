"""``lazyformer finetune``: every row, counted; whole or not at all; and what task ``glue`` reads of it."""

import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks import setup_task
from helpers import toy_texts, train_tokenizer

from lazyformer_fairseq.data.glue import TASKS, read_split
from lazyformer_fairseq.data.prepared_folder import PreparedTask
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.data.text.tokenizer import Tokenizer, find_tokenizer_folder
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning import texts
from lazyformer_fairseq.finetuning.tasks.glue import (
    Preparation,
    overview,
    prepare_tasks,
    remarks,
)
from lazyformer_fairseq.finetuning.texts import encode_split


@pytest.fixture
def wanted(toy_glue, data_folder, tmp_path) -> Preparation:
    return Preparation(data=toy_glue, tokenizer=data_folder / "tokenizer", output=tmp_path / "out")


def prepared_of(wanted: Preparation, *names: str) -> list:
    return prepare_tasks(replace(wanted, tasks=names))


def glue_task(folder: Path, tokenizer: Path, *more: str):
    command = [str(folder), "--task", "glue", "--criterion", "glue", "--arch", "bert_tiny", "--max-epoch", "1", *more]
    command += ["--optimizer", "fused_adam", "--lr-scheduler", "linear_warmup", "--tokenizer-folder", str(tokenizer)]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), command))
    task = setup_task(cfg.task)
    task.build_model(cfg.model)
    return task


@pytest.mark.parametrize(("name", "longest"), [("CoLA", "9"), ("MNLI", "512"), ("STS-B", "9")])
def test_prepared_data_trains_as_the_official_files_do(wanted, name, longest):
    (prepared,) = prepared_of(wanted, name)
    shared = ("--glue-task", name, "--max-positions", "512", "--tokens-per-sample", longest)
    of_both = [
        glue_task(folder, wanted.tokenizer, *shared) for folder in (wanted.data / name, wanted.output / "tasks" / name)
    ]
    for split in TASKS[name].splits:
        for task in of_both:
            task.load_dataset(split)
        official, from_disk = (task.dataset(split) for task in of_both)
        assert len(official) == len(from_disk) == prepared.manifest["splits"][split]["rows"]
        assert official.sizes.tolist() == from_disk.sizes.tolist()
        for index in range(len(official)):
            one, other = official[index], from_disk[index]
            assert one["source"].tolist() == other["source"].tolist()
            assert ("target" in one) == ("target" in other) == (not split.startswith("test"))
            if "target" in one:
                assert one["target"].dtype == other["target"].dtype
                assert one["target"] == other["target"]


@pytest.fixture(scope="module")
def data_folder_tokenizer(data_folder):
    return Tokenizer.load(data_folder / "tokenizer")


def test_the_manifest_counts(wanted, toy_glue, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(toy_glue / "CoLA", data / "CoLA")
    with (data / "CoLA" / "train.tsv").open("a", encoding="utf-8") as file:
        file.write("toy\t1\t\tanna жж sees ж the garden\n" + "toy\t0\t\t" + "anna " * 600 + "\n")
    wanted = replace(wanted, data=data, max_length=20)
    (prepared,) = prepared_of(wanted, "CoLA")
    counts = prepared.manifest["splits"]["train"]
    assert (counts["rows"], counts["truncated"], counts["longest"], counts["last_line"]) == (66, 1, 20, 66)
    assert counts["labels"] == {"0": 33, "1": 33}
    assert counts["unknown_words"] == 2
    assert counts["unknown_word_share"] == 2 / counts["words"]
    assert counts["words"] > 600
    assert counts["tokens"] > counts["kept_tokens"]
    assert prepared.manifest["splits"]["test"]["labels"] is None
    assert "train.tsv: ends at line 66 and has 66 rows, but the official file has 8,551" in remarks(prepared)[0]
    assert "66" in overview([prepared])


def test_processes_change_nothing(toy_glue, data_folder_tokenizer, monkeypatch):
    monkeypatch.setattr("lazyformer_fairseq.finetuning.texts.WORTH_A_PROCESS", 10)
    file = read_split(TASKS["RTE"], toy_glue / "RTE", "train")
    alone, together = (encode_split(data_folder_tokenizer, file, 12, processes) for processes in (1, 2))
    assert [ids.tolist() for ids in alone[0]] == [ids.tolist() for ids in together[0]] and alone[1] == together[1]


def test_processes_end_when_nobody_waits_for_them(data_folder_tokenizer):
    """As at Ctrl-C."""
    encoded = texts._encoded(data_folder_tokenizer, [("anna sees ben",)] * 20_000, 2)
    next(encoded)
    encoded.close()
    assert not multiprocessing.active_children()


def test_rows_with_too_few_fields_are_reported(wanted, toy_glue, tmp_path):
    shutil.copytree(toy_glue / "QQP", tmp_path / "data" / "QQP")
    train = tmp_path / "data" / "QQP" / "train.tsv"
    lines = train.read_text().splitlines()
    train.write_text("\n".join([*lines[:3], "half a row", *lines[3:], "another"]) + "\n")
    (prepared,) = prepared_of(replace(wanted, data=tmp_path / "data"), "QQP")
    counts = prepared.manifest["splits"]["train"]
    assert (counts["rows"], counts["short_rows"], counts["short_lines"]) == (64, 2, [4, 67])
    assert "2 rows with too few fields left out (line 4, 67)" in remarks(prepared)[0]


def test_a_second_time_it_is_reused_or_refused(wanted, toy_glue, tmp_path):
    tasks = ("RTE", "CoLA")
    prepared_of(wanted, *tasks)
    manifest = wanted.output / "tasks" / "RTE" / "manifest.json"
    before = manifest.stat()
    prepared_of(wanted, *tasks)
    assert (manifest.stat().st_ino, manifest.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with pytest.raises(UserError, match="RTE: was prepared before with other max length"):
        prepared_of(replace(wanted, max_length=50), *tasks)
    data = shutil.copytree(toy_glue, tmp_path / "data")
    with (data / "CoLA" / "dev.tsv").open("a") as file:
        file.write("toy\t1\t\tthe garden\n")
    with pytest.raises(UserError, match="CoLA: was prepared before with other files"):
        prepared_of(replace(wanted, data=data), *tasks)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("train.tsv", lambda text: text + "1\tanna", "train.tsv, line 66: found 2 fields, needed"),
        ("dev.tsv", lambda text: text.replace("not_entailment", "maybe", 1), "dev.tsv, line 3: label 'maybe' is none"),
    ],
)
def test_a_wrong_row_leaves_nothing(wanted, toy_glue, tmp_path, file, change, message):
    data = shutil.copytree(toy_glue, tmp_path / "data")
    path = data / "RTE" / file
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=message):
        prepared_of(replace(wanted, data=data), "CoLA", "RTE")
    assert [folder.name for folder in (wanted.output / "tasks").iterdir()] == ["CoLA"]


def test_missing_folders_are_told_before_anything_is_done(wanted, toy_glue, tmp_path):
    data = shutil.copytree(toy_glue, tmp_path / "data")
    shutil.rmtree(data / "RTE")
    other = replace(wanted, data=data)
    with pytest.raises(UserError, match=f"{data}/RTE: no such folder"):
        prepared_of(other, "CoLA", "RTE")
    assert not wanted.output.exists()
    with pytest.raises(UserError, match="holds no folder of a GLUE task"):
        prepare_tasks(replace(wanted, data=tmp_path))
    with pytest.raises(UserError, match="no tokenizer there"):
        find_tokenizer_folder(tmp_path)


def test_a_missing_file_is_told_and_the_rest_is_read(wanted, toy_glue, tmp_path):
    data = shutil.copytree(toy_glue, tmp_path / "data")
    (data / "QNLI" / "train.tsv").unlink()
    (prepared,) = prepared_of(replace(wanted, data=data), "QNLI")
    assert remarks(prepared)[0] == f"{data}/QNLI/train.tsv: is not there"
    with pytest.raises(UserError, match="train.tsv was not there when QNLI was prepared"):
        prepared.read("train", None, 2)


def test_damage_is_found(wanted):
    (prepared,) = prepared_of(wanted, "CoLA")
    path = prepared.folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"CoLA/train.\*: damaged"):
        prepared.read("train", None, 2)
    (prepared.folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json: cannot be read"):
        PreparedTask.load(prepared.folder)


def test_the_task_refuses_what_does_not_belong_together(wanted, data_folder, tmp_path, prepared):
    with pytest.raises(UserError, match="holds CoLA, not RTE"):
        glue_task(prepared["CoLA"].folder, wanted.tokenizer, "--glue-task", "RTE")
    train_tokenizer(tmp_path / "other", toy_texts(60), 120, TextSettings())
    with pytest.raises(UserError, match="was prepared with another tokenizer"):
        glue_task(prepared["CoLA"].folder, tmp_path / "other", "--max-positions", "512")


def test_rows_are_drawn_once_for_all_seeds(prepared, data_folder):
    folder, tokenizer = prepared["CoLA"].folder, data_folder / "tokenizer"
    options = ("--max-train-rows", "10", "--max-positions", "512")
    drawn = []
    for seed in ("1", "2"):
        task = glue_task(folder, tokenizer, *options, "--seed", seed)
        task.load_dataset("train")
        task.load_dataset("valid")
        assert (len(task.dataset("train")), len(task.dataset("valid"))) == (10, 20)
        drawn.append([task.dataset("train")[index]["source"].tolist() for index in range(10)])
    assert drawn[0] == drawn[1]


@pytest.mark.slow
def test_every_row_of_the_real_files(real_data, data_folder, tmp_path):
    wanted = Preparation(data=real_data / "glue", tokenizer=data_folder / "tokenizer", output=tmp_path)
    for prepared in prepare_tasks(wanted):
        assert not [line for line in remarks(prepared) if "is not there" not in line]
        for split, counts in prepared.manifest["splits"].items():
            assert counts["rows"] == prepared.task.splits[split].rows
