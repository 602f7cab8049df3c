"""The user's cache folder: what was measured once is not measured again."""

import json

import platformdirs
import pytest

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.json_files import cache_file, remembered


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LAZYFORMER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_measurement_is_kept(folder):
    assert remembered("speeds.json", "this", "a", lambda: [1, 2]) == [1, 2]
    assert remembered("speeds.json", "that", "a", lambda: [3]) == [3]
    assert remembered("speeds.json", "this", "a", lambda: pytest.fail("measured again")) == [1, 2]
    assert json.loads((folder / "speeds.json").read_text()) == {"this": {"a": [1, 2]}, "that": {"a": [3]}}


def test_of_two_processes_the_first_decides(folder):
    def measured_by_both():
        remembered("speeds.json", "this", "a", lambda: 1)
        return 2

    assert remembered("speeds.json", "this", "a", measured_by_both) == 1


def test_where_nothing_can_be_written_each_measures(folder):
    folder.write_text("a file, not a folder")
    assert [remembered("speeds.json", "this", "a", lambda found=value: found) for value in (1, 2)] == [1, 2]


def test_a_damaged_file_is_named(folder):
    folder.mkdir()
    (folder / "speeds.json").write_text("{")
    with pytest.raises(UserError, match="speeds.json.*remove it"):
        remembered("speeds.json", "this", "a", lambda: 1)


def test_without_a_wish_it_is_where_the_system_has_it(monkeypatch):
    monkeypatch.delenv("LAZYFORMER_CACHE")
    assert cache_file("a.json") == platformdirs.user_cache_path("lazyformer_fairseq") / "a.json"
