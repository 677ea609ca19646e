"""The command line as a process, and a token dataset for it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import numpy as np


def write_token_rows(path: Path, lengths: list[int], vocab_size: int = 128, seed: int = 0) -> Path:
    """`tokenized_data.jsonl` of random samples; the first third of each is not supervised."""
    rng = np.random.default_rng(seed)
    with open(path, "w", encoding="utf-8") as file:
        for length in lengths:
            ids = rng.integers(0, vocab_size, length).tolist()
            mask = [int(i >= length // 3) for i in range(length)]
            file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    return path


def run_eyas(*arguments: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line as a process and wait for it."""
    return subprocess.run(
        eyas_command(*arguments),
        capture_output=True,
        text=True,
        timeout=300,
        env=eyas_environment(),
        check=False,
        **kwargs,
    )


def eyas_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "eyas", *map(str, arguments)]


def eyas_environment(**more: str) -> dict[str, str]:
    source = str(Path(__file__).parent.parent / "src")
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}


def in_terminal(*arguments: str | Path, columns: int = 80, code: int = 0) -> list[str]:
    """The lines that the command line leaves on a real terminal of so many columns, without colours."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**eyas_environment(), "TERM": "xterm"}
    del environment["COLUMNS"]  # it would hide the terminal's own width
    process = subprocess.Popen(eyas_command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    raw = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the terminal's other side is closed
            break
        raw += data
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw.decode())
    lines = [line.split("\r")[-1].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    assert process.wait(timeout=300) == code, "\n".join(lines)
    return lines
