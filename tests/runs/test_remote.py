"""`--host` against a real sshd on loopback, with keys and configuration of its own; the connection is really cut."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from eyas_process import eyas_command, eyas_environment

from eyas.base.errors import EyasError, InputError
from eyas.runs import remote
from eyas.runs.processes import all_pids, command_of, parent_of

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if Path("/usr/sbin/sshd").exists() else None)
needs_sshd = pytest.mark.skipif(
    SSHD is None and not os.environ.get("CI"), reason="no sshd here (apt install openssh-server)"
)

#: What stands in for a long command on the far side: a run that counts, prints, and ends when a file appears.
LONG = """
import logging, os, sys, time
from eyas.runs import run as runs
logging.getLogger("eyas").setLevel(logging.INFO)
with runs.start("test", sys.argv[1:]) as run:
    for number in range(100000):
        print("line", number, flush=True)
        run.progress(stage="work", samples=number, total=100000)
        if os.path.exists(sys.argv[1]):
            break
        time.sleep(0.05)
"""


@dataclass
class Box:
    """The host as ssh knows it: `destination`, and the state folder that the runs there use."""

    destination: str
    state: Path
    home: Path
    command: str
    server: int

    def cut(self) -> int:
        """Kill the server's side of every connection, as a failing network would; returns how many there were."""
        sessions = [pid for pid in all_pids() if parent_of(pid) == self.server]
        workers = [pid for pid in all_pids() if parent_of(pid) in sessions and command_of(pid).startswith("sshd")]
        for pid in [*sessions, *workers]:
            os.kill(pid, signal.SIGKILL)
        return len(sessions)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    assert SSHD is not None, "CI must have sshd"
    root = tmp_path_factory.mktemp("sshd")
    root.chmod(0o700)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / name)], check=True)
    (root / "authorized_keys").write_text((root / "user_key.pub").read_text())
    (root / "authorized_keys").chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    state = root / "state"
    source = str(Path(__file__).resolve().parents[2] / "src")
    Path("/run/sshd").mkdir(parents=True, exist_ok=True)  # sshd's privilege separation wants it
    (root / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {root}/host_key\nAuthorizedKeysFile {root}/authorized_keys\n"
        f"PidFile {root}/sshd.pid\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
        f"SetEnv EYAS_STATE_DIR={state} PYTHONPATH={source}\n"
    )
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    (root / "ssh_config").write_text(
        f"Host eyasbox\n  HostName 127.0.0.1\n  Port {port}\n  User {user}\n  IdentityFile {root}/user_key\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {root}/known_hosts\n  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
    )
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(root / "sshd_config")], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.05)
    before = dict(os.environ)
    os.environ["EYAS_SSH_COMMAND"] = f"ssh -F {shlex.quote(str(root / 'ssh_config'))}"
    os.environ["EYAS_REMOTE_COMMAND"] = shlex.join([sys.executable, "-m", "eyas"])
    yield Box("eyasbox", state, root, os.environ["EYAS_REMOTE_COMMAND"], server.pid)
    os.environ.clear()
    os.environ.update(before)
    server.terminate()
    server.wait(20)


def eyas(*arguments: str, code: int = 0, **kwargs) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        eyas_command(*arguments),
        capture_output=True,
        text=True,
        timeout=200,
        env=eyas_environment(),
        check=False,
        **kwargs,
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


NASTY = [
    "plain",
    "two words",
    "it's",
    'say "hi"',
    "$HOME `id` $(id)",
    "; rm -rf x",
    "a\nb",
    "*",
    "",
    "ünï\\cödé",
    "~root",
    "-n",
]


