"""The leaderboard's files: names, header, words, every row in its order, from checkpoints as training leaves them."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from glue_results import run_folder, write_grid, write_result
from helpers import NAMES, THINGS, build_toy_corpus, write_lines, write_toy_glue
from in_process import invoke

from lazyformer_fairseq.data.glue import TASKS
from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel
from lazyformer_fairseq.finetuning.launch import predict
from lazyformer_fairseq.finetuning.results import RunKey
from lazyformer_fairseq.finetuning.settings import GridSettings, PredictSettings
from lazyformer_fairseq.finetuning.tasks.glue import SUBMISSION_FILES, prediction_words, prepare_tasks, submission_file

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
    assert sorted(SUBMISSION_FILES) == [f"{name}.tsv" for name in names]
    assert submission_file(TASKS["MNLI"], "test1") == "MNLI-mm.tsv"
    assert prediction_words(TASKS["RTE"], np.array([1, 0])) == ["not_entailment", "entailment"]
    assert prediction_words(TASKS["AX"], np.array([0, 1, 2])) == ["contradiction", "entailment", "neutral"]
    assert prediction_words(TASKS["CoLA"], np.array([1, 0])) == ["1", "0"]
    scores = np.array([-0.2, 1.23456, 5.01])
    assert prediction_words(TASKS["STS-B"], scores) == ["0.000", "1.235", "5.000"]
    with pytest.raises(UserError, match="STS-B: the model predicts nan"):
        prediction_words(TASKS["STS-B"], np.array([1.0, np.nan]))


def test_rows_keep_their_order_whatever_the_batches(glue, data_folder, tmp_path, fine_tuned):
    run = fine_tuned("CoLA", "--max-epoch 6 --lr 0.003")
    texts = [line.split("\t")[1] for line in (glue / "CoLA" / "test.tsv").read_text().splitlines()[1:]]
    hub = LazyFormerModel.from_pretrained(run)
    one_by_one = [str(hub.predict("cola", text).argmax().item()) for text in texts]
    assert {"0", "1"} == set(one_by_one), "equal predictions would agree in any order"
    for max_tokens in (1, 100, 8192):
        target = tmp_path / f"of {max_tokens}"
        lines = predict([run], target, PredictSettings(data=glue, max_tokens=max_tokens))
        assert read(target / "CoLA.tsv") == one_by_one
    wanted = GridSettings(data=glue, tokenizer=data_folder / "tokenizer", output=tmp_path / "out", tasks=("CoLA",))
    prepare_tasks(wanted)
    predict([run], tmp_path / "prepared", PredictSettings())  # finds what is prepared in the grid's folder
    assert read(tmp_path / "prepared" / "CoLA.tsv") == one_by_one
    assert lines == [
        f"{target}: CoLA.tsv: 30 rows, but the official test set has 1,063: the leaderboard will refuse it",
        f"{target}: missing {', '.join(name for name in SUBMISSION_FILES if name != 'CoLA.tsv')}",
    ]


def test_one_model_for_mnli_and_the_diagnostic_set(glue, tmp_path, fine_tuned):
    printed = invoke("predict", fine_tuned("MNLI"), "--data", glue, "--output", tmp_path / "to")
    words = {path.name: read(path) for path in (tmp_path / "to").iterdir()}
    assert words.keys() == {"MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"} and len(words["AX.tsv"]) == 30
    assert all(set(each) <= OF_MNLI for each in words.values())
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
    assert bert == f"{tmp_path / 'to' / 'bert'}: missing {', '.join(SUBMISSION_FILES)}"
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

    assert "give one run a task" in message(runs=[run, run])
    assert f"{tmp_path}: holds no folder CoLA" in message(data=tmp_path)
    (tmp_path / "glue" / "CoLA").mkdir(parents=True)
    assert f"{tmp_path}/glue/CoLA/test.tsv: cannot be read" in message(data=tmp_path / "glue")

    build_toy_corpus(tmp_path / "other", 160, seed=7)
    refused = message(tokenizer=tmp_path / "other" / "tokenizer")
    assert f"{run}/checkpoint_best.pt, on {glue}/CoLA" in refused
    assert "another dictionary" in refused
    shutil.rmtree(run / "tokenizer")
    assert f"no tokenizer at {run}/tokenizer or {tmp_path}/out/tasks/CoLA/tokenizer" in message()
    Tokenizer.load(data_folder / "tokenizer").save(tmp_path / "out" / "tasks" / "CoLA" / "tokenizer")
    predict([run], tmp_path / "found", PredictSettings(data=glue))

    write_result(tmp_path / "out", RunKey("lazy", "RTE", 2e-5, 1), 0.5)
    shutil.copytree(run, run_folder(tmp_path / "out", RunKey("lazy", "SST-2", 2e-5, 1)), dirs_exist_ok=True)
    of_sst = write_result(tmp_path / "out", RunKey("lazy", "SST-2", 2e-5, 1), 0.5).parent
    assert "has no classification head 'sst-2' of SST-2" in message(runs=[of_sst])
