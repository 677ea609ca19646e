"""Runs on real processes: status, detaching, stopping, clearing up, the watchdog, resuming. No process is left behind by any of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from eyas_process import eyas_command, eyas_environment, write_token_rows

from eyas.base.errors import FolderConflictError, InputError
from eyas.runs import run as runs
from eyas.runs import stopping
from eyas.runs.background import without_flags
from eyas.runs.loglines import Wanted, read_lines
from eyas.runs.processes import SHM, Mark, command_of, is_alive, keepers_of_run, mark_of, processes_of_run, this_process

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")

#: A driver with two ranks, without torch: what it does is told by its arguments.
DRIVER = """
import mmap, multiprocessing, os, subprocess, sys, time
from eyas.runs import logs
from eyas.runs import run as runs

def rank_main(rank, segment):
    logs.attach_process("rank", rank)
    with open(segment, "w+b") as file:
        file.truncate(4096)
        held = mmap.mmap(file.fileno(), 4096)
    print("rank", rank, "is up")
    while True:
        time.sleep(0.05)

def main(name, stall_after="0", on_stall="report", deaf=""):
    with runs.start("test", stall_after=float(stall_after), on_stall=on_stall) as run:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=rank_main, args=(r, f"/dev/shm/{name}-{r}"), daemon=True) for r in range(2)]
        for one in ranks:
            one.start()
        subprocess.Popen(["sleep", "1000"])  # a child that is not Python and knows nothing of runs
        if deaf:
            import signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        count = 0
        while True:
            time.sleep(0.05)
            if count == 0 and not all(os.path.exists(f"/dev/shm/{name}-{r}") for r in range(2)):
                continue
            if all(open(f"/proc/{one.pid}/stat").read().rsplit(")", 1)[1].split()[0] != "T" for one in ranks):
                count += 1  # a collective that waits for every rank
                run.progress(stage="work", samples=count, total=100000, tokens=count * 10)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EYAS_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def wait_for(what: Callable[[], object], seconds: float = 60.0) -> object:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s")


