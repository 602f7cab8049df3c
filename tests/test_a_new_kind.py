"""A kind of sublayer that tests alone have is parsed, built, counted, computed and used in commands as any other."""

import json
import os
import re
import shlex
import shutil
import subprocess
from fnmatch import fnmatch

import pytest
import torch
from helpers import PAGES, ROOT, assert_equal_state, assert_refused
from in_process import invoke
from local_mean import LOCAL_MEAN, LocalMean, registered, registered_local_mean  # noqa: F401 (a fixture)
from torch.utils.flop_counter import FlopCounterMode

from lazyformer_fairseq import load
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs import flops
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.heads import MaskedLMHead
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.patterns import kinds as table
from lazyformer_fairseq.patterns.grammar import expand, plan
from lazyformer_fairseq.patterns.kinds import ENCODER, Kind, find_kind, kinds
from lazyformer_fairseq.storage.json_files import read_checked_json

PAGE = PAGES["docs/add_a_kind.md"]


def test_it_is_parsed_with_its_settings_and_help_names_it():
    assert expand("(m[width=5] f)x2 m s m[ width = 3 ]l") == "m[width=5]fm[width=5]fmsml"
    first, attention, between, _ = plan("m[width=5] s m l")
    assert first.values == {"width": 5} and attention.kind.name == "self-attention"
    assert plan("m")[0].values == {"width": 3}
    assert (len(attention.consumers), between.consumers) == (1, ())
    assert find_kind("local mean") is LOCAL_MEAN and "m (local mean)" in table.describe_letters()
    assert {kind.letter for kind in kinds()} == {"s", "l", "k", "c", "r", "f", "-", "m"}


@pytest.mark.parametrize(
    ("pattern", "under", "why"),
    [
        ("sf m[width=0]", "0", "width must be 1 or more, not 0"),
        ("sf m[width=x]", "x", "width needs a whole number, not 'x'"),
        ("sf m[widht=3]", "widht", "did you mean width?"),
        ("-[width=3]", "width", "identity (-) has no setting 'width'; it has no settings"),
        ("m[width]", "width", "width needs a value, as in m[width=3]"),
        ("m[width=3, width=4]", "width=4", "width is specified twice"),
        ("m[width=3", "[", "never closed"),
        ("m[]", "]", "no setting ''"),
        ("[width=3]", "[", "unknown letter '['"),
    ],
)
def test_a_caret_stands_under_what_is_wrong_with_a_setting(pattern, under, why):
    assert_refused(pattern, under, why)


def test_a_row_says_for_which_models_it_is():
    row = Kind("q", "one way", "", "", {ENCODER: LocalMean}, LOCAL_MEAN.settings)
    with registered(row):
        with pytest.raises(UserError, match=r"character 2: one way \(q\) is for encoder models") as caught:
            CausalDecoder("fq", 11, 8, 8, 2, mem_len=2)
        assert str(caught.value).splitlines()[-1].index("^") == 3
    for build in (lambda: plan("sz"), lambda: Encoder("sz", 11, 8, 8, 2), lambda: CausalDecoder("sz", 11, 8, 8, 2, 2)):
        with pytest.raises(UserError, match="unknown letter 'z': use s .self-attention., .*local mean"):
            build()


