"""JSON files with a checksum: what comes back is what was written, or an error that names the file."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.json_files import read_checked_json, write_checked_json

CONTENT = {
    "updates": 120,
    "curve": {"loss": [7.25, float("inf")], "words": ("\u00e9t\u00e9", None)},
    "by seed": {1: True},
}
AS_READ = {
    "updates": 120,
    "curve": {"loss": [7.25, float("inf")], "words": ["\u00e9t\u00e9", None]},
    "by seed": {"1": True},
}


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7), st.booleans())
def test_damage_of_any_byte_is_noticed_or_changes_nothing(tmp_path_factory, share, bit, is_cut):
    path = tmp_path_factory.mktemp("checked") / "file.json"
    write_checked_json(path, CONTENT)
    assert read_checked_json(path) == AS_READ
    damaged = bytearray(path.read_bytes())
    place = int(share * len(damaged))
    if is_cut:
        del damaged[place:]
    else:
        damaged[place] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        assert read_checked_json(path) == AS_READ
    except UserError as error:
        assert str(error).startswith((f"{path}: ", f"{path} is damaged: "))
        assert str(error).endswith("remove it and run the same command again")


@pytest.mark.parametrize("content", [{}, {"updates": 120}, {**CONTENT, "sha256": 3}])
def test_a_file_without_its_checksum_is_refused(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"file\.json is damaged: its checksum does not match .*; copy it again"):
        read_checked_json(path, "copy it again")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_not_waited_for(tmp_path, make):
    make(tmp_path / "file.json")
    with pytest.raises(UserError, match=r"file\.json: not a regular file; remove it"):
        read_checked_json(tmp_path / "file.json")
