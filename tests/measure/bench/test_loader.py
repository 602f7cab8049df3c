from itertools import count
from types import SimpleNamespace

from click.testing import CliRunner

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.measure.bench import loader


def test_the_loader_is_compared_with_the_model():
    rows = loader.as_rows({"model, an update": 100.0, "loader, 0 workers": 3000.0})
    assert [row["tokens a second"] for row in rows] == ["100", "3,000"]
    assert [row["times the model"] for row in rows] == ["1.0", "30.0"]


def test_warm_up_is_not_counted_and_all_that_comes_in_time_is(monkeypatch):
    seconds = count()  # each look at the clock is a second after the last
    monkeypatch.setattr(loader, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(loader, "WARM_UP", 2)
    assert loader._speed(iter([1000, 1000, 7, 8, 9, 1000]), seconds=3) == (7 + 8 + 9) / 4


def test_model_and_loader_each_get_a_row(data_folder):
    result = CliRunner().invoke(
        main,
        [
            *("bench", "loader", str(data_folder)),
            *"--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --tokens-per-sample 32 --batch-size 8".split(),
            *"--workers 0 --seconds 0.1 --device cpu".split(),
        ],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines())
    assert header == ["", "tokens a second", "times the model"]
    (model, of_model, once), (alone, of_loader, times) = rows
    assert (model, once, alone) == ("model, an update", "1.0", "loader, 0 workers")
    assert of_model != "0" != of_loader and float(times) > 0
