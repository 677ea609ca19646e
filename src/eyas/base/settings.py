"""Settings, each stated once: the dataclass of a stage holds name, type, default, bounds and help text.

    @dataclass(frozen=True, kw_only=True)
    class ExtractSettings(Settings):
        tp_size: Annotated[int, Ge(1)] = 1
        \"""Tensor parallel ranks (engine vllm).\"""

The command line (`--tp-size`), `--config` files (`tp_size:`) and the signature of `eyas.extract` come out of it; values are checked
when the object is made, the same for all three.
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import textwrap
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from annotated_types import Ge, Gt, Le, Lt

from eyas.base.errors import InputError

P = ParamSpec("P")
S = TypeVar("S", bound="Settings")
S_in = TypeVar("S_in", contravariant=True)
R = TypeVar("R", covariant=True)

#: Bounds that a field's type may carry: the word for a message, and whether a value keeps it. NaN keeps none.
BOUNDS: dict[Any, tuple[str, Callable[[Any, Any], bool]]] = {
    Ge: ("at least", operator.ge),
    Gt: ("above", operator.gt),
    Le: ("at most", operator.le),
    Lt: ("below", operator.lt),
}


@dataclass(frozen=True)
class Flag:
    """What the command line must know of a field beyond its name, as metadata of its type.

    Attributes:
        name: the flag without dashes, where it is not the field's name. env: environment variable that stands in for the flag.
        exists: the value names a file or directory that must be there; looked at before anything is loaded.
        positional: given without a flag. help: for parameters of a command; a field has its text below it. short: `-f`.
        hidden: not shown by `--help`.
    """

    name: str | None = None
    env: str | None = None
    exists: bool = False
    positional: bool = False
    help: str = ""
    short: str | None = None
    hidden: bool = False


class Settings:
    """Base of every stage's settings. Making one checks types, choices and bounds.

    Where the field's type says so, lists and single values become tuples, paths
    and strings each other, and mappings settings.

    Raises:
        InputError: a value that is not of the field's type, not one of its choices, or out of bounds.
    """

    def __post_init__(self) -> None:
        for setting in settings_of(type(self)):  # type: ignore[arg-type]
            object.__setattr__(self, setting.name, setting.checked(getattr(self, setting.name)))


@dataclass(frozen=True)
class Setting:
    """One field of a `Settings` class, or one parameter of a command. type: without its metadata."""

    name: str
    type: Any
    bounds: tuple[Any, ...]
    metadata: Flag

    @classmethod
    def of(cls, name: str, annotation: Any) -> Setting:
        """Read from a name and an annotation such as `Annotated[int, Ge(1)]` or `Annotated[int, Ge(1)] | None`."""
        kind, more = _apart(annotation)
        flag = next((one for one in more if isinstance(one, Flag)), Flag())
        return cls(name, kind, tuple(one for one in more if type(one) in BOUNDS), flag)

    @property
    def flag(self) -> str:
        """`--tp-size`; a positional one's name in capitals."""
        name = (self.metadata.name or self.name).replace("_", "-")
        return name.upper() if self.metadata.positional else f"--{name}"

    def checked(self, value: Any) -> Any:
        """The value as the field holds it. Raises InputError as `Settings`."""
        fit = fitted(value, self.type)
        if fit is UNFIT:
            raise InputError(f"{self.flag} is {value!r}", f"expected: {describe(self.type)}")
        for bound in self.bounds:
            word, holds = BOUNDS[type(bound)]
            limit = getattr(bound, type(bound).__name__.lower())
            if not all(one is None or holds(one, limit) for one in (fit if isinstance(fit, tuple) else (fit,))):
                shown = f"{fit:g}" if isinstance(fit, float) else fit
                raise InputError(f"{self.flag} is {shown}", f"it must be {word} {limit:g}")
        return fit


