"""`--host user@box`: the same command there, through the system's own ssh, so its config, agent, keys and jump hosts all count.

The remote side only needs eyas. A run is always started detached there, under an id chosen here: when the connection breaks in
the middle of starting it, asking for that id tells whether it did start, so a run is never started twice nor lost.
Arguments travel through the remote shell quoted; nothing of them is ever interpreted by it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from eyas.base.errors import EyasError, InputError

#: ssh's own exit code: the connection could not be made, or broke.
BROKEN = 255


@dataclass(frozen=True)
class Host:
    """Where and how. `command`: how eyas is called there; `directory`: where to run it (default: ssh's, the home folder)."""

    destination: str
    command: str = "eyas"
    directory: str | None = None

    def __post_init__(self) -> None:
        if not self.destination or self.destination.startswith("-") or any(c.isspace() for c in self.destination):
            raise InputError(
                f"--host {self.destination!r} is no ssh destination", "user@box, or a name from ~/.ssh/config"
            )


def host_of(destination: str, command: str | None = None, directory: str | None = None) -> Host:
    """`--host`, `--host-command` (default: `$EYAS_REMOTE_COMMAND`, else `eyas`) and `--host-dir`."""
    return Host(destination, command or os.environ.get("EYAS_REMOTE_COMMAND") or "eyas", directory)


def ssh_line(host: Host, arguments: list[str], terminal: bool = False) -> list[str]:
    """The local command line that runs `eyas ARGUMENTS` on the host. `$EYAS_SSH_COMMAND` stands in for `ssh`, as git's does."""
    remote = shlex.join([*shlex.split(host.command), *arguments])
    if host.directory:
        remote = f"cd {shlex.quote(host.directory)} && {remote}"
    # A keep-alive, so that a dead connection is noticed; no questions where nobody can answer them.
    options = ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"]
    if not sys.stdin.isatty():
        options += ["-o", "BatchMode=yes"]
    ssh = shlex.split(os.environ.get("EYAS_SSH_COMMAND") or "ssh")
    return [*ssh, *options, "-t" if terminal else "-T", "--", host.destination, remote]


def run_there(host: Host, arguments: list[str], attempts: int = 3) -> subprocess.CompletedProcess[str]:
    """Run an eyas command there and take what it prints. A broken connection is tried again: use it for what may run twice.

    Raises:
        EyasError: no connection after all attempts, or no eyas there.
    """
    attempt = 1
    while (done := _ask(host, arguments)).returncode == BROKEN and attempt < attempts:
        time.sleep(2**attempt)
        attempt += 1
    _explain(host, done.returncode, done.stderr)
    return done


def _ask(host: Host, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    line = ssh_line(host, arguments)
    return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def _explain(host: Host, code: int, said: str) -> None:
    if code == BROKEN:
        raise no_connection(host, said)
    if code == 127:
        raise InputError(
            f"there is no {host.command!r} on {host.destination}: {said.strip()}",
            "install eyas there, or say how it is called: --host-command /path/to/.venv/bin/eyas",
        )


def no_connection(host: Host, said: str) -> EyasError:
    return EyasError(
        f"no connection to {host.destination}: {said.strip() or 'ssh ended with code 255'}",
        f"try `ssh {host.destination}` by hand; a run that was started there goes on",
    )


def pass_through(host: Host, arguments: list[str]) -> int:
    """Run an eyas command there with this terminal; returns its exit code."""
    line = ssh_line(host, arguments, terminal=sys.stdin.isatty() and sys.stdout.isatty())
    code = subprocess.run(line, check=False).returncode
    if code in (BROKEN, 127):
        _explain(host, code, "")
    return code


def start_there(host: Host, arguments: list[str], run_id: str) -> dict[str, Any]:
    """Start a run on the host, detached, and return what `eyas runs show --json` says of it.

    Args:
        arguments: the whole command line without the `--host` and `--detach` flags.

    Raises:
        EyasError: it could not be started; says what the other side said.
    """
    start = [*arguments, "--detach", "--run-id", run_id]
    failure = ""
    for attempt in range(3):
        if attempt:
            time.sleep(2**attempt)
        done = _ask(host, start)
        if done.returncode not in (0, BROKEN):
            _explain(host, done.returncode, done.stderr)
            error = EyasError(f"{host.destination} refused to start the run:\n{(done.stderr or done.stdout).strip()}")
            error.exit_code = done.returncode
            raise error
        failure = done.stderr
        # After a broken connection this tells whether the run had started; after a good one it gives the record.
        shown = _ask(host, ["runs", "show", run_id, "--json"])
        if shown.returncode == 0:
            return json.loads(shown.stdout)
    raise no_connection(host, failure)


def follow_there(
    host: Host,
    arguments: list[str],
    show: Callable[[dict[str, Any]], None],
    note: Callable[[str], None],
) -> int:
    """`eyas runs logs RUN -f` there; goes on where it was when the connection breaks, until the run is over.

    Args:
        arguments: the command there, `--json` included. show: is given each line. note: is told of broken connections.

    Returns:
        exit code of the command there.
    """
    at: dict[str, int] = {}
    failures = 0
    while True:
        extra = ["--after", json.dumps(at)] if at else []
        process = subprocess.Popen(
            ssh_line(host, [*arguments, *extra]), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        try:
            for data in _json_lines(process.stdout or ()):
                failures = 0
                source, offset = data["at"]
                at[source] = offset
                show(data)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if code != BROKEN:
            if code == 127:
                _explain(host, code, "")
            return code
        failures += 1
        if failures > 20:
            raise no_connection(host, "")
        note(f"connection to {host.destination} broken; trying again (the run goes on)")
        time.sleep(min(30.0, 2.0 ** min(failures, 5) / 2))


def _json_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for raw in lines:
        try:
            yield json.loads(raw)
        except json.JSONDecodeError:
            return  # cut in the middle of a line: it comes again whole
