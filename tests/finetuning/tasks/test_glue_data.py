"""GLUE: every row, counted, whole or not at all; what task ``glue`` reads of it; the leaderboard's files."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fairseq.tasks import setup_task
from glue_results import run_folder, write_grid, write_result
from helpers import NAMES, THINGS, head_logits, toy_texts, train_tokenizer, write_lines, write_toy_glue
from in_process import invoke

from lazyformer_fairseq.data.glue import TASKS
from lazyformer_fairseq.data.labelled_files import read_split
from lazyformer_fairseq.data.prepared_folder import PreparedTask
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel
from lazyformer_fairseq.finetuning.launch import predict
from lazyformer_fairseq.finetuning.results import RunKey
from lazyformer_fairseq.finetuning.settings import PredictSettings
from lazyformer_fairseq.finetuning.tasks import glue as glue_task


@pytest.fixture
def wanted(toy_glue, data_folder, tmp_path) -> glue_task.GridSettings:
    return glue_task.GridSettings(data=toy_glue, tokenizer=data_folder / "tokenizer", output=tmp_path / "out")


@pytest.fixture
def copied(wanted, toy_glue, tmp_path):
    """``copied("RTE")``: what is wanted of a copy of that task's files, which may be changed."""

    def copy(*tasks: str) -> glue_task.GridSettings:
        for task in tasks:
            shutil.copytree(toy_glue / task, tmp_path / "data" / task)
        return replace(wanted, data=tmp_path / "data", tasks=tasks)

    return copy


def prepared_of(wanted: glue_task.GridSettings, *names: str) -> list:
    return glue_task.prepare_tasks(replace(wanted, tasks=names))


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
    (prepared,) = glue_task.prepare_tasks(wanted)
    counts = prepared.manifest["splits"]["train"]
    assert (counts["rows"], counts["truncated"], counts["longest"], counts["last_line"]) == (66, 1, 20, 66)
    assert counts["labels"] == {"0": 33, "1": 33} and prepared.manifest["splits"]["test"]["labels"] is None
    assert counts["unknown_words"] == 2 and counts["unknown_word_share"] == 2 / counts["words"]
    assert counts["words"] > 600 and counts["tokens"] > counts["kept_tokens"]
    assert (
        "train.tsv ends at line 66 and has 66 rows, but the official file has 8,551" in glue_task.remarks(prepared)[0]
    )
    table = glue_task.overview([prepared])
    assert "66" in table and "cut at 20 tokens" in table
    # As models of few and of many positions read it.
    sizes = prepared.read("train", None, 2).inputs.sizes
    few, more = (int(np.quantile(sizes, share)) for share in (0.3, 0.7))
    shorter = [int((sizes > length).sum()) for length in (few, more)]
    assert 1 < shorter[1] < shorter[0] < 66
    assert [prepared.count_cut("train", length) for length in (few, more, 20, 400)] == [*shorter, 1, 1]
    assert [prepared.read("train", length, 2).cut for length in (few, more, 20, None)] == [*shorter, 1, 1]
    heads, _, train = glue_task.overview([prepared], [400, few, more, few]).splitlines()[:3]
    columns = [f"cut at {length} tokens" for length in (few, more, 20)]
    assert [heads.index(column) for column in columns] == sorted(map(heads.index, columns))
    assert train.split()[4:7] == [*map(str, shorter), "1"]


def test_short_rows_and_missing_files_are_reported_and_the_rest_is_read(copied):
    wanted = copied("QQP", "QNLI")
    train = wanted.data / "QQP" / "train.tsv"
    lines = train.read_text().splitlines()
    train.write_text("\n".join([*lines[:3], "half a row", *lines[3:], "another"]) + "\n")
    (wanted.data / "QNLI" / "train.tsv").unlink()
    qqp, qnli = glue_task.prepare_tasks(wanted)
    counts = qqp.manifest["splits"]["train"]
    assert (counts["rows"], counts["short_rows"], counts["short_lines"]) == (64, 2, [4, 67])
    assert "2 rows with too few fields, skipped (line 4, 67)" in glue_task.remarks(qqp)[0]
    assert glue_task.remarks(qnli)[0] == f"{wanted.data}/QNLI/train.tsv does not exist"
    with pytest.raises(UserError, match="train.tsv did not exist when QNLI was prepared"):
        qnli.read("train", None, 2)


