"""``lazyformer pattern show``: the plan, its costs, and what sublayers look at against masks by brute force."""

import re
from pathlib import Path

import pytest
import torch
from helpers import count_parameters, dictionary_of
from in_process import invoke, refusal
from local_mean import LOCAL_MEAN, registered

from lazyformer_fairseq.evaluation.loading import model_of
from lazyformer_fairseq.experiments.pattern.look import (
    SEEN,
    AttendedTokens,
    build_network,
    find_attended_tokens,
    text_picture,
)
from lazyformer_fairseq.modules.networks.options import CausalLMOptions
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER


def show(*arguments: object) -> str:
    return invoke("pattern", "show", *arguments)


def seen_of(pattern: str, direction: str, tokens: int, memory: int = 0, heads: int = 2) -> list[AttendedTokens]:
    return find_attended_tokens(build_network(pattern, direction, heads, tokens, memory), tokens, memory)


def test_an_encoders_window_is_what_brute_force_sees():
    """With scores that are nearly equal, every key that a query sees weighs as much."""
    plain, window = seen_of("s f l s[window=2]", ENCODER, 7)
    (heads, weights), *others = window.by_heads
    assert (plain.title, window.title, heads, others) == ("s", "s[window=2]", range(2), [])
    places = torch.arange(7)
    shown = (places[:, None] - places).abs() <= 2
    assert torch.equal(weights > 0, shown)
    torch.testing.assert_close(weights, shown.double(), atol=0.01, rtol=0)
    assert (plain.by_heads[0][1] > 0).all()


def test_a_causal_window_looks_into_memory_and_not_ahead():
    (window,) = seen_of("s[window=2]", CAUSAL, 4, memory=3)
    [(_, weights)] = window.by_heads
    ahead = torch.arange(7) - (3 + torch.arange(4))[:, None]
    assert torch.equal(weights > 0, (ahead <= 0) & (ahead >= -2))


def test_a_kind_without_heads_is_asked_like_any_other_and_heads_that_differ_have_pictures_of_their_own():
    with registered(LOCAL_MEAN):
        (seen,) = seen_of("m", ENCODER, 4)
    assert text_picture(seen).splitlines() == ["m", "■ ■ · ·", "■ ■ ■ ·", "· ■ ■ ■", "· · ■ ■"]
    seen = AttendedTokens("s", ((range(2), torch.ones(1, 2)), (range(2, 3), torch.tensor([[1.0, 0.4, 0.0]]))))
    assert text_picture(seen).splitlines() == ["s, heads 1 to 2", "■ ■", "", "s, head 3", "■ □ ·"]


def columns_of(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if "|" in line]


def test_the_plan_names_whom_each_reads_and_adds_up():
    rows = columns_of(show("s f l s l", "--tokens", "4"))
    assert [row[3] for row in rows[2:7]] == ["", "", "distribution of 1", "", "distribution of 4"]
    parameters = [int(row[4].replace(",", "")) for row in rows[2:]]
    flops = [float(row[5].replace(",", "")) for row in rows[2:]]
    assert sum(parameters[:-1]) == parameters[-1] and sum(flops[:-1]) == pytest.approx(flops[-1], abs=0.1)


@pytest.mark.parametrize("arch", ["lazyformer_m2x6_s", "longformer_base", "par_transformer_base", "transformer_xl_24b"])
def test_the_total_is_that_of_the_built_arch(arch):
    total = columns_of(show("--arch", arch, "--tokens", "2"))[-1]
    vocabulary = {"transformer_xl_24b": [204]}.get(arch, [])
    assert total[0] == "all" and int(total[4].replace(",", "")) == count_parameters(arch, *vocabulary)


