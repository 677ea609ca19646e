"""From settings to a command line: flags, `--help` and `--config` come out of the dataclasses that state them.

cyclopts parses: of the two libraries tried it takes `--layer-ids 2 30` and repeated flags alike, and loads one command at a time; tyro
keeps only the last of repeated flags.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import App, CycloptsError, Parameter
from cyclopts.exceptions import ConsumeMultipleError, MissingArgumentError
from rich.markup import escape

from eyas.base.errors import EyasError, InputError
from eyas.base.settings import Setting, Settings, help_texts, settings_of

#: Headings in `--help` for flags that are not a command's own.
GROUPS = {"options": "The run"}
#: Width of the names in `--help`; a longer one has its text below.
NAMES = 26


class UsageError(EyasError, code=2):
    """The command line cannot be read: an unknown command or flag, a missing value, not one of the choices."""


@dataclass(frozen=True)
class Input:
    """One flag: the setting, its default (MISSING: required) and help, and the path of names under which its value is handed over."""

    setting: Setting
    default: Any
    help: str
    path: tuple[str, ...]

    @property
    def key(self) -> str:
        return "__".join(self.path)


def inputs_of(function: Callable[..., Any]) -> list[Input]:
    """Every flag of a command: of the `Settings` classes among its parameters, and of its other parameters."""
    hints = get_type_hints(function, include_extras=True)
    found: list[Input] = []
    for one in inspect.signature(function).parameters.values():
        if _is_settings(hints[one.name]):
            found += fields_of(hints[one.name], (one.name,))
            continue
        setting = Setting.of(one.name, hints[one.name])
        default = MISSING if one.default is one.empty else one.default
        found.append(Input(setting, default, setting.metadata.help, (one.name,)))
    return found


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Settings)


def fields_of(cls: Any, path: tuple[str, ...]) -> Iterator[Input]:
    """Every flag of a `Settings` class, those of the settings within it included."""
    texts = help_texts(cls)
    for setting, field in zip(settings_of(cls), fields(cls), strict=True):
        if _is_settings(setting.type):
            yield from fields_of(setting.type, (*path, setting.name))
            continue
        made = field.default_factory() if field.default_factory is not MISSING else field.default
        yield Input(setting, made, texts.get(setting.name, ""), (*path, setting.name))


def arguments_of(kinds: Mapping[str, Any], inputs: Sequence[Input], given: dict[str, Any]) -> dict[str, Any]:
    """What a command is called with: settings made of what was given on the command line, every value checked.

    Args:
        kinds: the parameters wanted, with their types. inputs, given: of these and perhaps of others.

    Raises:
        InputError: a value that does not fit, or a file that is not there.
    """
    tree: dict[str, Any] = {}
    for one in inputs:
        if one.key not in given or one.path[0] not in kinds:
            continue
        value = one.setting.checked(_converted(one.setting, given[one.key]))
        if one.setting.metadata.exists:
            _check_exists(one.setting, value)
        *above, name = one.path
        place = tree
        for step in above:
            place = place.setdefault(step, {})
        place[name] = value
    return tree | {name: _made(kind, tree.get(name, {})) for name, kind in kinds.items() if _is_settings(kind)}


def _check_exists(setting: Setting, value: Any) -> None:
    for path in value if isinstance(value, tuple) else (value,):
        if path is not None and not Path(path).exists():
            raise InputError(f"{setting.flag} {path}: no such file or directory", "check the path")


def _made(cls: Any, values: dict[str, Any]) -> Any:
    inner = {one.name: one.type for one in settings_of(cls) if _is_settings(one.type)}
    return cls(**{k: _made(inner[k], v) if k in inner else v for k, v in values.items()})


def _alternatives(kind: Any) -> list[Any]:
    """The types of a union without None; of any other type itself."""
    return [one for one in get_args(kind) if one is not type(None)] if _is_union(kind) else [kind]


def _is_union(kind: Any) -> bool:
    return get_origin(kind) is not None and type(None) in get_args(kind)


def _typed(setting: Setting) -> Any:
    """The type that cyclopts parses: lists and mappings arrive as text and are converted below."""
    kind = _alternatives(setting.type)[0] if len(_alternatives(setting.type)) == 1 else setting.type
    if get_origin(kind) is dict:
        return str if get_args(kind)[1] is Any else tuple[str, ...]
    return tuple[str, ...] if get_origin(kind) is tuple else setting.type


def _converted(setting: Setting, value: Any) -> Any:
    """Text of lists and mappings as the setting's type wants it: `2,15,27`, NAME=VALUE, JSON."""
    kind = _alternatives(setting.type)[0]
    if get_origin(kind) is dict:
        return _mapping(setting, value)
    if get_origin(kind) is not tuple:
        return value
    element = get_args(kind)[0]
    if element not in (str, Path):
        value = [part for text in value for part in text.split(",") if part]
    options = (get_origin(element) is not Literal and get_args(element)) or (element,)
    return tuple(next((made for one in options for made in _read(text, one)), text) for text in value)