def test_a_second_time_it_is_reused_or_refused(copied):
    wanted = copied("RTE", "CoLA")
    glue_task.prepare_tasks(wanted)
    manifest = wanted.output / "tasks" / "RTE" / "manifest.json"
    before = manifest.stat()
    glue_task.prepare_tasks(wanted)
    assert (manifest.stat().st_ino, manifest.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with pytest.raises(UserError, match="RTE was already prepared with different max length"):
        glue_task.prepare_tasks(replace(wanted, max_length=50))
    with (wanted.data / "CoLA" / "dev.tsv").open("a") as file:
        file.write("toy\t1\t\tthe garden\n")
    with pytest.raises(UserError, match="CoLA was already prepared with different files"):
        glue_task.prepare_tasks(wanted)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("train.tsv", lambda text: text + "1\tanna", "train.tsv, line 66: found 2 fields, expected"),
        (
            "dev.tsv",
            lambda text: text.replace("not_entailment", "maybe", 1),
            "dev.tsv, line 3: label 'maybe' is not one of RTE's labels",
        ),
    ],
)
def test_a_wrong_row_leaves_nothing(copied, file, change, message):
    wanted = copied("CoLA", "RTE")
    path = wanted.data / "RTE" / file
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=message):
        glue_task.prepare_tasks(wanted)
    assert [folder.name for folder in (wanted.output / "tasks").iterdir()] == ["CoLA"]


def test_missing_folders_are_told_before_anything_is_done(wanted, copied, tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}/data/RTE: no such folder"):
        prepared_of(copied("CoLA"), "CoLA", "RTE")
    with pytest.raises(UserError, match="contains no GLUE task folder"):
        glue_task.prepare_tasks(replace(wanted, data=tmp_path))
    assert not wanted.output.exists()


def test_damage_and_what_does_not_belong_together_are_refused(wanted, glue_config, tmp_path):
    (prepared,) = prepared_of(wanted, "CoLA")
    with pytest.raises(UserError, match="contains CoLA, not RTE"):
        loaded(glue_config(prepared.folder, "--glue-task", "RTE"))
    train_tokenizer(tmp_path / "other", toy_texts(60), 120, TextSettings())
    with pytest.raises(UserError, match="was prepared with a different tokenizer"):
        loaded(glue_config(prepared.folder, "--tokenizer-folder", tmp_path / "other", "--max-positions", "512"))
    path = prepared.folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"CoLA/train.\*: the data is damaged"):
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


# --- The leaderboard's files, from checkpoints as training leaves them

TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion glue --batch-size 16"
OF_MNLI = {"entailment", "neutral", "contradiction"}


@pytest.fixture(scope="module")
def glue(tmp_path_factory) -> Path:
    """Toy files of all tasks. CoLA's test sentences have many lengths, and class 1 where they start with "the"."""
    folder = write_toy_glue(tmp_path_factory.mktemp("glue"))
    names = enumerate(zip(NAMES * 2, THINGS * 3, strict=True))
    sentences = ["the " * (n % 2) + " ".join([name, "sees the", thing] * (1 + n % 3)) for n, (name, thing) in names]
    rows = [f"{number}\t{sentence}" for number, sentence in enumerate(sentences)]
    write_lines(folder / "CoLA" / "test.tsv", ["index\tsentence", *rows])
    pairs = [f"{row}\t{sentence}" for row, sentence in zip(rows, sentences, strict=True)]
    write_lines(folder / "diagnostic" / "diagnostic.tsv", ["index\tsentence1\tsentence2", *pairs])
    return folder