def _apart(annotation: Any) -> tuple[Any, list[Any]]:
    """A type without metadata, and the metadata of it, of a union's members and of a list's values."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind, more = _apart(arguments[0])
        return kind, [*more, *arguments[1:]]
    if origin in (Union, types.UnionType, tuple):  # bounds of a list are those of each of its values
        parts = [_apart(one) for one in arguments]
        whole: Any = tuple if origin is tuple else Union
        return whole[tuple(kind for kind, _ in parts)], [one for _, more in parts for one in more]
    return annotation, []


@functools.cache
def settings_of(cls: Any) -> tuple[Setting, ...]:
    """The fields of a `Settings` class with their types, bounds and flags."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple(Setting.of(one.name, hints[one.name]) for one in fields(cls))


@functools.cache
def help_texts(cls: Any) -> dict[str, str]:
    """Field -> the string below it in the source, of the class and those it inherits from."""
    texts: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        if one in (object, Settings) or "__dataclass_fields__" not in vars(one):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0].body  # type: ignore[attr-defined]
        for field, below in pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    return texts


UNFIT = object()


def fitted(value: Any, kind: Any) -> Any:
    """`value` as a field of type `kind` holds it, or `UNFIT`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        options = (fitted(value, one) for one in arguments)
        return next((one for one in options if one is not UNFIT), UNFIT)
    if origin is Literal:
        return value if value in arguments else UNFIT
    if origin is tuple:
        if isinstance(value, str | Path):
            value = (value,)
        if isinstance(value, bytes) or not isinstance(value, Sequence):
            return UNFIT
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        parts = [fitted(one, sub) for one, sub in zip(value, kinds, strict=False)]
        return tuple(parts) if len(kinds) == len(value) and UNFIT not in parts else UNFIT
    if kind is Any:
        return value
    if isinstance(kind, type) and issubclass(kind, Settings) and isinstance(value, dict):
        return kind(**value)
    if kind in (str, Path):
        return kind(value) if isinstance(value, str | Path) else UNFIT
    if kind is float:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else UNFIT
    if kind is int and isinstance(value, bool):
        return UNFIT
    return value if isinstance(value, origin or kind) else UNFIT


def describe(kind: Any) -> str:
    """A field's type in words: "one of auto, never", "a number"."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(one) for one in arguments if one is not type(None))
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin is tuple:
        return f"a list, each {describe(arguments[0])}"
    names = {int: "a whole number", float: "a number", str: "text", Path: "a path", bool: "true or false"}
    return names.get(origin or kind, f"a {getattr(origin or kind, '__name__', kind)}")


class Stage(Protocol[S_in, P, R]):
    """A stage as called: with its settings object, or with their fields by name."""

    @overload
    def __call__(self, settings: S_in, /, **callbacks: Any) -> R: ...

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


def takes(cls: Callable[P, S]) -> Callable[[Callable[Concatenate[S, ...], R]], Stage[S, P, R]]:
    """`@takes(ExtractSettings)` lets `extract(settings, *, on_progress=None)` also be called with the settings' fields by name.

    The signature that `help()` and editors show has every field, and the function's own keyword-only arguments (callbacks).
    """

    def decorate(function: Callable[Concatenate[S, ...], R]) -> Stage[S, P, R]:
        _, *callbacks = inspect.signature(function).parameters.values()

        @functools.wraps(function)
        def stage(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], cls):  # type: ignore[arg-type]
                return function(*args, **kwargs)
            own = {one.name: kwargs.pop(one.name) for one in callbacks if one.name in kwargs}
            return function(cls(*args, **kwargs), **own)

        kinds = {one.name: one.type for one in settings_of(cls)}
        own_fields = [one.replace(annotation=kinds[one.name]) for one in inspect.signature(cls).parameters.values()]
        stage.__signature__ = inspect.signature(function).replace(parameters=[*own_fields, *callbacks])  # type: ignore[attr-defined]
        return stage  # type: ignore[return-value]

    return decorate