@needs_sshd
def test_arguments_arrive_as_they_are_whatever_is_in_them(box):
    host = remote.Host(
        box.destination, shlex.join([sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"])
    )
    done = remote.run_there(host, NASTY)
    assert json.loads(done.stdout) == NASTY


@needs_sshd
def test_a_folder_with_spaces_is_gone_to(box, tmp_path):
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    host = remote.Host(
        box.destination, shlex.join([sys.executable, "-c", "import os; print(os.getcwd())"]), str(folder)
    )
    assert remote.run_there(host, []).stdout.strip() == str(folder)


def test_a_destination_that_would_be_an_option_is_refused():
    for bad in ("-oProxyCommand=touch /tmp/x", "", "a b"):
        with pytest.raises(InputError, match="no ssh destination"):
            remote.Host(bad)


@needs_sshd
def test_a_host_without_eyas_or_that_cannot_be_reached_is_said_clearly(box, monkeypatch):
    with pytest.raises(InputError, match="there is no 'no-such-eyas' on eyasbox"):
        remote.run_there(remote.Host(box.destination, "no-such-eyas"), ["runs", "list"])
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(EyasError, match=r"no connection to nowhere\.invalid"):
        remote.run_there(remote.Host("nowhere.invalid"), ["runs", "list"])


@needs_sshd
def test_extract_on_the_host_is_started_detached_listed_shown_and_its_result_is_there(
    box, tmp_path, tiny_model, token_rows
):
    rows = token_rows([8, 9, 10])
    flags = [
        "--model-path",
        str(tiny_model("llama")),
        "--prepared-data",
        rows.name,
        "--output-dir",
        "out put",
        "--layer-ids",
        "1",
        "2",
    ]
    said = eyas("extract", *flags, "--host", box.destination, "--host-dir", str(tmp_path)).stdout
    run_id = said.split()[1]
    followed = eyas("runs", "logs", run_id, "-f", "--host", box.destination)
    assert "3 of 3" in followed.stdout
    assert run_id in eyas("runs", "list", "--host", box.destination).stdout
    shown = json.loads(eyas("runs", "show", run_id, "--json", "--host", box.destination).stdout)
    assert shown["state"] == "finished"
    assert shown["run"]["argv"] == ["extract", *flags]
    assert (tmp_path / "out put" / "manifest.json").exists()


@needs_sshd
def test_what_the_host_refuses_comes_back_with_its_message_and_code(box, tmp_path):
    flags = [
        "--model-path",
        str(tmp_path / "no model"),
        "--prepared-data",
        "x.jsonl",
        "--output-dir",
        str(tmp_path / "o"),
    ]
    said = eyas("extract", *flags, "--host", box.destination, "--no-such-flag", code=2).stderr
    assert "--no-such-flag" in said
    said = eyas("extract", *flags, "--on-stall", "explode", "--host", box.destination, code=2).stderr
    assert "explode" in said
    said = eyas("extract", *flags, "--host", box.destination, code=3).stderr
    assert "x.jsonl" in said


@needs_sshd
def test_following_goes_on_after_the_connection_is_cut_without_losing_or_repeating_a_line(box, tmp_path):
    stop_file = tmp_path / "stop"
    script = tmp_path / "long.py"
    script.write_text(LONG)
    driver = subprocess.Popen(
        [sys.executable, str(script), str(stop_file)],
        env=eyas_environment(EYAS_STATE_DIR=str(box.state)),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        follower = subprocess.Popen(
            eyas_command("runs", "logs", "last", "-f", "--json", "--grep", "^line", "--host", box.destination),
            env=eyas_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        seen: list[str] = []
        cuts = 0
        assert follower.stdout is not None
        for raw in follower.stdout:
            seen.append(json.loads(raw)["text"])
            if len(seen) in (20, 60) and cuts < 2:
                assert box.cut() > 0
                cuts += 1
            if len(seen) == 120:
                stop_file.write_text("")
        follower.wait(60)
        assert cuts == 2
        assert "trying again" in follower.stderr.read()
        numbers = [int(text.split()[1]) for text in seen]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= 120
        assert driver.wait(60) == 0
    finally:
        if driver.poll() is None:
            driver.kill()
            driver.wait()


@needs_sshd
def test_a_run_there_is_stopped_from_here_and_proven_gone(box, tmp_path):
    script = tmp_path / "long.py"
    script.write_text(LONG)
    driver = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "never")],
        env=eyas_environment(EYAS_STATE_DIR=str(box.state)),
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while "work" not in eyas("runs", "list", "--host", box.destination, "--limit", "1").stdout:
            assert time.monotonic() < deadline
        said = eyas("runs", "stop", "last", "--host", box.destination).stdout
        assert "processes: none lives" in said
        assert driver.wait(30) == -signal.SIGINT  # it ended by its KeyboardInterrupt, not by a kill
    finally:
        if driver.poll() is None:
            driver.kill()
            driver.wait()


@needs_sshd
def test_a_connection_broken_while_starting_never_starts_a_run_twice(box, tmp_path, monkeypatch):
    # An ssh that breaks after the command has run: the run is there, and ssh says 255.
    breaking = tmp_path / "breaking-ssh"
    real = os.environ["EYAS_SSH_COMMAND"]
    marker = tmp_path / "broke"
    breaking.write_text(f'#!/bin/sh\n{real} "$@"\ncode=$?\n[ -e {marker} ] && exit $code\ntouch {marker}\nexit 255\n')
    breaking.chmod(0o755)
    monkeypatch.setenv("EYAS_SSH_COMMAND", str(breaking))
    before = len(list((box.state / "runs").iterdir())) if (box.state / "runs").exists() else 0
    (tmp_path / "data.jsonl").write_text("{}\n")
    flags = [
        "--model-path",
        str(tmp_path / "none"),
        "--prepared-data",
        str(tmp_path / "data.jsonl"),
        "--output-dir",
        str(tmp_path / "o"),
    ]
    said = eyas("extract", *flags, "--host", box.destination).stdout
    assert marker.exists()
    assert len(list((box.state / "runs").iterdir())) == before + 1
    assert said.split()[1] in [path.name for path in (box.state / "runs").iterdir()]
