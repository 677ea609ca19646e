"""`--config run.yaml`: any command's flags from a YAML file; what stands on the command line wins.

    # extract.yaml
    model_path: Qwen/Qwen3-8B
    prepared_data: out/dataset
    output_dir: out/states
    layer_ids: [2, 18, 33]

    eyas extract --config extract.yaml --output-dir elsewhere

Keys are the flags without their dashes, `-` or `_` alike. The file becomes flags before the command line is parsed and kept in the
run's record, so that values are checked as if typed, and a run is resumed as it was, here or on another host.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from eyas.base.errors import InputError

FLAG = "--config"


def expand_config(arguments: list[str], flags: Collection[str]) -> list[str]:
    """Replace `--config FILE` by the flags that the file holds.

    Args:
        arguments: of one command, without its name. flags: those that the command has.

    Raises:
        InputError: no file named, not readable, not a mapping of flags, or a key that is not a flag of the command.
    """
    # `--config=FILE` is `--config FILE`
    arguments = [part for one in arguments for part in (one.split("=", 1) if one.startswith(FLAG + "=") else [one])]
    if FLAG not in arguments:
        return arguments
    if arguments.count(FLAG) > 1:
        raise InputError(f"{FLAG} is given twice", "one file; give what else is wanted as flags")
    at = arguments.index(FLAG)
    if at + 1 >= len(arguments):
        raise InputError(f"{FLAG} names no file", f"{FLAG} run.yaml")
    path, rest = Path(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]
    typed = {one.removeprefix("--no-").removeprefix("--").split("=")[0] for one in rest if one.startswith("--")}
    values = {key.replace("_", "-"): value for key, value in _read(path).items()}
    unknown = [key for key in values if f"--{key}" not in flags]
    if unknown:
        raise InputError(f"{FLAG} {path}: no flag is called {', '.join(unknown)}", "--help shows the command's flags")
    return rest + [word for key, value in values.items() if key not in typed for word in _as_words(key, value)]


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


def _as_words(key: str, value: Any) -> list[str]:
    """A flag and its value as typed; nothing for null."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{key}={str(value).lower()}"]
    if isinstance(value, dict):
        return [f"--{key}={json.dumps(value)}"]
    return [f"--{key}={one}" for one in (value if isinstance(value, list) else [value])]