def _read(text: str, kind: Any) -> Iterator[Any]:
    if get_origin(kind) is Literal:
        yield from (one for one in get_args(kind) if str(one) == text)
        return
    try:
        yield kind(text)
    except ValueError:
        return


def _mapping(setting: Setting, value: Any) -> dict[str, Any]:
    if isinstance(value, tuple):
        if wrong := [one for one in value if "=" not in one]:
            raise InputError(f"{setting.flag} {wrong[0]}: expected NAME=VALUE")
        return dict(one.split("=", 1) for one in value)
    try:
        found = json.loads(value or "{}")
    except json.JSONDecodeError as error:
        example = f"for example {setting.flag} '{{\"enable_thinking\": false}}'"
        raise InputError(f"{setting.flag}: not JSON ({error})", example) from None
    if not isinstance(found, dict):
        raise InputError(f"{setting.flag}: expected a JSON object, found {found!r}")
    return found


def load(where: str) -> Callable[..., int | None]:
    """The function that `module:function` names."""
    module, _, function = where.partition(":")
    return getattr(import_module(module), function)


def app_of(commands: Mapping[str, str], groups: Mapping[str, str], **more: Any) -> App:
    """The command line with its commands (`name` or `group name`) and their help, none of them loaded yet."""
    looks: Any = {"help_formatter": HelpFormatter(), "help_format": "plaintext", "version_flags": []}
    app = App(name="eyas", **{**looks, "version_flags": ["--version"]}, version=_version, **more)
    for name, text in groups.items():
        app.command(App(name=name, help=text, sort_key=len(commands), **looks))
    for place, (name, text) in enumerate(commands.items()):
        *group, last = name.split()
        (app[group[0]] if group else app).command(lambda: None, name=last, help=text, sort_key=place)
    return app


def _version() -> str:
    from eyas.base.manifest import package_version

    return f"eyas {package_version('eyas') or 'unknown'}"


def add(app: App, words: Sequence[str], text: str, inputs: Sequence[Input]) -> None:
    """Give one command of the app its flags."""
    *group, last = words
    place = app[group[0]] if group else app
    del place[last]
    place.command(parameters_of(inputs), name=last, help=text)


def parse(app: App, tokens: Sequence[str]) -> Any:
    """What cyclopts makes of the tokens: the command's own return value. Raises UsageError."""
    try:
        function, bound, _ = app.parse_args(list(tokens), print_error=False, exit_on_error=False)
    except CycloptsError as error:
        error.verbose = False
        name, where = error.argument.name if error.argument else "", " ".join(["eyas", *(error.command_chain or ())])
        text = str(error)
        if isinstance(error, MissingArgumentError) and not isinstance(error, ConsumeMultipleError):
            text = f"{name} requires a value" if error.keyword else f"{name} is required"
        typos = [one for one in error.unused_tokens or () if one.startswith("--")]
        text = text.rstrip(".") + (f"; unknown: {', '.join(typos)}" if typos and typos[0] not in text else "")
        raise UsageError(text, f"`{where} --help` shows what it takes") from None
    return function(*bound.args, **bound.kwargs)


