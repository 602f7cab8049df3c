"""One run at a time in a folder, and none of other settings."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
from unittest import mock

import pytest

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import unfinished_name
from lazyformer_fairseq.storage.run_lock import keep_settings, run_lock

SPAWN = multiprocessing.get_context("spawn")


def claim_and_wait(folder, connection):
    with run_lock(folder):
        connection.send("locked")
        connection.recv()


def test_a_folder_belongs_to_one_process_until_it_dies(tmp_path):
    ours, theirs = SPAWN.Pipe()
    holder = SPAWN.Process(target=claim_and_wait, args=(tmp_path / "folder", theirs))
    holder.start()
    try:
        assert ours.recv() == "locked"
        message = rf"folder: another run is using this folder \(process {holder.pid} on"
        with pytest.raises(UserError, match=message), run_lock(tmp_path / "folder"):
            pytest.fail("both hold it")
    finally:
        holder.kill()
        holder.join()
    left = unfinished_name(tmp_path / "folder" / "file")
    left.touch()
    with run_lock(tmp_path / "folder"):
        assert not left.exists()
        assert (tmp_path / "folder" / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_claim_to_the_end_of_a_process_is_not_its_childrens(tmp_path):
    """A data worker may live on for seconds when its run was killed, and the run's restart must not wait for it."""
    claim = "import os, sys, time; from pathlib import Path; from lazyformer_fairseq.storage.run_lock import *\n"
    claim += "for _ in range(2): lock_for_process(Path(sys.argv[1]), '.mine.lock')\n"

    def claim_from_outside() -> str:
        return subprocess.run([sys.executable, "-c", claim, str(tmp_path)], capture_output=True, text=True).stderr

    code = f"{claim}child = os.fork()\nif child: print(child, flush=True)\ntime.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        child = int(holder.stdout.readline())
        try:
            assert f"another run is using this folder (process {holder.pid} on" in claim_from_outside()
            holder.kill()
            holder.wait()
            assert claim_from_outside() == ""
        finally:
            os.kill(child, signal.SIGKILL)


def test_where_no_lock_can_be_the_run_is_refused_or_begins(tmp_path, caplog):
    (tmp_path / "file").touch()
    refused = pytest.raises(UserError, match="file/folder: cannot be written .Not a directory.")
    with refused, run_lock(tmp_path / "file" / "folder"):
        pytest.fail("locked it")
    with mock.patch.object(fcntl, "flock", side_effect=OSError(38, "Function not implemented")), run_lock(tmp_path):
        assert "does not support locks" in caplog.text


def test_settings_may_change_until_work_has_begun(tmp_path):
    file, made = tmp_path / "settings.json", tmp_path / "made"
    keep_settings(file, {"seed": 1, "rates": (1, 2)}, "a search", begun=False)
    made.touch()
    keep_settings(file, {"seed": 1, "rates": (1, 2)}, "a search", begun=True, stale_files=[made])
    assert made.exists()
    keep_settings(file, {"seed": 2, "rates": (1, 2)}, "a search", begun=False, stale_files=[made])
    assert not made.exists()
    with pytest.raises(UserError, match=r"a search with different settings \(rates is \[1, 2\] there, \[3\] here\)"):
        keep_settings(file, {"seed": 2, "rates": (3,)}, "a search", begun=True)
