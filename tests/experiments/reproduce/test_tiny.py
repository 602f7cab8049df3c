"""The whole way in miniature, from the prose that Python carries to the page, stopped once on the way."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT

COMMAND = ["bash", str(ROOT / "scripts" / "reproduce_lazyformer.sh"), "demo"]


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_it_goes_the_whole_way_and_resumes(tmp_path):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [*COMMAND, str(tmp_path / "out"), "--tiny"]
    kept = tmp_path / "out" / "pretraining" / "bert_base" / "checkpoint_update_300.pt"
    with subprocess.Popen(command, env=environment) as process:
        while not kept.exists():
            assert process.poll() is None
            time.sleep(1)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "[2/16] corpus: done already" in run.stdout
    page = (tmp_path / "out" / "report" / "report.md").read_text()
    assert "Not there yet" not in page and "not done" not in page
    scores = re.findall(r"^\| (\w+)-(\d+) ", page.split("## Figure 2")[0], re.MULTILINE)
    assert len(scores) == 5 and ("lazyformer_m2x6", "600") in scores
    losses = re.findall(r"^\| \w+ +\| M\dx\d+ +\| +(\d+) \| +1,200 .*\| +([\d.]+) \| +([\d.]+) \|", page, re.MULTILINE)
    assert len(losses) == 6
    for validations, last, _ in losses:
        assert int(validations) == 12 and float(last) < 11
