from itertools import count
from types import SimpleNamespace

from click.testing import CliRunner

from lazyformer_fairseq.benchmark.loader import speed
from lazyformer_fairseq.benchmark.loader.command import loader
from lazyformer_fairseq.benchmark.loader.speed import Speed, as_rows


def test_the_loader_is_compared_with_the_model():
    rows = as_rows([Speed("model, an update", 200, 2.0), Speed("loader, 0 workers", 9000, 3.0)])
    assert [row["tokens a second"] for row in rows] == [100, 3000]
    assert [row["times the model"] for row in rows] == ["1.0", "30.0"]


def test_warm_up_is_not_counted_and_all_that_comes_in_time_is(monkeypatch):
    seconds = count()  # each look at the clock is a second after the last
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(speed, "WARM_UP", 2)
    assert speed._count(iter([1000, 1000, 7, 8, 9, 1000]), seconds=3) == (7 + 8 + 9, 4)


def test_model_and_loader_each_get_a_row(data_folder):
    result = CliRunner().invoke(
        loader,
        [
            str(data_folder),
            *"--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --tokens-per-sample 32 --batch-size 8".split(),
            *"--workers 0 --seconds 0.1 --device cpu".split(),
        ],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    model, loader_alone = (
        line.split()[-2:] for line in result.output.splitlines() if line.startswith(("model", "loader"))
    )
    assert float(model[1]) == 1 and model[0] != "0"
    assert loader_alone[0] != "0" and float(loader_alone[1]) > 0
