"""The scripts of language modelling: what is downloaded, prepared, and the command that would train."""

import hashlib
import shlex
import zipfile
from functools import partial

import pytest
from helpers import ROOT, false_nvidia_smi, run_script
from language_model_data import write_toy_wikitext
from language_model_recipes import assert_recipe
from launches import dry_run, pretrain, settings_of
from mirrors import mirror  # noqa: F401 (a fixture)

from lazyformer_fairseq.language_modeling.prepare import read_manifest
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES

PREPARE = {"wikitext103": "wikitext-103-v1.zip", "enwik8": "enwik8.zip", "text8": "text8.zip"}
pytestmark = pytest.mark.usefixtures("without_gpus")


@pytest.fixture
def archive(tmp_path) -> bytes:
    """A toy text, packed as WikiText-103 is."""
    text = write_toy_wikitext(tmp_path / "packed" / "wikitext-103")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as file:
        for path in text.iterdir():
            file.write(path, f"wikitext-103/{path.name}")
    return (tmp_path / "archive.zip").read_bytes()


@pytest.mark.parametrize(("name", "file"), PREPARE.items())
def test_what_would_be_done_and_help(name, file):
    script = partial(run_script, f"prepare_{name}.sh")
    run = script("my data", "--dry-run")
    assert run.returncode == 0 and "would download https://" in run.stderr and file in run.stderr
    corpus, official = ("wikitext", "wikitext-103") if name == "wikitext103" else (name, name)
    command = shlex.split(run.stdout)
    at = command.index("prepare")
    assert command[at + 1 :] == [corpus, f"my data.download/{official}", "my data", "--official", official]
    run = script("out", "--from", ".", "--unofficial", "--dry-run")
    assert shlex.split(run.stdout)[-4:] == ["prepare", corpus, ".", "out"] and not run.stderr
    for arguments in ((), ("--help",), ("a", "b", "--help")):
        run = script(*arguments)
        assert (run.returncode, run.stderr) == (0, "") and run.stdout.startswith(f"usage: scripts/prepare_{name}.sh")


@pytest.mark.slow
def test_a_text_that_is_there_and_not_the_official_one_is_refused(tmp_path):
    run = run_script("prepare_wikitext103.sh", "data", "--from", write_toy_wikitext(tmp_path / "my text"))
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "error: " in run.stderr and "not wikitext-103: train" in run.stderr
    assert not (tmp_path / "data").exists()


def test_a_download_goes_on_where_it_broke_off_and_is_checked(mirror, archive, tmp_path):  # noqa: F811
    mirror.files["/wiki.zip"] = archive
    part = tmp_path / "data.download" / "wiki.zip.part"
    part.parent.mkdir()
    part.write_bytes(archive[:1000])
    # As it comes from another place than the official one, its MD5 is not the published one.
    run = run_script("prepare_wikitext103.sh", "data", "--url", f"{mirror.url}/wiki.zip")
    assert run.returncode == 1 and "its MD5 is not 9ddaacaf6af0710eda8c456decff7832" in run.stderr
    assert (tmp_path / "data.download" / "wiki.zip").read_bytes() == archive and not part.exists()
    assert [(method, start) for method, _, start, _ in mirror.requests] == [("HEAD", ""), ("GET", "bytes=1000-")]
    assert not (tmp_path / "data").exists()
    run = run_script("prepare_text8.sh", "out", "--url", f"{mirror.url}/text8.zip")
    assert run.returncode == 1 and "/text8.zip: cannot be read; give another by --url, or --from DIR" in run.stderr