@pytest.fixture
def fine_tuned(glue, data_folder, tmp_path, fairseq_train):
    """``fine_tuned("CoLA", "options ...")``: the folder of a run of that task in the grid at tmp_path/out."""

    def run(task: str, options: str = "--max-update 1", rate: float = 2e-5, score: float = 0.5) -> Path:
        key = RunKey("lazy", task, rate, 1)
        folder = run_folder(tmp_path / "out", key)
        tokenizer = f"--tokenizer-folder {data_folder / 'tokenizer'} --disable-validation"
        fairseq_train(glue / TASKS[task].folder, f"{TINY} {tokenizer} {options}", folder, task="glue")
        (folder / "checkpoint_last.pt").rename(folder / "checkpoint_best.pt")
        write_result(tmp_path / "out", key, (score,) * (1 + (task == "MNLI")))
        return folder

    return run


def read(path: Path) -> list[str]:
    """The predictions of a file, whose header and numbers must be right."""
    header, *lines = path.read_text().split("\n")[:-1]
    assert header == "index\tprediction"
    numbers, words = zip(*(line.split("\t") for line in lines), strict=True)
    assert list(numbers) == [str(number) for number in range(len(lines))]
    return list(words)


def test_the_leaderboard_s_names_words_and_scores():
    names = "AX CoLA MNLI-m MNLI-mm MRPC QNLI QQP RTE SST-2 STS-B WNLI".split()
    assert sorted(glue_task.SUBMISSION_FILES) == [f"{name}.tsv" for name in names]
    assert glue_task.submission_file(TASKS["MNLI"], "test1") == "MNLI-mm.tsv"
    assert glue_task.prediction_words(TASKS["RTE"], np.eye(2)[[1, 0]]) == ["not_entailment", "entailment"]
    assert glue_task.prediction_words(TASKS["AX"], np.eye(3)) == ["contradiction", "entailment", "neutral"]
    assert glue_task.prediction_words(TASKS["CoLA"], np.eye(2)[[1, 0]]) == ["1", "0"]
    scores = np.array([[-0.2], [1.23456], [5.01]])
    assert glue_task.prediction_words(TASKS["STS-B"], scores) == ["0.000", "1.235", "5.000"]
    with pytest.raises(UserError, match="STS-B: the model predicts nan"):
        glue_task.prediction_words(TASKS["STS-B"], np.array([[1.0], [np.nan]]))


def test_rows_keep_their_order_whatever_the_batches(glue, data_folder, tmp_path, fine_tuned):
    run = fine_tuned("CoLA", "--max-epoch 4 --lr 0.005")
    texts = [line.split("\t")[1] for line in (glue / "CoLA" / "test.tsv").read_text().splitlines()[1:]]
    hub = LazyFormerModel.from_pretrained(run)
    one_by_one = [str(head_logits(hub, "cola", text).argmax().item()) for text in texts]
    assert {"0", "1"} == set(one_by_one), "equal predictions would agree in any order"
    for max_tokens in (1, 100, 8192):
        target = tmp_path / f"of {max_tokens}"
        lines = predict([run], target, PredictSettings(data=glue, max_tokens=max_tokens))
        assert read(target / "CoLA.tsv") == one_by_one
    wanted = glue_task.GridSettings(
        data=glue, tokenizer=data_folder / "tokenizer", output=tmp_path / "out", tasks=("CoLA",)
    )
    glue_task.prepare_tasks(wanted)
    predict([run], tmp_path / "prepared", PredictSettings())  # finds what is prepared in the grid's folder
    assert read(tmp_path / "prepared" / "CoLA.tsv") == one_by_one
    assert lines == [
        f"{target}: CoLA.tsv: 30 rows, but the official test set has 1,063; the leaderboard will reject the file",
        f"{target}: missing {', '.join(name for name in glue_task.SUBMISSION_FILES if name != 'CoLA.tsv')}",
    ]


