"""Broken files of every kind: each reader raises nothing but our own errors."""

import json
import logging
from typing import Any

import pytest
from fairseq_plugin.reliability.fuzz_targets import Target, make_targets
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.fairseq_plugin.models.export import export

TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4"
ALL_INPUTS = 100_000
QUICK_SHARE = 50  # the quick form gives a fiftieth of the inputs

EDITS = st.tuples(
    st.sampled_from(["replace", "insert", "delete", "cut", "repeat"]),
    st.integers(0, 2**16),
    st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\0", b"\n", b"\t", b"-1", b"99999999999", b"../"])),
)


def edited(seed: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    content = bytearray(seed)
    for kind, place, new in edits:
        at = place % (len(content) + 1)
        if kind == "replace":
            content[at : at + len(new)] = new
        elif kind == "insert":
            content[at:at] = new
        elif kind == "delete":
            del content[at : at + 4 * len(new)]
        elif kind == "repeat":
            content[at:at] = content[at : at + 16] * len(new)
        else:
            del content[at:]
    return bytes(content)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["../x", "/etc/passwd", 2**63, -1, 0, 1e308, "\ud800"]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=4,
)


def with_another_value(content: Any, path: list[int], value: Any) -> Any:
    """A copy of JSON in which what lies at the end of `path` is another value, or gone."""
    if not path or not isinstance(content, (dict, list)) or not content:
        return value
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key = keys[path[0] % len(keys)]
    copy = content.copy()
    if len(path) == 1 and path[0] % 5 == 0:
        del copy[key]
    else:
        copy[key] = with_another_value(content[key], path[1:], value)
    return copy


def inputs_of(target: Target) -> st.SearchStrategy[bytes]:
    """Valid files with some edits, JSON with another value somewhere, and bytes of any kind."""
    kinds = [
        st.builds(edited, st.sampled_from(target.seeds), st.lists(EDITS, min_size=1, max_size=6)),
        st.binary(max_size=200),
    ]
    if target.seeds[0].startswith(b"{") and len(target.seeds) == 1:
        content = json.loads(target.seeds[0])
        paths = st.lists(st.integers(0, 99), min_size=1, max_size=5)
        kinds.append(
            st.builds(lambda path, value: json.dumps(with_another_value(content, path, value)).encode(), paths, VALUES)
        )
    return st.one_of(kinds)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture
def targets(folders, data_folder, fairseq_train, tmp_path) -> dict[str, Target]:
    if not (folders / "model").exists():
        fairseq_train(data_folder, f"{TINY} --max-update 1 --disable-validation", folders / "run")
        export(folders / "run", folders / "model")
    (tmp_path / "files").mkdir()
    return make_targets(tmp_path / "files", data_folder, folders / "model")


def fuzz(name: str, target: Target, count: int, **options) -> int:
    """Gives a target `count` inputs; returns how many it was given."""
    given_to_it = 0

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        **options,
    )
    @given(inputs_of(target))
    def run(content: bytes) -> None:
        nonlocal given_to_it
        given_to_it += 1
        target(content)

    try:
        run()
    except Exception as error:
        error.add_note(f"reader: {name}")
        raise
    return given_to_it


def test_readers_raise_our_own_errors_alone(targets, monkeypatch):
    monkeypatch.setattr(logging.root, "level", logging.ERROR)
    counts = {
        name: fuzz(name, target, max(20, target.inputs // QUICK_SHARE), derandomize=True)
        for name, target in targets.items()
    }
    assert sum(counts.values()) >= ALL_INPUTS // QUICK_SHARE, counts


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.timeout(7200)
def test_readers_raise_our_own_errors_alone_in_full(targets, monkeypatch, record_counts):
    monkeypatch.setattr(logging.root, "level", logging.ERROR)
    counts = {name: fuzz(name, target, target.inputs) for name, target in targets.items()}
    record_counts("fuzz", inputs=sum(counts.values()), errors_not_ours=0, **counts)
    assert sum(counts.values()) >= ALL_INPUTS, counts


def test_valid_files_are_read(targets):
    """Else the fuzzing would see nothing but the first line of a reader."""
    for name, target in targets.items():
        assert target.seeds, f"{name} has no valid file to start from"
        for seed in target.seeds:
            target.read(seed)  # raises where it is not
