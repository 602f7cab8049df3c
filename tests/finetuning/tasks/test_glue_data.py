"""``lazyformer finetune``: every row, counted; whole or not at all; and what task ``glue`` reads of it."""

import multiprocessing
import shutil
from dataclasses import replace

import pytest
from fairseq.tasks import setup_task
from helpers import toy_texts, train_tokenizer

from lazyformer_fairseq.data.glue import TASKS, read_split
from lazyformer_fairseq.data.prepared_folder import PreparedTask
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning import texts
from lazyformer_fairseq.finetuning.tasks.glue import GridSettings, overview, prepare_tasks, remarks


@pytest.fixture
def wanted(toy_glue, data_folder, tmp_path) -> GridSettings:
    return GridSettings(data=toy_glue, tokenizer=data_folder / "tokenizer", output=tmp_path / "out")


@pytest.fixture
def copied(wanted, toy_glue, tmp_path):
    """``copied("RTE")``: what is wanted of a copy of that task's files, which may be changed."""

    def copy(*tasks: str) -> GridSettings:
        for task in tasks:
            shutil.copytree(toy_glue / task, tmp_path / "data" / task)
        return replace(wanted, data=tmp_path / "data", tasks=tasks)

    return copy


def prepared_of(wanted: GridSettings, *names: str) -> list:
    return prepare_tasks(replace(wanted, tasks=names))


def loaded(cfg, *splits: str):
    """A task of fairseq with its model and these splits."""
    task = setup_task(cfg.task)
    task.build_model(cfg.model)
    for split in splits:
        task.load_dataset(split)
    return task


@pytest.mark.parametrize(("name", "longest"), [("CoLA", "9"), ("MNLI", "512"), ("STS-B", "9")])
def test_prepared_data_trains_as_the_official_files_do(wanted, glue_config, name, longest):
    (prepared,) = prepared_of(wanted, name)
    folders = (wanted.data / name, wanted.output / "tasks" / name)
    shared = ("--glue-task", name, "--max-positions", "512", "--tokens-per-sample", longest)
    of_both = [loaded(glue_config(folder, *shared), *TASKS[name].splits) for folder in folders]
    for split in TASKS[name].splits:
        official, from_disk = (task.dataset(split) for task in of_both)
        assert len(official) == len(from_disk) == prepared.manifest["splits"][split]["rows"]
        assert official.sizes.tolist() == from_disk.sizes.tolist()
        for index in range(len(official)):
            one, other = official[index], from_disk[index]
            assert one["source"].tolist() == other["source"].tolist()
            assert ("target" in one) == ("target" in other) == (not split.startswith("test"))
            if "target" in one:
                assert one["target"].dtype == other["target"].dtype and one["target"] == other["target"]


def test_the_manifest_counts(copied):
    wanted = replace(copied("CoLA"), max_length=20)
    with (wanted.data / "CoLA" / "train.tsv").open("a", encoding="utf-8") as file:
        file.write("toy\t1\t\tanna жж sees ж the garden\n" + "toy\t0\t\t" + "anna " * 600 + "\n")
    (prepared,) = prepare_tasks(wanted)
    counts = prepared.manifest["splits"]["train"]
    assert (counts["rows"], counts["truncated"], counts["longest"], counts["last_line"]) == (66, 1, 20, 66)
    assert counts["labels"] == {"0": 33, "1": 33} and prepared.manifest["splits"]["test"]["labels"] is None
    assert counts["unknown_words"] == 2 and counts["unknown_word_share"] == 2 / counts["words"]
    assert counts["words"] > 600 and counts["tokens"] > counts["kept_tokens"]
    assert "train.tsv: ends at line 66 and has 66 rows, but the official file has 8,551" in remarks(prepared)[0]
    assert "66" in overview([prepared])


def test_processes_change_nothing_and_end_when_nobody_waits_for_them(toy_glue, data_folder, monkeypatch):
    tokenizer = load_tokenizer(data_folder / "tokenizer")
    monkeypatch.setattr(texts, "WORTH_A_PROCESS", 10)
    file = read_split(TASKS["RTE"], toy_glue / "RTE", "train")
    alone, together = (texts.encode_split(tokenizer, file, 12, processes) for processes in (1, 2))
    assert [ids.tolist() for ids in alone[0]] == [ids.tolist() for ids in together[0]] and alone[1] == together[1]
    encoded = texts._encoded(tokenizer, [("anna sees ben",)] * 20_000, 2)
    next(encoded)
    encoded.close()  # as at Ctrl-C
    assert not multiprocessing.active_children()