def test_the_bias_of_an_arch_is_left_out_where_it_is_refused_or_unwanted():
    """Where no arch is named, it goes by itself."""

    def around(*arguments: str) -> int:
        return int(columns_of(show(*arguments, "--tokens", "2"))[-2][4].replace(",", ""))

    table = 12 * ARCHITECTURES["bert_base"].relative_position_buckets
    assert around("s") - around("s[linformer=2]") == table
    assert around("s") - around("s[linformer=2]", "--arch", "bert_base", "--relative-position-buckets", "0") == table

    # A causal model has none.
    assert around("s[fixed=4,summary=1]", "--arch", "transformer_xl_tiny") > 0


def test_several_patterns_make_one_picture_and_one_looks_at_nothing(tmp_path):
    output = show("s[window=1]f", "s", "--tokens", "4", "--heads", "1", "--output", str(tmp_path / "seen.png"))
    assert (tmp_path / "seen.png").read_bytes().startswith(b"\x89PNG") and "written" in output
    assert SEEN not in output and len(re.findall("shared, embeddings, head", output)) == 2
    assert "no sublayer attends to other tokens" in show("f", "--tokens", "2")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("s[windw=3]", "did you mean window"),
        ("l", "no s below it"),
        ("s --arch no_such", "no_such: no such arch"),
        ("s[linformer=2] --arch bert_base", "T5's bias are undefined: use --relative-position-buckets 0"),
        ("s --arch transformer_xl_tiny --relative-position-buckets 8", "causal models have no T5 bias"),
        ("s --memory 3", "encoders have no memory"),
        ("s --heads 5", "an embedding dimension of 768 is not divisible by 5 attention heads"),
        ("s --tokens 1000 --output x.png", "at most 256"),
    ],
)
def test_what_is_wrong_is_refused_in_words(arguments, why):
    assert why in refusal("pattern", "show", *arguments.split())


def test_of_more_tokens_than_a_picture_holds_there_are_costs():
    with_memory = invoke("pattern", "show", "--arch", "transformer_xl_tiny", "--memory", 640)
    assert "MFLOP" in with_memory and with_memory.endswith(
        "no picture: --tokens and --memory together exceed the limit of 256 tokens\n"
    )


def test_a_block_shorter_than_the_default_summary_is_all_summary():
    short, said = (invoke("pattern", "show", f"s[fixed=4{more}]", "--tokens", 12) for more in ("", ",summary=4"))
    assert short.partition("\n■")[2] == said.partition("\n■")[2] != ""


# lazyformer pattern spans: what is in a checkpoint


def save(pattern: str, path: Path) -> None:
    sizes = dict(decoder_embed_dim=8, decoder_ffn_embed_dim=8, decoder_attention_heads=2, adaptive_softmax_cutoff="")
    options = CausalLMOptions(sublayer_pattern=pattern, **sizes)
    model = model_of(options, dictionary_of(9))
    for number, name in enumerate(name for name, _ in model.named_parameters() if name.endswith("shares")):
        model.get_parameter(name).data.copy_(torch.tensor([0.5, 0.25 * number]))
    history = [{"num_updates": 1, "best_loss": None, "optimizer_name": "", "criterion_name": ""}]
    rest = {"args": None, "extra_state": {"train_iterator": {"epoch": 1}}, "optimizer_history": history}
    cfg = {"model": vars(options), "task": {"_name": None}, "common": {}, "checkpoint": {}}
    torch.save({"model": model.state_dict(), "cfg": cfg, **rest}, path)


def test_each_sublayers_spans_are_printed(tmp_path):
    save("s[span=100] f s s[span=40,ramp=5]", tmp_path / "model.pt")
    _, first, second = invoke("pattern", "spans", tmp_path / "model.pt").splitlines()
    assert (first.split(), second.split()) == (["1", "32", "25.0", "0", "50"], ["4", "5", "15.0", "10", "20"])
    save("sf", tmp_path / "model.pt")
    for name, why in (("model.pt", "have no learned spans"), ("none.pt", "none.pt")):
        assert why in refusal("pattern", "spans", tmp_path / name)
