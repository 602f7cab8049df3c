"""A kind of sublayer that is defined here and nowhere else goes through everything: the table of kinds is the one door.

The class and the row are those of ``docs/add_a_kind.md``, where they stand in a file of their own.
"""

import ast
import csv
import inspect
import json
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Optional

import pytest
import torch
from click.testing import CliRunner
from helpers import ROOT, assert_equal_state
from hydra import compose, initialize_config_dir
from refusals import assert_refused
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.costs.flops import (
    count_encoder_flops,
    count_flops,
    count_parameters,
    count_sublayer_flops,
    count_sublayer_parameters,
)
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.models import LazyFormerModel
from lazyformer_fairseq.modules.attention.choice import BACKENDS
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.heads import MaskedLMHead
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.modules.sublayers.attention_heads import with_memory
from lazyformer_fairseq.modules.sublayers.interface import Context, Flops, HandedOn, Sublayer, SublayerOptions
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, expand, plan
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER, Kind, find_kind, kinds, registered
from lazyformer_fairseq.patterns.settings import Setting
from lazyformer_fairseq.patterns.sizes import Sizes


class LocalMean(Sublayer):
    """The mean of the projected neighbours, `width` of them, projected back: 2 C^2 + 2 C parameters."""

    attends = True

    def __init__(self, embed_dim: int, width: int):
        super().__init__()
        self.width = width
        self.v_proj = Linear(embed_dim, embed_dim)
        self.out_proj = Linear(embed_dim, embed_dim)

    @classmethod
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "LocalMean":
        return cls(options.embed_dim, planned.values["width"])

    @classmethod
    def count_parameters(cls, sizes: Sizes, planned: PlannedSublayer) -> int:
        return 2 * (sizes.embed_dim**2 + sizes.embed_dim)

    @classmethod
    def count_flops(cls, sizes: Sizes, planned: PlannedSublayer, time: int, keys: int, batch: int) -> Flops:
        return Flops(2 * batch * (keys + time) * sizes.embed_dim**2)

    def forward(
        self, x_BTC: Tensor, below: HandedOn, shared: Context, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, HandedOn]:
        v_BKC = self.v_proj(with_memory(memory_BMC, x_BTC))
        is_text = torch.ones_like(v_BKC[..., :1])
        if (is_padding := shared.scores.is_padding(v_BKC.size(1))) is not None:
            is_text = is_text.masked_fill(is_padding[..., None], 0)
        # A causal model looks back alone, over as many.
        before, after = (self.width - 1, 0) if shared.scores.is_causal else (self.width // 2, (self.width - 1) // 2)
        sums, counts = (
            F.pad(part.transpose(1, 2), (before, after)).unfold(-1, self.width, 1).sum(-1).transpose(1, 2)
            for part in (v_BKC * is_text, is_text)
        )
        mean_BKC = sums / counts.clamp(min=1)
        return self.out_proj(mean_BKC[:, -x_BTC.size(1) :]), {}


LOCAL_MEAN = Kind(
    letter="m",
    name="local mean",
    help="the mean of the neighbours' values",
    source="docs/add_a_kind.md",
    modules={ENCODER: LocalMean, CAUSAL: LocalMean},
    settings=(Setting("width", default=3, help="neighbours, the position itself included", unit="tokens", low=1),),
    colour="#009E73",
)


@pytest.fixture(autouse=True)
def local_mean():
    with registered(LOCAL_MEAN):
        yield


def run(*command: str) -> str:
    done = CliRunner().invoke(main, list(map(str, command)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


# --- the pattern language --------------------------------------------------------------------------------------------


def test_it_is_parsed_with_its_settings():
    assert expand("(m[width=5] f)x2 m s m[ width = 3 ]l") == "m[width=5]fm[width=5]fmsml"
    first, attention, between, _ = plan("m[width=5] s m l")
    assert first.values == {"width": 5} and attention.kind.name == "self-attention"
    assert plan("m")[0].values == {"width": 3}
    assert (len(attention.readers), between.readers) == (1, ())
    assert find_kind("local mean") is LOCAL_MEAN


def test_it_stands_in_yaml_and_in_an_override(tmp_path):
    (tmp_path / "mine.yaml").write_text("model:\n  sublayer_pattern: (m[width=5] f)x2 s\n")
    with initialize_config_dir(str(tmp_path), version_base="1.1"):
        assert compose("mine").model.sublayer_pattern == "(m[width=5] f)x2 s"
        changed = compose("mine", ['model.sublayer_pattern="(m[width=4] f)x2 s"'])
        assert len(plan(changed.model.sublayer_pattern)) == 5


@pytest.mark.parametrize(
    ("pattern", "under", "why"),
    [
        ("sf m[width=0]", "0", "width must be 1 or more, not 0"),
        ("sf m[width=x]", "x", "width needs a whole number, not 'x'"),
        ("sf m[widht=3]", "widht", "did you mean width?"),
        ("f[width=3]", "width", "feed-forward (f) has no setting 'width'; it has none"),
        ("m[width]", "width", "width needs a value, as in m[width=3]"),
        ("m[width=3, width=4]", "width=4", "width is there twice"),
        ("m[width=3", "[", "never closed"),
        ("m[]", "]", "no setting ''"),
        ("[width=3]", "[", "unknown letter '['"),
    ],
)
def test_a_caret_stands_under_what_is_wrong_with_a_setting(pattern, under, why):
    assert_refused(pattern, under, why)


def test_a_kind_of_one_direction_is_refused_in_the_other():
    one_way = Kind("q", "one way", "", "", {ENCODER: LocalMean}, LOCAL_MEAN.settings)
    with (
        registered(one_way),
        pytest.raises(UserError, match=r"character 2: one way \(q\) is for encoder models") as caught,
    ):
        CausalDecoder("fq", 11, 8, 8, 2, mem_len=2)
    assert str(caught.value).splitlines()[-1].index("^") == 3
    with registered(one_way):
        Encoder("fq", 11, 8, 8, 2)


def test_the_back_ends_of_a_row_are_the_only_ones():
    only_eager = Kind("q", "only eager", "", "", {ENCODER: LocalMean}, LOCAL_MEAN.settings, back_ends=("eager",))
    with registered(only_eager):
        with pytest.raises(
            UserError, match=r"--lazy-backend fused: cannot compute only eager \(q\); choose from auto, eager"
        ):
            Encoder("sq", 11, 8, 8, 2, lazy_backend="fused")
        encoder = Encoder("sq", 11, 8, 8, 2)
        assert encoder.context(torch.zeros(1, 4, 8)).back_end(0, ()) == "eager"
    assert all(set(kind.back_ends) <= set(BACKENDS) for kind in kinds())


def test_a_letter_that_no_row_has_is_an_error_everywhere():
    for build in (lambda: plan("sz"), lambda: Encoder("sz", 11, 8, 8, 2), lambda: CausalDecoder("sz", 11, 8, 8, 2, 2)):
        with pytest.raises(UserError, match="unknown letter 'z': use s .self-attention., .*local mean"):
            build()


# --- modules and formulas --------------------------------------------------------------------------------------------


def counted(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_formulas_equal_a_built_encoder():
    encoder = Encoder("m[width=4] f s l m", 17, 8, 12, 2, 16, relative_position_buckets=0, lazy_backend="eager")
    head, tokens = MaskedLMHead(8, encoder.embed_tokens), torch.randint(2, 17, (2, 9))
    pattern, sizes = "m[width=4] f s l m", encoder.sizes
    built = sum(weight.numel() for weight in torch.nn.ModuleList([encoder, head]).parameters())
    assert count_parameters(pattern, sizes) == built
    assert counted(lambda: head(encoder(tokens)[0])) == count_flops(pattern, sizes, 9, batch=2)
    training = counted(lambda: head(encoder(tokens)[0]).sum().backward())
    assert training == count_encoder_flops(pattern, sizes, 9, 2, predicted=18, training=True)


def test_formulas_equal_a_built_causal_model():
    decoder = CausalDecoder("m[width=4] f s l", 17, 8, 12, 2, mem_len=5, lazy_backend="eager")
    softmax, memory = AdaptiveSoftmax(decoder.embedding), StreamMemory()
    decoder(torch.randint(0, 17, (2, 5)), memory)
    tokens = torch.randint(0, 17, (2, 4))

    def forward():
        features, _ = decoder(tokens, memory)
        softmax.negative_log_likelihood(features.flatten(0, 1), tokens.flatten(), decoder.embedding)

    assert count_parameters("m f s l", decoder.sizes) == sum(
        weight.numel() for weight in torch.nn.ModuleList([decoder, softmax]).parameters()
    )
    with torch.no_grad():
        assert counted(forward) == count_flops("m f s l", decoder.sizes, 4, 5, 2)
    for planned, sublayer in zip(decoder.plan, decoder.sublayers, strict=True):
        found = sum(weight.numel() for weight in sublayer.parameters())
        assert count_sublayer_parameters(planned, decoder.sizes) == found
        assert count_sublayer_flops(planned, decoder.sizes, 4, 5) > 0


def test_padding_does_not_count_and_the_future_is_not_seen():
    torch.manual_seed(1)
    encoder = Encoder("m[width=5]", 17, 8, 12, 2, 16, padding_idx=1).double().eval()
    tokens = torch.randint(2, 17, (1, 6))
    padded = torch.cat([tokens, torch.ones(1, 3, dtype=torch.long)], 1)
    short, _ = encoder(tokens)
    long, _ = encoder(padded, padded.eq(1))
    torch.testing.assert_close(long[:, :6], short)
    decoder = CausalDecoder("m[width=3]", 17, 8, 12, 2, mem_len=9).double().eval()
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight)
    changed = tokens.clone()
    changed[:, 3] = (tokens[:, 3] + 1) % 17
    differs = (decoder(tokens)[0] - decoder(changed)[0]).abs().amax((0, 2)) > 1e-12
    assert differs.tolist() == [False, False, False, True, True, True]
    memory = StreamMemory()
    parts = [decoder(part, memory)[0] for part in tokens.split(2, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), decoder(tokens)[0])


# --- training, resuming, handing on ----------------------------------------------------------------------------------

TINY_ENCODER = (
    "--arch bert_tiny --sublayer-pattern 'm[width=5] f s m l' --dropout 0.1 --criterion masked_lm_accuracy "
    "--batch-size 4"
)


def from_the_third_update(folder: Path) -> Path:
    """A folder as a run that was killed after its third update leaves it."""
    (folder / "resumed").mkdir()
    shutil.copy(folder / "whole" / "checkpoint_1_3.pt", folder / "resumed" / "checkpoint_last.pt")
    return folder / "resumed"


def test_an_encoder_trains_resumes_and_is_exported(data_folder, tmp_path, fairseq_train):
    options = f"{TINY_ENCODER} --max-update 6 --save-interval-updates 3"
    whole = fairseq_train(data_folder, options, tmp_path / "whole")
    resumed = fairseq_train(data_folder, options, from_the_third_update(tmp_path))
    assert_equal_state(resumed["model"], whole["model"])
    assert_equal_state(resumed["last_optimizer_state"], whole["last_optimizer_state"])

    model = LazyFormerModel.from_pretrained(tmp_path / "whole")
    assert isinstance(model.model.encoder.sentence_encoder.sublayers[0].inner, LocalMean)
    assert model.model.encoder.sentence_encoder.sublayers[0].inner.width == 5
    run("export", tmp_path / "whole", tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["model"]["sublayer_pattern"] == "m[width=5] f s m l"
    exported = LazyFormerModel.from_pretrained(tmp_path / "exported")
    text = "Anna sees the house."
    torch.testing.assert_close(exported.extract_features(text), model.extract_features(text))


def test_a_causal_model_trains_and_resumes(lm_data, tmp_path, fairseq_train):
    task = "stream_language_modeling --tgt-len 8"
    options = (
        "--arch transformer_xl_tiny --sublayer-pattern 'm[width=4] f s f l' --criterion causal_lm --batch-size 4 "
        "--adaptive-softmax-cutoff '' --mem-len 8 --lazy-backend fused --max-update 6 --save-interval-updates 3"
    )
    whole = fairseq_train(lm_data, options, tmp_path / "whole", task)
    resumed = fairseq_train(lm_data, options, from_the_third_update(tmp_path), task)
    assert_equal_state(resumed["model"], whole["model"])


# --- bench, search, comparison ---------------------------------------------------------------------------------------


def test_it_is_benched(tmp_path):
    options = "--baseline-arch bert_tiny --arch bert_tiny --lengths 8 --tokens 8 --rounds 2 --what encoder"
    buckets = "--relative-position-buckets 0 --backend eager --baseline-backend eager"
    run("bench", *options.split(), *buckets.split(), "--pattern", "mine=(m[width=5]f)x2 sflf", "--output", tmp_path)
    rows = json.loads((tmp_path / "results.json").read_text())["cells"][0]["rows"]
    mine = next(row for row in rows if row["model"] == "mine")
    assert mine["pattern"] == "(m[width=5]f)x2 sflf" and mine["flops"] > 0 and mine["seconds"]["median"] > 0


@pytest.mark.parametrize("task", ["masked-lm", "language-model"])
def test_it_is_a_candidate_of_a_search(task, data_folder, lm_data, tmp_path):
    if task == "masked-lm":
        data, sizes = data_folder, "--arch bert_tiny --tokens-per-sample 16 --max-positions 16"
    else:
        data = lm_data
        sizes = "--arch transformer_xl_tiny --tgt-len 8 --mem-len 8 --adaptive-softmax-cutoff ''".replace("''", "")
    options = [*sizes.split(" "), "--task", task, "--candidates", "s,m[width=5],l,f,identity,m", "--sublayers", "4"]
    options += "--batch-size 16 --constant-updates 1 --max-updates 60 --device cpu --latency-price 0.1".split()
    run("search", data, tmp_path / "found", *options)
    found = json.loads((tmp_path / "found" / "probabilities.json").read_text())
    assert found["candidates"] == ["s", "l", "f", "identity", "m[width=5]", "m"]
    prices = json.loads((tmp_path / "found" / "latencies.json").read_text())
    assert {"s", "s_read", "l", "f", "m", "m[width=5]", "rest"} == prices.keys()
    assert "m" in json.loads((tmp_path / "found" / "result.json").read_text())["table"][0]["sublayers"]
    assert (tmp_path / "found" / "history.png").stat().st_size > 1000


def test_it_is_compared(lm_data, tmp_path):
    options = "--embed-dim 8 --ffn-embed-dim 8 --heads 2 --updates 1 --seeds 1 --tgt-len 8 --mem-len 8 --batch-size 4"
    evaluation = "--evaluation-tgt-len 8 --evaluation-mem-len 8 --device cpu"
    run(
        "lm", "compare", lm_data, tmp_path, *options.split(), *evaluation.split(), "--adaptive-softmax-cutoff", "",
        "--pattern", "mean=(m[width=5]f)x8",
    )  # fmt: skip
    with (tmp_path / "table.csv").open() as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    assert (rows["mean"]["m"], rows["mean"]["s"], rows["transformer_xl"]["m"]) == ("8", "0", "0")
    assert int(rows["mean"]["flops"]) > 0


# --- one door --------------------------------------------------------------------------------------------------------


def test_help_names_it():
    import lazyformer_fairseq.patterns.kinds as table

    assert "m (local mean)" in table.describe_letters()
    assert {kind.letter for kind in kinds()} == {"s", "l", "k", "f", "-", "m"}


def test_the_page_about_a_new_kind_has_this_code():
    page = (ROOT / "docs" / "add_a_kind.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    row = re.search(r"^LOCAL_MEAN = (Kind\(\n.*?^\))", inspect.getsource(sys.modules[__name__]), re.M | re.S)[1]
    assert any(inspect.getsource(LocalMean) in block for block in blocks)
    row = row.replace("modules={ENCODER: LocalMean, CAUSAL: LocalMean}", 'modules=_both("local_mean:LocalMean")')
    assert any(textwrap.indent(row, "    ") in block for block in blocks)


# Where a letter is no kind's: "s" ends an English plural.
NO_KINDS = {"data/text/moses_words.py"}


def letters_asked_for(tree: ast.AST, letters: set[str]) -> list[int]:
    """Lines that compare with a kind's letter, look one up, count one, or go through several."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            asked = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = node.args if node.func.attr in {"count", "index", "get", "replace", "find", "pop"} else []
        elif isinstance(node, (ast.For, ast.comprehension)):
            asked = [node.iter]
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        else:
            continue
        for part in asked:
            parts = part.elts if isinstance(part, (ast.Tuple, ast.List, ast.Set)) else [part]
            words = [each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            if any(word and set(word) <= letters for word in words):
                found.append(part.lineno)
    return found


def test_nothing_outside_the_table_and_the_kinds_own_files_asks_for_a_letter():
    package = ROOT / "lazyformer_fairseq"
    letters = {kind.letter for kind in kinds()} - {"m", "-"}
    offenders = []
    for path in package.rglob("*.py"):
        place = path.relative_to(package).as_posix()
        if place == "patterns/kinds.py" or place.startswith("modules/sublayers/") or place in NO_KINDS:
            continue
        lines = letters_asked_for(ast.parse(path.read_text(encoding="utf-8")), letters)
        offenders += [f"{place}:{line}" for line in lines]
    assert offenders == []


@pytest.mark.parametrize(
    "code",
    [
        "kind == 's'",
        "'l' in kinds",
        "table['f']",
        "pattern.count('s')",
        "[k for k in 'slf']",
        "kind in ('s', 'l')",
        "match k:\n case 's': pass",
    ],
)
def test_that_test_finds_each_way_to_ask(code):
    assert letters_asked_for(ast.parse(code), {"s", "l", "f"})