def test_short_rows_and_missing_files_are_reported_and_the_rest_is_read(copied):
    wanted = copied("QQP", "QNLI")
    train = wanted.data / "QQP" / "train.tsv"
    lines = train.read_text().splitlines()
    train.write_text("\n".join([*lines[:3], "half a row", *lines[3:], "another"]) + "\n")
    (wanted.data / "QNLI" / "train.tsv").unlink()
    qqp, qnli = prepare_tasks(wanted)
    counts = qqp.manifest["splits"]["train"]
    assert (counts["rows"], counts["short_rows"], counts["short_lines"]) == (64, 2, [4, 67])
    assert "2 rows with too few fields left out (line 4, 67)" in remarks(qqp)[0]
    assert remarks(qnli)[0] == f"{wanted.data}/QNLI/train.tsv: is not there"
    with pytest.raises(UserError, match="train.tsv was not there when QNLI was prepared"):
        qnli.read("train", None, 2)


def test_a_second_time_it_is_reused_or_refused(copied):
    wanted = copied("RTE", "CoLA")
    prepare_tasks(wanted)
    manifest = wanted.output / "tasks" / "RTE" / "manifest.json"
    before = manifest.stat()
    prepare_tasks(wanted)
    assert (manifest.stat().st_ino, manifest.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with pytest.raises(UserError, match="RTE: was prepared before with other max length"):
        prepare_tasks(replace(wanted, max_length=50))
    with (wanted.data / "CoLA" / "dev.tsv").open("a") as file:
        file.write("toy\t1\t\tthe garden\n")
    with pytest.raises(UserError, match="CoLA: was prepared before with other files"):
        prepare_tasks(wanted)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("train.tsv", lambda text: text + "1\tanna", "train.tsv, line 66: found 2 fields, needed"),
        ("dev.tsv", lambda text: text.replace("not_entailment", "maybe", 1), "dev.tsv, line 3: label 'maybe' is none"),
    ],
)
def test_a_wrong_row_leaves_nothing(copied, file, change, message):
    wanted = copied("CoLA", "RTE")
    path = wanted.data / "RTE" / file
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=message):
        prepare_tasks(wanted)
    assert [folder.name for folder in (wanted.output / "tasks").iterdir()] == ["CoLA"]


def test_missing_folders_are_told_before_anything_is_done(wanted, copied, tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}/data/RTE: no such folder"):
        prepared_of(copied("CoLA"), "CoLA", "RTE")
    with pytest.raises(UserError, match="holds no folder of a GLUE task"):
        prepare_tasks(replace(wanted, data=tmp_path))
    assert not wanted.output.exists()


def test_damage_and_what_does_not_belong_together_are_refused(wanted, glue_config, tmp_path):
    (prepared,) = prepared_of(wanted, "CoLA")
    with pytest.raises(UserError, match="holds CoLA, not RTE"):
        loaded(glue_config(prepared.folder, "--glue-task", "RTE"))
    train_tokenizer(tmp_path / "other", toy_texts(60), 120, TextSettings())
    with pytest.raises(UserError, match="was prepared with another tokenizer"):
        loaded(glue_config(prepared.folder, "--tokenizer-folder", tmp_path / "other", "--max-positions", "512"))
    path = prepared.folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"CoLA/train.\*: damaged"):
        prepared.read("train", None, 2)
    (prepared.folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json: cannot be read"):
        PreparedTask.load(prepared.folder)


def test_rows_are_drawn_once_for_all_seeds(prepared, glue_config):
    options = ("--tokenizer-folder", prepared["CoLA"].tokenizer_folder, "--max-train-rows", 10, "--max-positions", 512)
    drawn = []
    for seed in (1, 2):
        task = loaded(glue_config(prepared["CoLA"].folder, *options, "--seed", seed), "train", "valid")
        assert (len(task.dataset("train")), len(task.dataset("valid"))) == (10, 20)
        drawn.append([task.dataset("train")[index]["source"].tolist() for index in range(10)])
    assert drawn[0] == drawn[1]


@pytest.mark.slow
def test_every_row_of_the_real_files(real_data, data_folder, tmp_path):
    wanted = GridSettings(data=real_data / "glue", tokenizer=data_folder / "tokenizer", output=tmp_path)
    for prepared in prepare_tasks(wanted):
        assert not [line for line in remarks(prepared) if "is not there" not in line]
        for split, counts in prepared.manifest["splits"].items():
            assert counts["rows"] == prepared.task.splits[split].rows
