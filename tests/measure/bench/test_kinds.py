"""`lazyformer bench kinds`: kinds of attention of given queries, keys and values."""

import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional as F

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.bench import kinds, measuring
from lazyformer_fairseq.measure.bench.settings import KindSettings
from lazyformer_fairseq.measure.costs.latency import Timing

SMALL = (
    "bench kinds --lengths 16,24 --heads 2x4 --rounds 2 --device cpu "
    "--kinds s[window=2],s[linformer=4,share=kv] --kinds sl"
)


def test_each_kind_and_length_has_a_line():
    printed = CliRunner().invoke(main, SMALL.split(), catch_exceptions=False).output
    lines = [line for line in printed.splitlines() if line.startswith("|")][2:]
    names = [line.split("|")[1].strip() for line in lines]
    ours = [name for name in names if "Hugging Face" not in name]
    assert ours == [kinds.FULL, "s[window=2]", "s[linformer=4,share=kv]", "sl"] * 2
    assert sum("1.00x" in line for line in lines) >= 2


@pytest.mark.parametrize("back_end", ["eager", "recompute"])
def test_it_measures_attention_of_what_is_given(back_end):
    """Plain attention, and a block of two: outputs' gradients are those of torch's attention."""
    projected = torch.randn(2, 6, 24, dtype=torch.double, requires_grad=True)
    gradient = torch.randn(2, 6, 8, dtype=torch.double)
    (expected,) = kinds._full(projected, gradient, 2)
    _, found = kinds._Given("s", projected, gradient, 2, back_end)()
    torch.testing.assert_close(found, expected)
    _, of_s, of_l = kinds._Given("sl", projected, gradient, 2, back_end)()
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in projected.chunk(3, -1))
    values = q.detach().clone().requires_grad_()  # those of the l are the first columns
    outputs = [F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, values)]
    merged = [output.transpose(1, 2).flatten(2) for output in outputs]
    plain = torch.autograd.grad(merged, [projected, values], [gradient] * 2)
    torch.testing.assert_close(of_s, plain[0])
    torch.testing.assert_close(of_l, plain[1].transpose(1, 2).flatten(2))


def test_it_measures_the_filters_of_a_convolution():
    projected = torch.randn(2, 6, 24, dtype=torch.double, requires_grad=True)
    gradient = torch.randn(2, 6, 8, dtype=torch.double)
    convolution = kinds._Given("c[width=3]", projected, gradient, 2, "auto")
    _, found, of_filters = convolution()
    filters = convolution.encoder.sublayers[0].inner.weight
    gated = F.glu(projected[..., :16], -1).transpose(1, 2)
    output = F.conv1d(gated, filters[:, None], padding=1, groups=8).transpose(1, 2)
    of_projected, expected = torch.autograd.grad(output, [projected, filters], gradient)
    torch.testing.assert_close(found, of_projected[..., :16])
    torch.testing.assert_close(of_filters, expected)
    kinds._Given("c[form=lightweight]", projected, gradient, 2, "auto")()


def test_hugging_faces_longformer_computes_the_same_window():
    if kinds.plain_window("s[window=2]", 12) is None:
        pytest.skip("transformers cannot be imported")
    projected = torch.randn(2, 12, 24, dtype=torch.double, requires_grad=True)
    gradient = torch.randn(2, 12, 8, dtype=torch.double)
    # It takes softmax in single precision.
    theirs = kinds.HuggingFaceLongformer(2, projected, gradient, 2)()
    _, ours = kinds._Given("s[window=2]", projected, gradient, 2, "eager")()
    torch.testing.assert_close(torch.cat(theirs, -1).transpose(0, 1), ours, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["s", "s[window=2,global=1]", "s[window=2]l", "s[window=5]"])
def test_it_stands_beside_nothing_else(kind):
    assert kinds.plain_window(kind, 12) is None


def test_other_letters_are_refused():
    with pytest.raises(UserError, match="give patterns of s, l and c, without f"):
        kinds.measure_kinds(KindSettings(kinds=("sf",), lengths=(8,)), (2, 4), "cpu", torch.float32)


def test_ctrl_c_keeps_the_lengths_that_were_measured(monkeypatch):
    right = measuring.measure

    def measure(*args, **options):
        if "24" in options["description"]:
            raise KeyboardInterrupt
        return right(*args, **options)

    monkeypatch.setattr(measuring, "measure", measure)
    result = CliRunner().invoke(main, SMALL.split())
    assert result.exit_code == 130 and "s[window=2]" in result.output and "| 24 " not in result.output


def test_where_torchs_own_does_not_fit_into_memory_there_is_no_speed_up():
    rows = [kinds.Row("s[window=2]", 8, Timing((0.5, 0.5)), 2**20)]
    *_, line = kinds.table(rows).splitlines()
    assert [cell.strip() for cell in line.split("|")[1:6]] == ["s[window=2]", "8", "500.0 (n = 2)", "", "1.0"]