def parameters_of(inputs: Sequence[Input]) -> Callable[..., dict[str, Any]]:
    """A function with one parameter for each flag, as cyclopts reads it; it returns what was given."""
    ordered = sorted(inputs, key=lambda one: not one.setting.metadata.positional)
    positional = [one.key for one in ordered if one.setting.metadata.positional]

    def given(*values: Any, **flags: Any) -> dict[str, Any]:
        return {**dict(zip(positional, values, strict=False)), **flags}

    parameters = []
    for one in ordered:
        meta, kind = one.setting.metadata, _typed(one.setting)
        group: dict[str, Any] = {"group": GROUPS[one.path[0]]} if one.path[0] in GROUPS else {}
        options = Parameter(
            name=[one.setting.flag, *([meta.short] if meta.short else [])],
            help=_help(one),
            env_var=meta.env,
            show=not meta.hidden,
            show_default=False,
            show_choices=False,
            show_env_var=False,
            required=one.default is MISSING,
            negative=() if one.default is False else None,
            negative_iterable=(),
            consume_multiple=(1, None) if get_origin(kind) is tuple else None,
            metavar=_metavar(one.setting.type),
            **group,
        )
        place = inspect.Parameter.POSITIONAL_ONLY if meta.positional else inspect.Parameter.KEYWORD_ONLY
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        parameters.append(inspect.Parameter(one.key, place, default=default, annotation=Annotated[kind, options]))
    given.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    given.__annotations__ = {one.name: one.annotation for one in parameters}
    return given


def _help(one: Input) -> str:
    """The help text with what stands beside it in the statement: choices, default, environment variable."""
    options = _alternatives(one.setting.type)
    choices = get_args(options[0]) if get_origin(options[0]) is Literal else ()
    notes = [" | ".join(map(str, choices))] if choices else []
    if one.default is MISSING:
        notes.append("required")
    elif not isinstance(one.default, bool) and one.default not in (None, (), {}, ""):
        shown = one.default if not isinstance(one.default, tuple) else " ".join(map(str, one.default))
        notes.append(f"default {shown}")
    if one.setting.metadata.env:
        notes.append(f"or ${one.setting.metadata.env}")
    return one.help + (f" [{'; '.join(notes)}]" if notes else "")


def _metavar(kind: Any) -> str | None:
    options = _alternatives(kind)
    first = options[0]
    if get_origin(first) is tuple:
        element = get_args(first)[0]
        return f"{_metavar(element) or 'VALUE'} ..."
    if get_origin(first) is dict:
        return "JSON" if get_args(first)[1] is Any else "NAME=VALUE ..."
    return {int: "N", float: "X", Path: "PATH", bool: None}.get(first, "VALUE")


class HelpFormatter:
    """`--help` as lines: a name and its text beside it, or below it where the name is long. No name is ever cut."""

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        if not panel.entries:
            return
        console.print(f"[bold]{panel.title}[/]")
        room = min(console.width, 110) - NAMES - 4
        for entry in panel.entries:
            name = ", ".join(entry.display_labels_with_metavar)
            text = str(getattr(entry.description, "primary_renderable", entry.description or ""))
            lines = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
            beside = lines.pop(0) if len(name) <= NAMES else ""
            print_line = f"  [cyan]{escape(name)}[/]" + " " * max(NAMES + 2 - len(name), 1) + escape(beside)
            console.print(print_line.rstrip(), soft_wrap=True)
            for line in lines:
                console.print(" " * (NAMES + 4) + escape(line), soft_wrap=True)
        console.print()
