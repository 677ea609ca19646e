"""What every process of a run says is kept: from Python logging, Python prints, C and native crashes, whatever ends the process."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eyas.runs.loglines import Line, Wanted, first_causes, follow_lines, format_causes, read_lines

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process capture is for Linux")
SOURCE = str(Path(__file__).resolve().parents[2] / "src")

DRIVER = """
import ctypes, logging, multiprocessing, os, sys, time
from eyas.runs import logs
from eyas.runs import run as runs

held = None  # the driver's stdout, as a library's log handler keeps it

def worker(rank, what):
    print(f"early {rank}")
    logs.attach_process("rank", rank)
    log = logging.getLogger("eyas.test.worker")
    logging.disable(logging.CRITICAL)                      # what some libraries do
    logging.getLogger("eyas").setLevel(logging.ERROR)
    log.debug("debug of %d", rank)
    libc = ctypes.CDLL(None)
    libc.printf(b"C says %d\\n", rank)
    libc.printf(b"C, no newline")
    print(f"print {rank}", end="")
    if held is not None:
        print(f"\\nheld by {rank}", file=held)
    if what == "exit":
        os._exit(1)
    if what == "kill":
        os.kill(os.getpid(), 9)
    if what == "raise":
        raise RuntimeError(f"rank {rank} failed")
    if what == "crash":
        ctypes.string_at(0)
    if what == "late":
        time.sleep(0.5)
        raise RuntimeError("connection to rank lost")

if __name__ == "__main__":
    how, *what = sys.argv[1:]
    with runs.start("test", log_level="debug") as run:
        held = sys.stdout
        context = multiprocessing.get_context(how)
        processes = [context.Process(target=worker, args=(rank, one)) for rank, one in enumerate(what)]
        for one in processes:
            one.start()
        for one in processes:
            one.join()
        print("driver says")
        os.system("echo a shell says")
        if any(one.exitcode for one in processes):
            sys.exit(1)
