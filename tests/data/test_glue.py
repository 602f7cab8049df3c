"""GLUE's table of tasks, and its official files as they are read."""

import pytest
from fairseq.dataclass.initialize import hydra_init
from helpers import ROOT
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.data.glue import TASKS, Example, find_task, read_split
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.texts import METRICS

FINE_TUNED = [task for task in TASKS.values() if "train" in task.splits]


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_a_row_is_whole(task):
    assert set(task.metrics) <= set(METRICS)
    assert bool(task.labels) != task.is_regression
    assert task.num_classes == (1 if task.is_regression else len(set(task.labels)))
    assert len({len(split.texts) for split in task.splits.values()}) == 1
    assert all((split.label is None) == name.startswith("test") for name, split in task.splits.items())


def test_tasks_are_found_by_name_and_folder():
    assert find_task("sts-b").name == "STS-B"
    assert find_task("diagnostic").name == "AX" and TASKS["AX"].head_name == TASKS["MNLI"].head_name
    with pytest.raises(UserError, match=r"'STS' is no GLUE task.*CoLA.*STS-B"):
        find_task("STS")


def test_targets():
    assert [TASKS["RTE"].target(word) for word in ("entailment", "not_entailment")] == [0, 1]
    assert TASKS["STS-B"].target("3.800") == pytest.approx(3.8)
    for word in ("5.01", "-1", "nan", "", "four"):
        with pytest.raises(UserError, match="from 0 to 5"):
            TASKS["STS-B"].target(word)


@pytest.mark.filterwarnings(r"ignore:\s*'\S+' is validated against ConfigStore schema")
def test_each_task_has_a_yaml_that_selects_by_its_metric():
    """What all have of Table 5, tests/test_hydra_configs.py holds."""
    assert len(FINE_TUNED) == 9
    for task in FINE_TUNED:
        name = task.name.lower()
        hydra_init(name)
        with initialize_config_dir(str(ROOT / "configs" / "finetuning"), version_base="1.1"):
            cfg = compose(name)
        assert cfg.task.glue_task == task.name
        assert cfg.checkpoint.best_checkpoint_metric == task.selecting_metric
        assert cfg.checkpoint.maximize_best_checkpoint_metric
        assert cfg.dataset.valid_subset.split(",") == [split for split in task.splits if split.startswith("valid")]
        assert (cfg.optimization.max_epoch, task.epochs, cfg.optimization.lr) == (10, 10, [2e-5])


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_every_row_of_the_official_files(real_data, task):
    folder = real_data / "glue" / task.folder
    there = [name for name, split in task.splits.items() if (folder / split.file).is_file()]
    if not there:
        pytest.skip(f"{folder}: not among the real data")
    for name in there:
        file = read_split(task, folder, name)
        assert len(file.examples) == task.splits[name].rows
        assert not file.oddities()
        assert all(text.strip() for example in file.examples for text in example.texts)
        if task.labels and task.splits[name].label is not None:
            assert {example.target for example in file.examples} == set(range(task.num_classes))


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


line_texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\n"))


@given(texts=st.lists(st.tuples(line_texts.filter(str.strip), line_texts.filter(str.strip)), min_size=1))
def test_any_text_without_tab_and_newline_comes_back(tmp_path_factory, texts):
    rows = "".join(f"7\t{first}\t{second}\tentailment\n" for first, second in texts)
    folder = write(tmp_path_factory.mktemp("RTE"), "train.tsv", "index\tsentence1\tsentence2\tlabel\n" + rows)
    file = read_split(TASKS["RTE"], folder, "train")
    assert [example.texts for example in file.examples] == texts
    assert [example.line for example in file.examples] == list(range(2, 2 + len(texts)))


@given(
    header=st.sampled_from([b"", b"index\tsentence\n", b"id\tquestion1\tquestion2\tis_duplicate\n"]),
    junk=st.binary() | st.lists(st.sampled_from([b"\t", b"\n", b"0", b"1", b"a", b'"', b"\r"])).map(b"".join),
)
@pytest.mark.parametrize(("task", "split"), [("CoLA", "train"), ("CoLA", "test"), ("QQP", "train")])
def test_junk_gives_rows_or_a_user_error(tmp_path_factory, task, split, header, junk):
    folder = write(tmp_path_factory.mktemp("junk"), TASKS[task].splits[split].file, header + junk)
    try:
        file = read_split(TASKS[task], folder, split)
    except UserError as error:
        assert str(folder) in str(error)
    else:
        assert file.examples


