"""The user's cache folder: what was measured once is not measured again."""

import json

import platformdirs
import pytest

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.json_files import cache_file, remembered


def test_a_measurement_is_kept(tmp_path, monkeypatch):
    monkeypatch.delenv("LAZYFORMER_CACHE")
    assert cache_file("a.json") == platformdirs.user_cache_path("lazyformer_fairseq") / "a.json"
    folder = tmp_path / "cache"
    monkeypatch.setenv("LAZYFORMER_CACHE", str(folder))

    def remember(key: str, value: object) -> object:
        return remembered("speeds.json", key, "a", lambda: value)

    assert remember("this", [1, 2]) == [1, 2] and remember("that", [3]) == [3]
    assert remembered("speeds.json", "this", "a", lambda: pytest.fail("measured again")) == [1, 2]
    assert json.loads((folder / "speeds.json").read_text()) == {"this": {"a": [1, 2]}, "that": {"a": [3]}}
    assert remembered("speeds.json", "both", "a", lambda: (remember("both", 1), 2)[1]) == 1, "the first decides"
    (folder / "speeds.json").write_text("{")
    with pytest.raises(UserError, match="speeds.json.*remove it"):
        remember("this", 1)
    monkeypatch.setenv("LAZYFORMER_CACHE", str(folder / "speeds.json"))  # where nothing can be written each measures
    assert [remember("this", value) for value in (1, 2)] == [1, 2]