"""


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Run a driver script with its own state folder; gives the finished process and the run folder."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    monkeypatch.setenv("EYAS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", SOURCE)

    def go(*arguments: str, script=script):
        done = subprocess.run(
            [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=120, check=False
        )
        (folder,) = (tmp_path / "state" / "runs").iterdir()
        return done, folder

    return go


def texts(folder: Path, **wanted) -> list[str]:
    return [line.text for line in read_lines(folder, Wanted(**wanted))]


@pytest.mark.parametrize("how", ["spawn", "fork"])
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_what_a_rank_says_before_it_dies_hard_is_kept(drive, how, end):
    done, folder = drive(how, "fine", end)
    assert done.returncode == 1
    for rank in (0, 1):
        lines = texts(folder, ranks=(rank,))
        assert f"debug of {rank}" in lines
        assert f"C says {rank}" in lines
        assert f"C, no newlineprint {rank}" in lines
    assert any("early 1" in line for line in texts(folder))
    (one,) = read_lines(folder, Wanted(ranks=(1,), grep="debug of 1"))
    record = next(r for r in map(json.loads, (folder / "processes.jsonl").read_text().splitlines()) if r["rank"] == 1)
    assert (one.rank, one.pid, one.level, one.stream) == (1, record["pid"], "debug", "log")


def test_a_forked_rank_that_writes_to_the_drivers_stream_writes_into_its_own_log(drive):
    done, folder = drive("fork", "fine", "fine")
    for rank in (0, 1):
        assert [line.text for line in read_lines(folder, Wanted(ranks=(rank,), grep="held by"))] == [f"held by {rank}"]
    assert "held by" not in done.stdout
    assert not texts(folder, roles=("driver",), grep="held by")


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_only_a_rank_that_dies_hard_leaves_without_a_goodbye(drive, how):
    _, folder = drive(how, "fine", "kill")
    (without,) = [text for text in texts(folder, roles=("keeper",)) if "without a goodbye" in text]
    assert without.startswith("rank 1 ")


def test_each_process_has_files_of_its_own(drive):
    _, folder = drive("fork", "fine", "fine", "fine")
    for rank in range(3):
        (path,) = folder.glob(f"logs/rank{rank}-*.out.jsonl")
        pids = {json.loads(line)["pid"] for line in path.read_text().splitlines()}
        assert len(pids) == 1
        assert f"C says {rank}" in path.read_text()


def test_the_terminal_still_shows_what_the_driver_and_its_shell_children_print_but_not_the_ranks(drive):
    done, folder = drive("spawn", "fine")
    assert "driver says" in done.stdout
    assert "a shell says" in done.stdout
    assert "C says" not in done.stdout
    assert {"driver says", "a shell says"} <= set(texts(folder, roles=("driver",)))


def test_a_failing_ranks_traceback_reaches_the_terminal_first_cause_first(drive):
    done, folder = drive("spawn", "late", "raise")
    assert done.returncode == 1
    first = done.stderr.index("first cause, rank 1")
    assert first < done.stderr.index("RuntimeError: rank 1 failed") < done.stderr.index("then, rank 0")
    assert "connection to rank lost" in done.stderr
    assert [cause.who for cause in first_causes(folder)][:2] == ["rank 1", "rank 0"]


def test_a_native_crash_of_a_rank_reaches_the_terminal_with_its_name_and_stack(drive):
    done, _ = drive("spawn", "fine", "crash")
    assert "first cause, rank 1" in done.stderr
    assert "Segmentation fault" in done.stderr
    assert "in worker" in done.stderr  # where in the Python code it was


def test_a_child_whose_output_somebody_reads_is_left_alone(drive, tmp_path):
    script = tmp_path / "reader.py"
    script.write_text(
        "import subprocess, sys\n"
        "from eyas.runs import run as runs\n"
        "with runs.start('test'):\n"
        "    child = [sys.executable, '-c', 'import sys; print(1); sys.stderr.write(\"to the log\\\\n\")']\n"
        "    out = subprocess.run(child, stdout=subprocess.PIPE, text=True).stdout\n"
        "    print('got', repr(out))\n"
    )
    done, folder = drive(script=script)
    assert "got '1\\n'" in done.stdout
    assert "to the log" in texts(folder)


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_data_loader_workers_have_files_of_their_own(drive, tmp_path, how):
    script = tmp_path / "loading.py"
    script.write_text(
        "import os, time, torch\n"
        "from eyas.runs import run as runs\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n"
        "        return 8\n"
        "    def __getitem__(self, i):\n"
        "        time.sleep(0.5)\n"
        "        print('row', i, 'of worker', torch.utils.data.get_worker_info().id)\n"
        "        return i\n"
        "if __name__ == '__main__':\n"
        "    with runs.start('test'):\n"
        f"        list(torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context='{how}'))\n"
    )
    done, folder = drive(script=script)
    assert done.returncode == 0, done.stderr
    for worker in (0, 1):
        (path,) = folder.glob(f"logs/loader{worker}-*.out.jsonl")
        said = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        assert [line for line in said if "of worker" in line] == [
            f"row {i} of worker {worker}" for i in range(worker, 8, 2)
        ]


def test_keeper_killed_in_the_middle_loses_no_line(drive, tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, subprocess, time\n"
        "from eyas.runs import processes, run as runs\n"
        "with runs.start('test') as run:\n"
        "    subprocess.run('for i in 1 2 3; do echo before $i; done', shell=True)\n"
        "    time.sleep(0.5)\n"
        "    (keeper,) = processes.keepers_of_run(run.id)\n"
        "    os.kill(keeper.pid, signal.SIGKILL)\n"
        "    subprocess.run('for i in 1 2 3; do echo after $i; done', shell=True)\n"
        "    deadline = time.time() + 20\n"
        "    while keeper in processes.keepers_of_run(run.id) or not processes.keepers_of_run(run.id):\n"
        "        assert time.time() < deadline\n"
        "        time.sleep(0.05)\n"
        "    subprocess.run('echo with the second keeper', shell=True)\n"
    )
    done, folder = drive(script=script)
    assert done.returncode == 0, done.stderr
    lines = texts(folder)
    for text in [f"{word} {i}" for word in ("before", "after") for i in (1, 2, 3)] + ["with the second keeper"]:
        assert lines.count(text) == 1


def test_lines_of_all_processes_are_merged_by_time(drive):
    _, folder = drive("fork", "fine", "fine")
    times = [line.time for line in read_lines(folder)]
    assert times == sorted(times)
    assert {line.who for line in read_lines(folder)} >= {"driver", "rank 0", "rank 1"}


def test_filters_by_rank_level_and_pattern(drive):
    _, folder = drive("fork", "fine", "raise")
    assert all("1" in text for text in texts(folder, ranks=(1,), grep="C says"))
    assert len(texts(folder, grep="C says [01]")) == 2
    errors = list(read_lines(folder, Wanted(level="error")))
    assert errors
    assert all(line.level in ("error", "critical") for line in errors)


def test_following_sees_new_files_and_goes_on_after_an_offset(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()

    def append(name: str, moment: float, text: str) -> None:
        record = {"time": moment, "level": "info", "role": "rank", "rank": 0, "pid": 1, "text": text}
        with open(logs / name, "a") as file:
            file.write(json.dumps(record) + "\n")

    now = time.time()
    append("rank0-a.log.jsonl", now - 10, "one")
    rounds = iter([False, True])
    seen = []
    for line in follow_lines(tmp_path, lambda: next(rounds)):
        seen.append(line)
        if line.text == "one":
            append("rank0-a.log.jsonl", now - 8, "three")
            append("rank1-b.log.jsonl", now - 9, "two")
    assert [line.text for line in seen] == ["one", "two", "three"]
    again = follow_lines(tmp_path, lambda: True, after={"a.log.jsonl": seen[0].offset})
    assert [line.text for line in again] == ["two", "three"]


def test_a_torn_last_line_is_no_line_and_no_error(tmp_path):
    (tmp_path / "logs").mkdir()
    whole = '{"time": 1, "role": "rank", "pid": 3, "text": "whole"}\n'
    (tmp_path / "logs" / "a.log.jsonl").write_text(whole + '{"time": 2, "ro')
    assert texts(tmp_path) == ["whole"]


def test_causes_found_behind_a_librarys_prefix_on_every_line(tmp_path):
    (tmp_path / "logs").mkdir()
    prefix = "(Worker_TP1 pid=7) ERROR 11-30 "
    said = ["Traceback (most recent call last):", "  File x, line 1", "torch.OutOfMemoryError: CUDA out of memory"]
    with open(tmp_path / "logs" / "rank1-h-7-1.out.jsonl", "w") as file:
        for number, text in enumerate(said):
            record = {"time": number, "stream": "stdout", "role": "rank", "rank": 1, "pid": 7, "text": prefix + text}
            file.write(json.dumps(record) + "\n")
    (cause,) = first_causes(tmp_path)
    assert cause.who == "rank 1"
    assert cause.headline == "torch.OutOfMemoryError: CUDA out of memory"
    assert "first cause, rank 1 (pid 7)" in format_causes([cause])


def test_the_level_asked_for_wins_over_the_environment_and_reaches_every_process(drive, monkeypatch):
    monkeypatch.setenv("EYAS_LOG_LEVEL", "error")
    _, folder = drive("spawn", "fine")
    assert "debug of 0" in texts(folder)


def test_outside_a_run_attaching_does_nothing(monkeypatch):
    from eyas.runs import logs

    monkeypatch.delenv("EYAS_RUN_DIR", raising=False)
    assert logs.attach_process("rank", 0) is False


def test_driver_killed_hard_its_stubborn_workers_end_within_seconds(drive, tmp_path):
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import os, signal, subprocess, sys, time\n"
        "from eyas.runs import run as runs\n"
        "with runs.start('test') as run:\n"
        "    deaf = 'import signal, time; signal.signal(15, signal.SIG_IGN); print(\"up\", flush=True); time.sleep(600)'\n"
        "    children = [subprocess.Popen([sys.executable, '-c', deaf]) for _ in range(2)]\n"
        "    children.append(subprocess.Popen(['sleep', '600']))\n"
        "    time.sleep(1.0)\n"
        "    children[0].send_signal(signal.SIGSTOP)\n"
        "    print(*(child.pid for child in children), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done, folder = drive(script=script)
    assert done.returncode == -signal.SIGKILL
    pids = [int(word) for word in done.stdout.split("\n")[-2].split()]
    deadline = time.time() + 30
    while any(_lives(pid) for pid in pids) and time.time() < deadline:
        time.sleep(0.1)
    assert [pid for pid in pids if _lives(pid)] == []
    assert any("the driver is gone" in text for text in texts(folder))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_line_is_shown_with_its_rank_or_role():
    assert Line(0.0, "rank", 3, 1, "info", "log", "x").who == "rank 3"
    assert Line(0.0, "driver", None, 1, "info", "log", "x").who == "driver"
