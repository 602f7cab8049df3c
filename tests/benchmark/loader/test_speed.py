from click.testing import CliRunner

from lazyformer_fairseq.benchmark.loader.command import loader
from lazyformer_fairseq.benchmark.loader.speed import Speed, as_rows


def test_the_loader_is_compared_with_the_model():
    rows = as_rows([Speed("model, an update", 200, 2.0), Speed("loader, 0 workers", 9000, 3.0)])
    assert [row["tokens a second"] for row in rows] == [100, 3000]
    assert [row["times the model"] for row in rows] == ["1.0", "30.0"]


def test_all_tokens_of_the_data_are_counted_and_the_loader_keeps_up(data_folder):
    result = CliRunner().invoke(
        loader,
        [
            str(data_folder),
            *"--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --tokens-per-sample 32 --batch-size 8".split(),
            *"--workers 0 --seconds 0.5 --device cpu".split(),
        ],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    model, loader_alone = (
        line.split()[-2:] for line in result.output.splitlines() if line.startswith(("model", "loader"))
    )
    assert float(model[1]) == 1
    assert float(loader_alone[1]) > 5  # of a model of 20,000 parameters: the smallest there is