@pytest.mark.slow
def test_what_was_downloaded_is_unpacked_and_prepared(archive, tmp_path):
    text = (ROOT / "scripts" / "prepare_wikitext103.sh").read_text()
    text = text.replace("9ddaacaf6af0710eda8c456decff7832", hashlib.md5(archive).hexdigest())
    copy = tmp_path / "prepare_toy.sh"
    copy.write_text(text.replace('"$(dirname "$0")/prepare_text.sh"', f'"{ROOT}/scripts/prepare_text.sh"'))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "wikitext-103-v1.zip").write_bytes(archive)
    run = run_script(copy, "data", "--downloads", "kept", "--unofficial")
    assert run.returncode == 0, run.stderr
    assert "NOT an official text" in run.stdout and read_manifest(tmp_path / "data")["official"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--from x", "give OUT first"),
        ("out --from", "--from needs a value"),
        ("out --fast", "--fast: no such option"),
        ("out --from nowhere", "--from nowhere: is no folder"),
    ],
)
def test_what_cannot_be_prepared_is_said(arguments, message):
    run = run_script("prepare_enwik8.sh", *arguments.split())
    assert run.returncode > 0 and run.stderr.startswith("error: ") and message in run.stderr


@pytest.mark.parametrize(
    ("arch", "gpus", "tgt_len", "streams", "update_freq"),
    [
        ("par_transformer_base", 8, 192, 32, 1),
        ("transformer_xl_base", 2, 192, 32, 4),
        ("sandwich_transformer_large", 8, 384, 16, 1),
        ("par_transformer_24b", 4, 512, 12, 2),
    ],
)
def test_it_is_the_papers_setting(tmp_path, monkeypatch, arch, gpus, tgt_len, streams, update_freq):
    false_nvidia_smi(tmp_path, monkeypatch, *["9.0"] * 8)
    cfg = settings_of(arch, "some data", "--gpus", gpus)
    row = CAUSAL_ARCHITECTURES[arch].options()
    assert {key: cfg.model[key] for key in row} == row
    assert (cfg.task._name, cfg.task.data, cfg.task.tgt_len) == ("stream_language_modeling", "some data", tgt_len)
    assert cfg.model.mem_len == tgt_len and gpus * streams * update_freq * tgt_len == 49_152
    assert (cfg.dataset.batch_size, list(cfg.optimization.update_freq)) == (streams, [update_freq])
    assert cfg.criterion._name == "causal_lm"
    assert_recipe(cfg, CAUSAL_ARCHITECTURES[arch].recipe)
    assert cfg.optimization.max_update == (100_000 if arch.endswith("large") else 40_000)
    assert (cfg.common.cpu, cfg.common.bf16) == (False, True)


@pytest.mark.parametrize(
    ("arch", "recipe", "trained_by"),
    [
        ("par_transformer_large", "transformer-xl", "transformer_xl"),
        ("par_transformer_large", "nvidia", "nvidia_large"),
        ("longformer_small", None, "transformer_xl"),
        ("longformer_small", "nvidia", "nvidia"),
    ],
)
def test_the_recipe_may_be_chosen(arch, recipe, trained_by):
    assert_recipe(settings_of(arch, "data", *(["--recipe", recipe] if recipe else [])), trained_by)


def test_options_of_fairseq_train_win_and_wrong_ones_are_said():
    words = "par_transformer_base data --max-update 7 --sublayer-pattern (sff)x5 --sequences-per-update 8".split()
    assert dry_run(*words) == dry_run(*words, by=partial(run_script, "train_language_model.sh"))
    cfg = settings_of(*words)
    assert (cfg.optimization.max_update, cfg.model.sublayer_pattern, cfg.common.cpu) == (7, "(sff)x5", True)
    assert (cfg.dataset.batch_size, cfg.optimization.update_freq) == (4, [2])
    for arguments, message in {
        "par_transformer_base": "Missing argument 'DATA'",
        "a data --sequences-per-update some": "'some' is not a valid integer",
        "par_transformer_base.yaml data --recipe nvidia": "write recipe=nvidia behind it",
        "par_transformer_bas data": "no such arch or folder; did you mean par_transformer_base",
    }.items():
        run = pretrain(*arguments.split())
        assert run.returncode in (1, 2) and message in run.stderr