def test_one_model_for_mnli_and_the_diagnostic_set(glue, tmp_path, fine_tuned):
    run = fine_tuned("MNLI", "--max-update 1 --tokens-per-sample 20")
    printed = invoke("predict", run, "--data", glue, "--output", tmp_path / "to")
    words = {path.name: read(path) for path in (tmp_path / "to").iterdir()}
    assert words.keys() == {"MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"} and len(words["AX.tsv"]) == 30
    assert all(set(each) <= OF_MNLI for each in words.values())
    tokenizer, pairs = load_tokenizer(run / "tokenizer"), read_split(TASKS["AX"], glue / "diagnostic", "test").examples
    cut = sum(len(tokenizer.build_input(*pair.texts)) > 20 for pair in pairs)
    assert 0 < cut < 30
    assert f"AX.tsv: {cut} of 30 rows are longer than the 20 tokens that the model reads" in printed
    assert "AX.tsv: 30 rows" in printed and "missing CoLA.tsv, SST-2.tsv" in printed


def test_the_best_run_of_each_task_is_chosen(glue, tmp_path, fine_tuned):
    worse, better = fine_tuned("CoLA", rate=2e-5), fine_tuned("CoLA", rate=5e-5, score=0.6)
    write_result(tmp_path / "out", RunKey("lazy", "CoLA", 3e-5, 1), 0.6)  # as good, but its checkpoint was not kept
    fine_tuned("STS-B")
    (worse / "checkpoint_best.pt").unlink()  # it is not looked at
    write_grid(tmp_path / "out", {"lazy": "c.pt", "bert": "b.pt"}, ["CoLA", "STS-B", "RTE"], [2e-5, 3e-5, 5e-5], [1])
    *lazy, bert = predict([tmp_path / "out"], tmp_path / "to", PredictSettings(data=glue))
    assert {path.name for path in (tmp_path / "to" / "lazy").iterdir()} == {"CoLA.tsv", "STS-B.tsv"}
    assert "RTE.tsv" in lazy[-1]
    assert bert == f"{tmp_path / 'to' / 'bert'}: missing {', '.join(glue_task.SUBMISSION_FILES)}"
    (score,) = read(tmp_path / "to" / "lazy" / "STS-B.tsv")
    assert re.fullmatch(r"\d\.\d\d\d", score)
    (better / "checkpoint_best.pt").unlink()
    with pytest.raises(UserError, match="lr3e-05_seed1/checkpoint_best.pt: no such checkpoint"):
        predict([tmp_path / "out"], tmp_path / "again", PredictSettings(data=glue))
    assert not (tmp_path / "again").exists()


def test_what_cannot_be_predicted_is_refused_and_nothing_written(glue, data_folder, tmp_path, fine_tuned):
    run = fine_tuned("CoLA")

    def message(runs=(run,), **options) -> str:
        with pytest.raises(UserError) as caught:
            predict(list(runs), tmp_path / "to", PredictSettings(**{"data": glue, **options}))
        assert not (tmp_path / "to").exists()
        return str(caught.value)

    assert "pass one run per task" in message(runs=[run, run])
    assert f"{tmp_path} contains no folder CoLA" in message(data=tmp_path)
    (tmp_path / "glue" / "CoLA").mkdir(parents=True)
    assert f"{tmp_path}/glue/CoLA/test.tsv: cannot be read" in message(data=tmp_path / "glue")

    train_tokenizer(tmp_path / "other", toy_texts(150, seed=7), 160, TextSettings())
    refused = message(tokenizer=tmp_path / "other")
    assert f"{run}/checkpoint_best.pt, on {glue}/CoLA" in refused
    assert "a different dictionary" in refused
    shutil.rmtree(run / "tokenizer")
    assert f"{run}/checkpoint_best.pt: no tokenizer found" in message()
    predict([run], tmp_path / "found", PredictSettings(data=glue, tokenizer=data_folder / "tokenizer"))

    write_result(tmp_path / "out", RunKey("lazy", "RTE", 2e-5, 1), 0.5)
    shutil.copytree(run, run_folder(tmp_path / "out", RunKey("lazy", "SST-2", 2e-5, 1)), dirs_exist_ok=True)
    of_sst = write_result(tmp_path / "out", RunKey("lazy", "SST-2", 2e-5, 1), 0.5).parent
    assert "has no classification head 'sst-2' for SST-2" in message(runs=[of_sst])
