"""`--config run.yaml`: any command's flags from a YAML file; what stands on the command line wins.

    # extract.yaml
    model_path: Qwen/Qwen3-8B
    prepared_data: out/dataset
    output_dir: out/states
    layer_ids: [2, 18, 33]
    final: true

    eyas extract --config extract.yaml --output-dir elsewhere

Keys are the flags without their dashes, `-` or `_` alike. The file becomes flags before the command line is parsed, so that types,
defaults and errors are those of the flags themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.base.errors import InputError

FLAG = "--config"


def expand_config(arguments: list[str], flags_of: Callable[[list[str]], set[str]] | None = None) -> list[str]:
    """Replace `--config FILE` by the flags that the file holds.

    Args:
        flags_of: the flags (`--final`, `--no-final` ...) of the command that some arguments name; None to take any key as a flag.

    Raises:
        InputError: no file named, not readable, not a mapping of flags, a key that is no flag of the command, or a value that no flag can take.
    """
    # `--config=FILE` is `--config FILE`
    arguments = [part for one in arguments for part in (one.split("=", 1) if one.startswith(FLAG + "=") else [one])]
    if FLAG not in arguments:
        return arguments
    if arguments.count(FLAG) > 1:
        raise InputError(f"{FLAG} stands twice", "one file; what else is wanted goes on the command line")
    at = arguments.index(FLAG)
    if at + 1 >= len(arguments):
        raise InputError(f"{FLAG} names no file", f"{FLAG} run.yaml")
    path, rest = Path(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]
    typed = {
        _flag(argument.removeprefix("--no-").removeprefix("--").split("=")[0])
        for argument in rest
        if argument.startswith("--")
    }
    known = flags_of(rest) if flags_of is not None else set()
    flags: list[str] = []
    for key, value in _read(path).items():
        name = f"--{_flag(key)}"
        if known and name not in known:
            raise InputError(
                f"{FLAG} {path}: `{key}` is no flag of `eyas {rest[0]}`", f"`eyas {rest[0]} --help` shows the flags"
            )
        if value is False and known and f"--no-{_flag(key)}" not in known:
            continue  # a flag that is only ever switched on, and is not
        if _flag(key) not in typed:
            flags += _as_flags(path, key, value)
    return rest[:at] + flags + rest[at:]


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{FLAG} {path}: {error.strerror}", "check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{FLAG} {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"{FLAG} {path} should map flags to values, for example `tp_size: 8`")
    return values


def _flag(key: str) -> str:
    return key.replace("_", "-")


def _as_flags(path: Path, key: str, value: Any) -> list[str]:
    name = f"--{_flag(key)}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [name if value else f"--no-{_flag(key)}"]
    if isinstance(value, list):
        return [part for one in value for part in (name, str(one))]
    if isinstance(value, dict):
        raise InputError(
            f"{FLAG} {path}: {key} is a mapping, which no flag takes", "write JSON text for flags that take JSON"
        )
    return [name, str(value)]
