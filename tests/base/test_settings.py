"""One dataclass states a stage's settings: what is refused, and what `help()` and the command line read from it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le

from eyas.base.errors import InputError
from eyas.base.settings import Flag, Settings, help_texts, settings_of, takes


@dataclass(frozen=True, kw_only=True)
class Common(Settings):
    model_path: str
    """The target."""


@dataclass(frozen=True, kw_only=True)
class Bake(Common):
    output: Path | None = None
    """Where it
    goes."""
    layers: tuple[int | Literal["final"], ...] | None = None
    pair: tuple[float, float] = (0.5, 1.0)
    ranks: Annotated[int, Ge(1)] | None = None
    counts: tuple[Annotated[int, Ge(1)], ...] | None = None
    share: Annotated[float, Gt(0), Le(1), Flag("part-of-it")] = 0.5
    kind: Literal["soft", "hard"] = "soft"
    extra: dict[str, int] = field(default_factory=dict)


@takes(Bake)
def bake(settings: Bake, *, on_stage: int = 0) -> tuple[Bake, int]:
    return settings, on_stage


def test_a_stage_takes_its_settings_or_their_fields():
    made = Bake(model_path="m", output=Path("o"), layers=(2, "final"))
    assert bake(made, on_stage=3) == (made, 3)
    assert bake(model_path=Path("m"), output="o", layers=[2, "final"], on_stage=3) == (made, 3)
    assert bake(model_path="m", layers="final")[0].layers == ("final",)
    with pytest.raises(TypeError, match="nonsense"):
        bake(model_path="m", nonsense=1)


def test_the_signature_has_every_field_and_the_callbacks():
    parameters = inspect.signature(bake).parameters
    assert list(parameters) == [*(one.name for one in settings_of(Bake)), "on_stage"]
    assert parameters["share"].default == 0.5
    assert parameters["share"].annotation is float
    assert parameters["model_path"].default is inspect.Parameter.empty


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"ranks": 0}, "--ranks is 0\n  -> it must be at least 1"),
        ({"ranks": "x"}, "--ranks is 'x'\n  -> expected: a whole number"),
        ({"ranks": True}, "expected: a whole number"),
        ({"counts": [2, 0]}, "--counts is (2, 0)\n  -> it must be at least 1"),
        ({"share": 0}, "--part-of-it is 0\n  -> it must be above 0"),
        ({"share": 1.5}, "it must be at most 1"),
        ({"share": float("nan")}, "--part-of-it is nan"),
        ({"kind": "firm"}, "--kind is 'firm'\n  -> expected: one of soft, hard"),
        ({"layers": ["last"]}, "a list, each a whole number or final"),
        ({"layers": 3}, "a list"),
        ({"pair": [1.0]}, "--pair"),
        ({"model_path": 3}, "--model-path is 3\n  -> expected: text"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_their_flag(wrong, says):
    with pytest.raises(InputError) as caught:
        Bake(**{"model_path": "m", **wrong})
    assert says in str(caught.value)


def test_help_is_the_text_below_a_field():
    assert help_texts(Bake) == {"model_path": "The target.", "output": "Where it goes."}