def counted(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def weights_of(*modules: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in torch.nn.ModuleList(modules).parameters())


def test_counts_are_those_of_built_models():
    pattern = "m[width=4] f s l m"
    encoder = Encoder(pattern, 17, 8, 12, 2, 16, relative_position_buckets=0, attention_backend="eager")
    head, tokens = MaskedLMHead(8, encoder.embed_tokens), torch.randint(2, 17, (2, 9))
    assert flops.count_parameters(pattern, encoder.sizes) == weights_of(encoder, head)
    assert counted(lambda: head(encoder(tokens)[0])) == flops.count_flops(pattern, encoder.sizes, 9, batch=2)

    decoder = CausalDecoder("m[width=4] f s l", 17, 8, 12, 2, mem_len=5, attention_backend="eager")
    softmax, memory = AdaptiveSoftmax(decoder.embedding), StreamMemory()
    decoder(torch.randint(0, 17, (2, 5)), memory)
    tokens = torch.randint(0, 17, (2, 4))

    def forward():
        features, _ = decoder(tokens, memory)
        softmax.negative_log_likelihood(features.flatten(0, 1), tokens.flatten(), decoder.embedding)

    assert flops.count_parameters("m f s l", decoder.sizes) == weights_of(decoder, softmax)
    with torch.no_grad():
        assert counted(forward) == flops.count_flops("m f s l", decoder.sizes, 4, 5, 2)
    for planned, sublayer in zip(decoder.plan, decoder.sublayers, strict=True):
        assert flops.count_sublayer_parameters(planned, decoder.sizes) == weights_of(sublayer)
        assert flops.count_sublayer_flops(planned, decoder.sizes, 4, 5) > 0


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


# --- in commands


def test_an_encoder_trains_resumes_and_is_exported(data_folder, tmp_path, fairseq_train):
    options = (
        "--arch bert_tiny --sublayer-pattern 'm[width=5] f s m l' --dropout 0.1 --criterion masked_lm_accuracy "
        "--batch-size 4 --max-update 6 --save-interval-updates 3"
    )
    whole = fairseq_train(data_folder, options, tmp_path / "whole")
    (tmp_path / "killed").mkdir()  # after its third update
    shutil.copy(tmp_path / "whole" / "checkpoint_1_3.pt", tmp_path / "killed" / "checkpoint_last.pt")
    resumed = fairseq_train(data_folder, options, tmp_path / "killed")
    for part in ("model", "last_optimizer_state"):
        assert_equal_state(resumed[part], whole[part], part)

    model = load(tmp_path / "whole")
    inner = model.model.encoder.sentence_encoder.sublayers[0].inner
    assert isinstance(inner, LocalMean) and inner.width == 5
    invoke("export", tmp_path / "whole", tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["model"]["sublayer_pattern"] == "m[width=5] f s m l"
    exported = load(tmp_path / "exported")
    text = "Anna sees the house."
    torch.testing.assert_close(exported.extract_features(text), model.extract_features(text))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["masked-lm", "language-model"])
def test_it_is_a_candidate_of_a_search(task, data_folder, lm_data, tmp_path):
    data, sizes = {
        "masked-lm": (data_folder, "bert_tiny --tokens-per-sample 16 --max-positions 16"),
        "language-model": (lm_data, "transformer_xl_tiny --tgt-len 8 --mem-len 8 --adaptive-softmax-cutoff ''"),
    }[task]
    options = shlex.split(
        f"--task {task} --candidates s,m[width=5],l,f,identity,m --sublayers 4 --batch-size 16 --constant-updates 1 "
        f"--max-updates 60 --device cpu --arch {sizes}"
    )
    invoke("search", data, tmp_path / "found", *options)
    found = json.loads((tmp_path / "found" / "result.json").read_text())
    assert found["settings"]["candidates"] == ["s", "l", "f", "identity", "m[width=5]", "m"]
    prices = read_checked_json(tmp_path / "found" / "latencies.json")
    assert {"s", "s_read", "l", "f", "m", "m[width=5]", "rest"} == prices.keys()
    assert (tmp_path / "found" / "probabilities.png").stat().st_size > 1000


def test_the_page_about_a_new_kind_has_this_code():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    files = [(ROOT / "tests" / "my_kinds" / name).read_text() for name in ("local_mean.py", "__init__.py")]
    assert [code.split('"""', 2)[2].strip() for code in files] == [block.strip() for block in blocks]


# --- as a package of somebody


@pytest.fixture
def outside(tmp_path, warm_python, monkeypatch):
    """``outside("variable", "lazyformer pattern ...")``: in a process that is told of the package in that way."""
    folder = tmp_path / "packages"
    shutil.copytree(ROOT / "tests" / "my_kinds", folder / "my_kinds")
    monkeypatch.setenv("PATH", os.pathsep.join([str(warm_python), os.environ["PATH"]]))

    def run(how: str, command: str, package: str = "my_kinds", **files: str) -> subprocess.CompletedProcess:
        for name, code in files.items():
            (folder / f"{name}.py").write_text(code)
        names = {"PYTHONPATH": str(folder), **({"LAZYFORMER_KINDS": package} if how == "variable" else {})}
        if how == "entry point":  # as pip leaves it
            about = folder / "my_kinds-1.0.dist-info"
            about.mkdir()
            (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-kinds\nVersion: 1.0\n")
            (about / "entry_points.txt").write_text(f"[lazyformer_fairseq.kinds]\nmine = {package}\n")
        environment = {**os.environ, **names}
        return subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


@pytest.mark.parametrize("how", ["variable", "entry point"])
def test_a_package_is_found(how, outside):
    command, shown = re.search(r"^```bash\n(.*)\n```\n\n```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL).groups()
    assert "LAZYFORMER_KINDS=my_kinds " in command
    search = "lazyformer search . out --task masked-lm --arch bert_tiny --candidates q"
    search = f"lazyformer search run --help && touch dict.txt && {search}"
    known = outside(how, f"{command.split(' ', 1)[1]} && {search}")
    assert known.stdout.startswith(shown.rstrip()), known.stderr
    assert "m (local mean)" in " ".join(known.stdout.split()), "help"
    assert "local mean" in known.stderr, "candidates"


ROW = """
from lazyformer_fairseq.patterns.kinds import *
register(Kind({!r}, "mine", "", "", dict.fromkeys((ENCODER, CAUSAL), "mine:Gone")))
"""


@pytest.mark.parametrize(
    ("how", "package", "code", "says"),
    [
        (
            "variable",
            "gone",
            "",
            "LAZYFORMER_KINDS=gone: ModuleNotFoundError: No module named 'gone'; install the module, or *",
        ),
        ("variable", "my_kinds, mine", "1 / 0", "LAZYFORMER_KINDS=mine: ZeroDivisionError: division by zero"),
        ("variable", "mine", "", "LAZYFORMER_KINDS=mine: mine does not register a kind of sublayer; *"),
        (
            "entry point",
            "mine",
            ROW.format("s"),
            "*mine of my-kinds: ValueError: s (mine) is taken: s (self-attention) already exists*",
        ),
        ("variable", "mine", ROW.format("q"), "mine (q): cannot import its class mine:Gone: AttributeError: *"),
    ],
)
def test_what_is_wrong_with_a_package_is_a_line_and_help_is_there(how, package, code, says, outside):
    done = outside(how, "lazyformer --help >/dev/null && lazyformer pattern show q", package, mine=code)
    assert done.returncode == 1 and fnmatch(done.stderr, f"error: {says}\n"), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_child_processes_checkpoints_and_exports_know_it(outside, data_folder, tmp_path):
    sizes = "--encoder-embed-dim 8 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2 --max-positions 40"
    trained = outside(
        "variable",
        f"lazyformer pretrain bert_base {data_folder} --sublayer-pattern 'm[width=5] f s' --max-update 2 "
        f"--tokens-per-sample 32 --sequences-per-update 4 --num-workers 0 --save-dir trained {sizes} &&"
        "lazyformer export trained plain && lazyformer export trained theirs --to huggingface",
    )
    assert trained.returncode == 0, trained.stderr
    load = (
        "from transformers import AutoModel; print(type(AutoModel.from_pretrained('theirs', trust_remote_code=True)))"
    )
    ours = "from lazyformer_fairseq import LazyFormerModel; LazyFormerModel.from_pretrained('plain')"
    without = outside("not at all", f'python -c "{load}" && python -c "{ours}"')
    assert "LazyFormerModel" in without.stdout, without.stderr
    assert "unknown letter 'm'" in without.stderr and "or install the package that adds this letter" in without.stderr
    assert outside("entry point", f'python -c "{ours}"').returncode == 0
