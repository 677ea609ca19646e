"""Ranks that a launcher started are one run, as torchrun starts them: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, no common parent's help."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from eyas_process import eyas_environment

from eyas.runs import run as runs
from eyas.runs.loglines import Wanted, read_lines

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process capture is for Linux")

RANK = """
import os, sys, time
from eyas.runs import run as runs
rank = int(os.environ["RANK"])
time.sleep(0.5 * (1 - rank))                     # the driver comes last
try:
    with runs.start("test", run_dir=sys.argv[1] or None):
        print("rank", rank, "prints")
        os.system(f"echo a shell of rank {rank}")
        if sys.argv[2] == "fails" and rank == 1:
            raise ValueError("rank 1 failed first")
        time.sleep(600 if sys.argv[2] == "fails" else 1.0 * rank)  # rank 0 leaves first
        print("rank", rank, "is done")
except KeyboardInterrupt:
    sys.exit(130)
"""


def launch(tmp_path: Path, run_dir: str, what: str = "works") -> list[subprocess.Popen[str]]:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid())}
    return [
        subprocess.Popen(
            [sys.executable, str(script), run_dir, what],
            env=eyas_environment(**common, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_STATE_DIR", str(tmp_path / "state"))


@pytest.mark.parametrize("run_dir", ["here", ""])
def test_ranks_of_a_launcher_are_one_run_with_every_ranks_output(tmp_path, run_dir):
    run_dir = str(tmp_path / run_dir) if run_dir else ""
    ranks = launch(tmp_path, run_dir)
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "rank 1 prints" in said[1][0]  # on its own terminal too
    (view,) = runs.list_runs()
    assert view.state == "finished"
    assert not run_dir or view.folder == Path(run_dir)
    for rank, wanted in enumerate((Wanted(roles=("driver",)), Wanted(ranks=(1,)))):
        texts = [line.text for line in read_lines(view.folder, wanted)]
        for text in (f"rank {rank} prints", f"a shell of rank {rank}", f"rank {rank} is done"):
            assert texts.count(text) == 1


def test_a_rank_that_fails_fails_the_run_though_the_launcher_then_ends_its_driver(tmp_path):
    driver, failing = launch(tmp_path, "", "fails")
    assert "rank 1 failed first" in failing.communicate(timeout=120)[1]
    time.sleep(0.5)
    driver.send_signal(signal.SIGTERM)  # what torchrun does then
    _, errors = driver.communicate(timeout=120)
    (view,) = runs.list_runs()
    assert (view.state, view.record["exit_code"]) == ("failed", 1)
    assert "first cause, rank 1" in errors
