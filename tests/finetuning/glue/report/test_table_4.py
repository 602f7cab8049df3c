"""PAR Transformer's Table 4 from made results of GLUE, of SQuAD and of latency, which lie beside each other."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from glue_results import write_grid, write_result

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.finetuning.report.results import RunKey

RATE, SEEDS = 3e-5, [1, 2, 3, 4, 5]


def write_glue(folder: Path, models: tuple[str, ...] = ("par_bert_base", "mine"), tasks=("SST-2", "MRPC")) -> Path:
    write_grid(folder, dict.fromkeys(models, "c.pt"), list(tasks), [RATE], SEEDS)
    for model in models:
        for task in tasks:
            for seed in SEEDS:
                write_result(folder, RunKey(model, task, RATE, seed), 0.5 + seed / 100 + 0.3 * (task == "SST-2"))
    return folder


def write_squad(folder: Path, models: tuple[str, ...], seeds_done: int = 5) -> Path:
    grid = {"models": dict.fromkeys(models, "c.pt"), "tasks": ["SQuAD"], "lrs": [RATE], "seeds": SEEDS}
    (folder / "runs").mkdir(parents=True)
    (folder / "runs" / "grid.json").write_text(json.dumps(grid))
    for model in models:
        for seed in SEEDS[:seeds_done]:
            marks = {"dev-v1.1": {"f1": seed / 10, "exact_match": 0.0}}
            result = {
                **{"format_version": 1, "model": model, "checkpoint": "c.pt", "updates": None, "task": "SQuAD"},
                **{"lr": RATE, "seed": seed, "epochs": 2, "selected_by": "f1", "train_rows": 9, "seconds": 1.0},
                **{"metrics": marks, "baseline": {"dev-v1.1": {"f1": 0.1, "exact_match": 0.0}}},
            }
            run = folder / "runs" / model / "SQuAD" / f"lr{RATE:g}_seed{seed}"
            run.mkdir(parents=True)
            (run / "result.json").write_text(json.dumps(result))
    return folder


def write_latency(folder: Path, seconds: dict[str, float]) -> Path:
    rows = [{"arch": arch, "seconds": {"median": median}} for arch, median in seconds.items()]
    folder.mkdir(parents=True)
    content = {"device": "a processor", "threads": 2, "precision": "fp32", "tokens": 384, "rows": rows}
    (folder / "table4.json").write_text(json.dumps(content))
    return folder


def report(*words: object):
    return CliRunner().invoke(main, ["glue", "report", *map(str, words)])


def rows_of_table_4(markdown: str) -> dict[str, list[str]]:
    begin = markdown.index("## PAR Transformer's Table 4")
    lines = markdown[begin:].split("\n\n")[1].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: cells for name, *cells in rows}


def test_what_lies_beside_is_joined_by_the_names_of_models(tmp_path):
    write_glue(tmp_path / "glue")
    write_squad(tmp_path / "squad", ("par_bert_base", "distilbert_base"), seeds_done=4)
    write_latency(tmp_path / "table4", {"par_bert_base": 0.49, "bert_base_absolute": 0.47})
    printed = report(tmp_path / "glue").output
    rows = rows_of_table_4(printed)
    assert rows["par_bert_base"] == ["(sff)x5 (f)x9", "490.0", "25.0*", "83.0", "53.0"], "4 of 5 seeds of SQuAD"
    assert rows["mine"] == ["-", "-", "-", "83.0", "53.0"]
    assert rows["distilbert_base"] == ["(sf)x6", "-", "25.0*", "-", "-"]
    assert rows["DistilBERT (paper)"] == ["(sf)x6", "5.3+", "86.9", "91.3", "87.5"]
    assert rows["BERT Base (paper)"] == ["(sf)x12", "8.6", "88.4", "91.5", "88.7"]
    assert rows["PAR BERT Base (paper)"] == ["(sff)x5 (f)x9", "5.7", "87.4", "91.6", "89.2"]
    assert "a processor, 2 threads, fp32" in printed
    assert (tmp_path / "glue" / "report" / "glue.tex").read_text().count("PAR BERT Base (paper)") == 1


def test_folders_elsewhere_are_given(tmp_path):
    write_glue(tmp_path / "glue", tasks=("RTE", "MRPC"))
    squad = write_squad(tmp_path / "other" / "place", ("par_bert_base",))
    rows = rows_of_table_4(report(tmp_path / "glue", "--squad", squad).output)
    assert rows["par_bert_base"] == ["(sff)x5 (f)x9", "-", "30.0", "-", "53.0"]


def test_without_squad_and_latency_there_is_no_such_table(tmp_path):
    assert "Table 4" not in report(write_glue(tmp_path / "glue")).output


@pytest.mark.parametrize(
    ("option", "message"),
    [("--squad", "grid.json: no such file; give the folder that `lazyformer squad run` wrote"),
     ("--latency", "table4.json: cannot be read .* give the folder that `lazyformer bench table4` wrote")],
)  # fmt: skip
def test_a_wrong_folder_is_named(tmp_path, option, message):
    (tmp_path / "wrong").mkdir()
    done = report(write_glue(tmp_path / "glue"), option, tmp_path / "wrong")
    with pytest.raises(Exception, match=message):
        raise done.exception


def test_a_file_that_is_no_latency_is_named(tmp_path):
    write_latency(tmp_path / "table4", {}).joinpath("table4.json").write_text('{"rows": [{"arch": "x"}]}')
    done = report(write_glue(tmp_path / "glue"))
    with pytest.raises(Exception, match=r"table4\.json: is no result of `lazyformer bench table4`; run it again"):
        raise done.exception