class Driven:
    """A driver started as a process, its run, and its segments."""

    def __init__(self, tmp_path: Path, *arguments: str):
        script = tmp_path / "driver.py"
        script.write_text(DRIVER)
        self.name = f"eyas-test-{os.getpid()}-{time.monotonic_ns()}"
        self.process = subprocess.Popen(
            [sys.executable, str(script), self.name, *arguments],
            env=eyas_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for(lambda: self.view().progress.get("samples"))

    def view(self) -> runs.RunView:
        known = runs.list_runs()
        return known[0] if known else runs.RunView("", Path(), "", {}, {}, {})

    def rank(self, number: int) -> Mark:
        lines = (self.view().folder / "processes.jsonl").read_text().splitlines()
        return next(Mark.from_json(one) for one in map(json.loads, lines) if one["rank"] == number)

    def marks(self) -> list[Mark]:
        view = self.view()
        return processes_of_run(view.id, view.folder, [view.driver] if view.driver else [])

    def segments(self) -> list[Path]:
        return sorted(SHM.glob(f"{self.name}-*"))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for mark in self.marks():
            os.kill(mark.pid, signal.SIGKILL)
        self.process.communicate()
        for path in self.segments():
            path.unlink()


@pytest.fixture
def drive(state: Path, tmp_path: Path) -> Iterator[Callable[..., Driven]]:
    started: list[Driven] = []

    def go(*arguments: str) -> Driven:
        started.append(Driven(tmp_path, *arguments))
        return started[-1]

    yield go
    for one in started:
        one.close()


def eyas(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        eyas_command(*arguments), capture_output=True, text=True, timeout=300, env=eyas_environment(), check=False
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


# --- stop, kill, watchdog ----------------------------------------------------------------------------------------------------


def test_stop_ends_gently_and_proves_that_nothing_is_left(drive):
    driven = drive()
    marks = driven.marks()
    assert len(marks) >= 3
    assert len(driven.segments()) == 2
    said = eyas("runs", "stop", driven.view().id)
    assert driven.process.wait(30) != -signal.SIGKILL
    assert driven.view().state == "stopped"
    assert driven.view().record["exit_code"] == 130
    assert [mark for mark in marks if is_alive(mark)] == []
    assert driven.segments() == []
    assert "ended by itself" in said
    assert "processes: none lives" in said
    assert "shared memory: no segment left" in said
    assert "GPU memory" in said


@pytest.mark.parametrize(("after", "clean"), [(1100, True), (5000, False)])
def test_stop_compares_gpu_memory_with_what_was_in_use_when_the_run_began(drive, tmp_path, monkeypatch, after, clean):
    # A stand-in for the driver's tool, as it answers inside a container: no process is visible.
    used = tmp_path / "used"
    used.write_text("1000")
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\ncase "$1" in --query-gpu*) echo "GPU-a, $(cat {used})";; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    driven = drive()
    wait_for(lambda: (driven.view().folder / "gpus.json").exists())
    used.write_text(str(after))
    report = stopping.stop_run(driven.view().folder)
    assert report.clean == clean
    said = "\n".join(report.lines())
    assert ("none held by the run" in said) == clean
    assert ("4000 MiB on GPU-a more in use" in said) != clean


def test_stop_turns_firm_when_the_driver_is_deaf_and_a_rank_is_stopped(drive):
    driven = drive("0", "report", "deaf")
    os.kill(driven.rank(1).pid, signal.SIGSTOP)
    marks = driven.marks()
    report = stopping.stop_run(driven.view().folder, grace=1.0)
    assert not report.gentle
    assert report.clean
    assert [mark for mark in marks if is_alive(mark)] == []
    assert driven.segments() == []
    assert driven.view().state == "killed"


def test_driver_killed_hard_is_lost_and_its_keeper_ends_the_ranks_and_removes_their_segments(drive):
    driven = drive()
    marks = driven.marks()
    assert driven.view().state == "running"
    driven.process.kill()
    driven.process.wait()
    assert driven.view().state == "lost"
    assert "lost" in eyas("runs", "list")
    wait_for(lambda: not any(is_alive(mark) for mark in marks), 30)
    wait_for(lambda: not driven.segments(), 30)
    wait_for(lambda: not keepers_of_run(driven.view().id), 30)
    assert "nothing is left" in eyas("runs", "clean", "--yes")


def kill_all(driven: Driven) -> Mark:
    """What the OOM killer does at its worst: keeper, driver and ranks at once. Gives the child that is left."""
    view = driven.view()
    (left,) = (mark for mark in driven.marks() if command_of(mark.pid).startswith("sleep"))
    for mark in [*keepers_of_run(view.id), view.driver, driven.rank(0), driven.rank(1)]:
        os.kill(mark.pid, signal.SIGKILL)
    driven.process.wait()
    return left


def test_clean_removes_what_is_left_after_showing_it_and_only_that(drive):
    driven = drive()
    foreign_segment = SHM / f"eyas-foreign-{os.getpid()}"
    foreign_segment.write_bytes(b"x" * 100)
    foreign = subprocess.Popen(["sleep", "300"])
    try:
        left = kill_all(driven)
        assert driven.view().state == "lost"
        kinds = [(item.kind, item.mark) for item in stopping.leftovers()]
        assert ("process", left) in kinds
        assert [kind for kind, _ in kinds].count("segment") == 2
        shown = eyas("runs", "clean", "--dry-run")
        assert f"pid {left.pid}" in shown
        assert is_alive(left)
        assert len(driven.segments()) == 2
        assert "foreign" not in shown
        assert str(foreign.pid) not in shown
        eyas("runs", "clean", "--yes")
        assert not is_alive(left)
        assert driven.segments() == []
        assert foreign.poll() is None
        assert foreign_segment.exists()
        assert "nothing is left" in eyas("runs", "clean", "--yes")
    finally:
        foreign.kill()
        foreign.wait()
        foreign_segment.unlink()


def test_a_segment_that_a_stranger_made_under_a_recorded_name_is_not_ours(drive):
    driven = drive()
    kill_all(driven)
    path = SHM / f"{driven.name}-0"
    assert path in [item.path for item in stopping.leftovers()]
    path.unlink()
    spacer = SHM / f"eyas-spacer-{os.getpid()}"
    spacer.write_bytes(b"")  # takes the inode number that has just become free
    try:
        path.write_bytes(b"someone else's")
        assert path not in [item.path for item in stopping.leftovers()]
    finally:
        spacer.unlink()


def test_watchdog_reports_a_stopped_rank_with_every_stack_and_recovers(drive):
    driven = drive("1.5")
    os.kill(driven.rank(1).pid, signal.SIGSTOP)
    wait_for(lambda: driven.view().state == "stalled")
    folder = driven.view().folder

    def stacks_said() -> dict[str, str]:
        return {line.who: line.text for line in read_lines(folder, Wanted(grep="^stack"))}

    wait_for(lambda: stacks_said().keys() >= {"driver", "rank 0", "rank 1"})
    stacks = stacks_said()
    assert "state T (stopped)" in stacks["rank 1"]
    assert "rank_main" in stacks["rank 1"]
    assert "rank_main" in stacks["rank 0"]
    assert "main" in stacks["driver"]
    assert any("no progress for" in line.text for line in read_lines(folder, Wanted(level="error")))
    os.kill(driven.rank(1).pid, signal.SIGCONT)
    wait_for(lambda: driven.view().state == "running")


def test_watchdog_told_to_stop_ends_the_run_with_its_own_exit_code(drive):
    driven = drive("1.5", "stop")
    marks = driven.marks()
    os.kill(driven.rank(0).pid, signal.SIGSTOP)
    _, err = driven.process.communicate(timeout=90)
    assert "StalledError" in err
    assert driven.view().record["exit_code"] == 11
    assert driven.view().state == "stalled"
    assert driven.view().ended
    wait_for(lambda: not any(is_alive(mark) for mark in marks), 30)


def test_watchdog_ends_a_driver_that_is_deaf_with_the_same_exit_code(drive):
    driven = drive("1.5", "stop", "deaf")
    os.kill(driven.rank(0).pid, signal.SIGSTOP)
    assert driven.process.wait(90) == 11
    wait_for(lambda: driven.view().ended and driven.view().state == "stalled", 30)
    assert driven.view().record["exit_code"] == 11
    wait_for(lambda: not driven.marks(), 30)


def test_ctrl_c_reaches_the_driver_and_not_its_ranks(state, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        DRIVER.replace("    while True:\n        time.sleep(0.05)\n\ndef main", "    time.sleep(600)\n\ndef main")
    )
    process = subprocess.Popen(
        [sys.executable, str(script), f"eyas-test-{os.getpid()}-int"],
        env=eyas_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # Tests started with `&` by a script inherit an ignored SIGINT, and so would this process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(lambda: runs.list_runs() and runs.list_runs()[0].progress.get("samples"))
    view = runs.list_runs()[0]
    ranks = [mark for mark in processes_of_run(view.id, view.folder) if mark != view.driver]
    assert len(ranks) >= 2
    os.killpg(process.pid, signal.SIGINT)  # what a terminal sends to everyone in its foreground
    process.wait(60)
    assert runs.list_runs()[0].state == "stopped"
    wait_for(lambda: not any(is_alive(mark) for mark in ranks), 30)
    assert list(read_lines(view.folder, Wanted(ranks=(0, 1), grep="KeyboardInterrupt"))) == []


def test_a_terminal_that_is_closed_ends_a_run_in_good_order(state, tmp_path):
    import fcntl
    import pty
    import termios

    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    leader, follower = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests started by nohup ignore it, and children inherit that

    process = subprocess.Popen(
        [sys.executable, str(script), f"eyas-test-{os.getpid()}-pty"],
        env=eyas_environment(),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(follower)
    wait_for(lambda: runs.list_runs() and runs.list_runs()[0].progress.get("samples"))
    os.close(leader)
    process.wait(30)
    (view,) = runs.list_runs()
    assert (view.state, view.record["exit_code"]) == ("stopped", 130)
    wait_for(lambda: not processes_of_run(view.id, view.folder), 30)
    wait_for(lambda: not list(SHM.glob(f"eyas-test-{os.getpid()}-pty*")), 30)


# --- the folder and the status ---------------------------------------------------------------------------------------------


def script_run(tmp_path: Path, body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text("import sys, time\nfrom eyas.runs import run as runs\nfrom eyas.base.errors import *\n" + body)
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=eyas_environment(**environment),
        check=False,
    )


@pytest.mark.parametrize(
    ("body", "state_after", "code"),
    [
        ("pass", "finished", 0),
        ("sys.exit(20)", "incomplete", 20),
        ("raise InputError('wrong flag')", "failed", 3),
        ("raise ValueError('bug')", "failed", 1),
        ("raise KeyboardInterrupt", "stopped", 130),
    ],
)
def test_the_end_of_a_run_is_written_down(state, tmp_path, body, state_after, code):
    script_run(tmp_path, f"with runs.start('test', model='m'):\n    {body}\n")
    (view,) = runs.list_runs()
    assert (view.state, view.record["exit_code"]) == (state_after, code)
    assert view.record["model"] == "m"
    assert view.record["versions"]["torch"]
    assert view.ended
    if state_after == "failed":
        assert view.record["error"] in ("wrong flag", "bug")


def test_a_forked_child_that_leaves_by_an_exception_does_not_end_the_run(state, tmp_path):
    body = (
        "with runs.start('test'):\n    import os\n    pid = os.fork()\n    if pid == 0:\n        sys.exit(7)\n"
        "    os.waitpid(pid, 0)\n    time.sleep(0.2)\n    print('still', runs.load(runs.current().folder).state)\n"
    )
    done = script_run(tmp_path, body)
    assert "still running" in done.stdout
    assert runs.list_runs()[0].state == "finished"


def test_rate_and_time_to_go_come_from_the_counts(tmp_path):
    run = runs.Run("r", tmp_path, {})
    run.progress(stage="work", samples=0, total=1000, tokens=0)
    run.snapshot()
    time.sleep(0.6)
    run.progress(samples=60, tokens=6000, bytes=100)
    shown = run.snapshot()
    span = shown["beat"] - run._window[0][0]
    assert shown["samples_per_s"] == pytest.approx(60 / span)
    assert shown["tokens_per_s"] == pytest.approx(6000 / span)
    assert shown["eta_s"] == pytest.approx(940 / (60 / span))
    run.progress(stage="next")
    assert "samples" not in run.snapshot()


def test_a_run_folder_used_again_keeps_the_earlier_runs_logs(state, tmp_path):
    folder = tmp_path / "here"
    for word in ("first", "second"):
        done = script_run(tmp_path, f"with runs.start('test', run_dir={str(folder)!r}):\n    print('{word} run')\n")
        assert done.returncode == 0, done.stderr
    newer, older = runs.list_runs()
    assert newer.folder == folder
    assert any(line.text == "second run" for line in read_lines(newer.folder))
    assert older.folder == folder / "earlier" / older.id
    assert [line.text for line in read_lines(older.folder) if "run" in line.text and "first" in line.text]


def test_a_run_folder_with_strangers_files_or_a_living_run_is_refused(state, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(FolderConflictError, match="no run's"):
        runs.create("test", [], tmp_path / "full")
    folder = runs.create("test", [], tmp_path / "own")
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "status": "running", "driver": this_process().as_json()}))
    with pytest.raises(FolderConflictError, match="which is running"):
        runs.create("test", [], tmp_path / "own")


def test_runs_are_found_by_parts_of_their_id_and_by_folder(state, tmp_path, monkeypatch):
    one, two = runs.create("test", [], run_id="a-1-beef"), runs.create("test", [], run_id="a-2-cafe")
    assert runs.find("a-1").folder == runs.find("beef").folder == runs.find(str(one)).folder == one
    with pytest.raises(InputError, match="no run 'ef'"):
        runs.find("ef")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cafe").mkdir()
    with pytest.raises(InputError):  # somebody's folder, not the run whose id ends so
        runs.find("cafe")
    assert runs.find("last").folder == two
    with pytest.raises(InputError, match="fits 2 runs"):
        runs.find("a-")
    with pytest.raises(InputError, match="no run"):
        runs.find("zebra")
    with pytest.raises(FolderConflictError, match="already"):
        runs.create("test", [], run_id="a-1-beef")


def test_a_run_on_another_host_is_judged_by_its_heartbeat():
    there = {"status": "running", "driver": {"pid": 1, "started": 1, "boot": "b", "host": "elsewhere"}}
    assert runs.state_of(there, {"beat": time.time()}, {}) == "running"
    assert runs.state_of(there, {"beat": time.time() - 2 * runs.STALE}, {}) == "lost"


def test_a_reused_pid_is_another_process():
    mine = this_process()
    assert is_alive(mine)
    assert not is_alive(Mark(mine.pid, mine.started - 1, mine.boot, mine.host))
    assert not is_alive(Mark(mine.pid, mine.started, "another boot", mine.host))
    assert is_alive(Mark(mine.pid, mine.started, mine.boot, "elsewhere")) is None


def test_flags_of_starting_are_not_part_of_the_command():
    typed = [
        "extract",
        "--detach",
        "--host",
        "a@b",
        "--host-dir=/x",
        "--run-id",
        "r",
        "--output-dir",
        "o",
        "--layer-ids",
        "1",
        "2",
    ]
    assert without_flags(typed) == ["extract", "--output-dir", "o", "--layer-ids", "1", "2"]


# --- a real extraction -------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_extract(state: Path, tmp_path: Path, tiny_model) -> list[str]:
    """Flags of an extraction that takes long enough to be killed: a forward pass for each of many samples."""
    rows = write_token_rows(tmp_path / "rows.jsonl", [16] * 16000)
    return [
        "extract", "--model-path", str(tiny_model("llama")), "--prepared-data", str(rows), "--output-dir",
        str(tmp_path / "out"), "--layer-ids", "1", "2", "--batch-size", "1", "--shard-size", "0.2",
    ]  # fmt: skip


def in_bulk(least: int = 100) -> runs.RunView | None:
    known = runs.list_runs()
    return known[0] if known and known[0].state == "running" and known[0].progress.get("samples", 0) >= least else None


def test_detached_extract_stopped_then_resumed_then_complete(slow_extract, tmp_path):
    run_id = eyas(*slow_extract, "--detach").split()[0]
    view = wait_for(in_bulk, 120)
    assert view.id == run_id
    assert mark_of(view.driver.pid) == view.driver
    assert os.getsid(view.driver.pid) == view.driver.pid  # a session of its own: hang-up and logout do not reach it
    refused = eyas(*slow_extract, code=8)
    assert run_id in refused  # told which run holds the folder
    said = eyas("runs", "stop", run_id)
    assert "ended by itself, resumable" in said
    view = runs.find(run_id)
    assert (view.state, view.record["exit_code"]) == ("stopped", 130)
    assert not list((tmp_path / "out").glob("*.tmp"))

    again = eyas("runs", "resume", run_id, "--detach").split()[0]
    wait_for(lambda: in_bulk(1), 120)
    os.kill(runs.find(again).driver.pid, signal.SIGKILL)
    wait_for(lambda: runs.find(again).state == "lost", 10)
    assert json.loads(eyas("runs", "show", again, "--json"))["run"]["resumes"] == run_id
    wait_for(lambda: not processes_of_run(again, runs.find(again).folder), 30)
    half = list((tmp_path / "out").glob("shard-*.tmp"))
    listed = [item.path for item in stopping.leftovers([runs.find(again)]) if item.kind == "shard"]
    assert listed == half
    eyas("runs", "clean", again, "--yes")
    assert not list((tmp_path / "out").glob("shard-*.tmp"))

    done = eyas("runs", "resume", again)  # in the foreground
    assert "16000 of 16000" in done
    assert runs.list_runs()[0].state == "finished"
    assert len(runs.list_runs()) == 4  # the refused one too
    shutil.rmtree(tmp_path / "out")


def test_a_detached_run_says_each_line_once(state, tmp_path, tiny_model, token_rows):
    flags = ["extract", "--model-path", str(tiny_model("llama")), "--prepared-data", str(token_rows([8, 9]))]
    flags += ["--output-dir", str(tmp_path / "out"), "--layer-ids"]

    def run(*more):
        run_id = eyas(*flags, *more, "--detach").split()[0]
        wait_for(lambda: runs.find(run_id).ended, 120)
        lines = [json.loads(line) for line in eyas("runs", "logs", run_id, "--json").splitlines()]
        return [(line["role"], line["text"]) for line in lines]

    said = run("1")
    assert "extracting" in "".join(text for role, text in said if role == "driver")
    assert [text for role, text in said if role == "launch"] == []
    said = run("77")  # no such layer: what the command says when its run is over is kept too
    assert any(text.startswith("error: ") for role, text in said if role == "launch")


def test_samples_that_were_not_written_end_the_run_with_a_code_of_its_own(state, tmp_path, tiny_model, token_rows):
    flags = ["extract", "--model-path", str(tiny_model("llama")), "--prepared-data", str(token_rows([8, 60, 9]))]
    flags += ["--output-dir", str(tmp_path / "out"), "--layer-ids", "1", "--max-seq-len", "20"]
    eyas(*flags, code=20)
    (view,) = runs.list_runs()
    assert (view.state, view.record["exit_code"]) == ("incomplete", 20)
    refused = eyas(
        *flags[:-4], "--layer-ids", "2", "--max-seq-len", "20", code=8
    )  # other layers into the same folder (F12)
    assert "layer_ids" in refused
    assert runs.list_runs()[0].state == "failed"


def test_a_full_disk_under_the_run_folder_does_not_end_the_run(state, tmp_path, small_disk):
    body = f"""
import contextlib
from eyas.base.errors import DiskFullError
with runs.start("test", run_dir="{small_disk}/run") as run:
    with contextlib.suppress(OSError), open("{small_disk}/filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    run.note(output_dir="elsewhere")
    with contextlib.suppress(DiskFullError):
        runs.create("test", [], "{small_disk}/other")
        raise SystemExit("made a run on a full disk")
assert run.record["status"] == "finished"
"""
    done = script_run(tmp_path, body)
    assert done.returncode == 0, done.stderr
    (run,) = runs.list_runs()
    wait_for(lambda: not keepers_of_run(run.id), 30)  # it has files open there