def test_columns_are_found_by_name_quotation_marks_are_text_and_windows_line_ends_are_not(tmp_path):
    write(tmp_path, "dev.tsv", '\ufeffsentence\tlabel\r\n"unpaired\t1\r\nwith \u2028 and \x0c\t0\r\n')
    assert read_split(TASKS["SST-2"], tmp_path, "valid").examples == [
        Example(('"unpaired',), 1, 2),
        Example(("with \u2028 and \x0c",), 0, 3),
    ]
    write(tmp_path, "train.tsv", "label\tindex\tsentence2\tsentence1\nentailment\t0\tb\ta\n")
    assert read_split(TASKS["RTE"], tmp_path, "train").examples == [Example(("a", "b"), 0, 2)]


def test_columns_of_mnli(tmp_path):
    """Its files differ in their columns before and after the texts; no official one is among the real data."""
    before = "index\tpromptID\tpairID\tgenre\tsentence1_parse\tsentence2_parse\tsentence1\tsentence2"
    row = "0\t1\t1n\tfiction\t(A)\t(B)\tA b.\tC d."
    write(tmp_path, "train.tsv", f"{before}\tlabel1\tgold_label\n{row}\tneutral\tneutral\n")
    write(tmp_path, "dev_mismatched.tsv", f"{before}\tlabel1\tlabel2\tgold_label\n{row}\tneutral\t-\tentailment\n")
    write(tmp_path, "test_matched.tsv", f"{before}\n{row}\n")
    targets = [read_split(TASKS["MNLI"], tmp_path, split).examples for split in ("train", "valid1", "test")]
    assert targets == [[Example(("A b.", "C d."), target, 2)] for target in (2, 1, None)]


def test_short_rows_and_empty_sentences_of_qqp_are_counted_and_the_latter_stay(tmp_path):
    rows = "0\t1\t2\ta\tb\t1\n1\t3\t4\tcut off\n2\t5\t6\tc\t\t0\n"
    write(tmp_path, "train.tsv", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n" + rows)
    file = read_split(TASKS["QQP"], tmp_path, "train")
    assert [example.line for example in file.examples] == [2, 4]
    assert (file.short_lines, file.empty_lines) == ([3], [4])
    assert f"{tmp_path / 'train.tsv'}: 1 row with too few fields left out (line 3)" in file.oddities()
    write(tmp_path, "test.tsv", "index\tsentence1\tsentence2\n0\ta\tb\n1\t\tb\n")  # where a row needs an answer
    file = read_split(TASKS["RTE"], tmp_path, "test")
    assert (len(file.examples), file.empty_lines) == (2, [3])


HEADER = "index\tsentence1\tsentence2\tlabel\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEADER + "0\ta\tb\tentailment\n1\ta\tb\n", "line 3: found 3 fields, needed 4"),
        (HEADER + "0\ta\tb\tneutral\n", "line 2: label 'neutral' is none of RTE's labels entailment, not_entailment"),
        (HEADER + "0\ta\tb\tentailment\n\n", "line 3: found 1 field, needed 4"),
        (HEADER + "0\ta\tb\tc\tentailment\n", "line 2: found 5 fields, needed 4.* a tab in a sentence"),
        (HEADER + "0\ta\t \tentailment\n", "line 2: a sentence is empty"),
        (HEADER, "has no row of data"),
        ("", "is empty"),
        ("0\ta\tb\tentailment\n", "line 1: the header lacks 'sentence1', 'sentence2', 'label'; found '0', 'a'"),
        (HEADER.encode() + b"0\ta\xff\tb\tentailment\n", "line 2: not UTF-8 text .*at byte 3"),
    ],
)
def test_errors_name_file_line_and_value(tmp_path, content, message):
    write(tmp_path, "train.tsv", content)
    with pytest.raises(UserError, match=f"train.tsv.*{message}"):
        read_split(TASKS["RTE"], tmp_path, "train")


def test_a_score_that_is_no_number_a_missing_file_and_a_split_that_is_none(tmp_path):
    write(tmp_path, "dev.tsv", "sentence1\tsentence2\tscore\na\tb\t4.5\na\tb\thigh\n")
    with pytest.raises(UserError, match=r"dev.tsv, line 3: score 'high' is no number from 0 to 5"):
        read_split(TASKS["STS-B"], tmp_path, "valid")
    with pytest.raises(UserError, match=r"train.tsv: cannot be read \(No such file"):
        read_split(TASKS["RTE"], tmp_path, "train")
    with pytest.raises(UserError, match=r"RTE has no split 'valid1'; it has train, valid, test"):
        read_split(TASKS["RTE"], tmp_path, "valid1")
