"""Which way of capture a model has in the installed vLLM, before anything is loaded.

Read from the source of vLLM's models: to import them may initialise CUDA in this process, after which no engine can fork.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

from eyas.base.errors import EngineError
from eyas.target.model_files import ModelInfo
from eyas.target.skeleton import build_skeleton

#: A class with one of these has auxiliary states.
INTERFACE, METHOD = "SupportsEagle3", "set_aux_hidden_state_layers"


def capture_for(info: ModelInfo) -> str:
    """`--capture auto`: aux where the model's class in vLLM returns auxiliary states, else transformers (the same class run by vLLM's
    Transformers backend, which returns them for any model), else hooks, in eager mode. What cannot be read counts as aux: the engine says so.
    """
    found = [has_interface(name) for name in getattr(info.config, "architectures", None) or ()]
    if not found or False not in found:
        return "aux"
    try:
        model = build_skeleton(info.config, 64, info.trust_remote_code)
    except EngineError:
        return "hooks"
    # The backend puts vLLM's layers in the place of linear ones; GPT-2's convolutions would miss weights.
    convolutions = any(type(module).__name__ == "Conv1D" for module in model.modules())
    return "transformers" if getattr(model, "_supports_attention_backend", False) and not convolutions else "hooks"


@cache
def has_interface(architecture: str) -> bool | None:
    """Whether vLLM's class of this name, or one it inherits from, returns auxiliary states; None where no source of it is found."""
    waiting = [place for place in [_registered().get(architecture)] if place]
    seen: set[tuple[str, str]] = set()
    known = False
    while waiting:
        module, name = place = waiting.pop()
        if name == INTERFACE:
            return True
        source = None if place in seen else _source(module)
        seen.add(place)
        for node in ast.walk(source) if source else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                if any(isinstance(item, ast.FunctionDef) and item.name == METHOD for item in node.body):
                    return True
                known = True
                waiting += [(module, base.id) for base in node.bases if isinstance(base, ast.Name)]
            elif isinstance(node, ast.ImportFrom):
                waiting += [
                    (_absolute(module, node), one.name) for one in node.names if name == (one.asname or one.name)
                ]
    return False if known else None


@cache
def _registered() -> dict[str, tuple[str, str]]:
    """Architecture -> (module, class), from the tables of vLLM's registry."""
    registry = _source("vllm.model_executor.models.registry")
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(registry) if registry else ():
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and len(value.elts) == 2:
                module, name = (getattr(part, "value", None) for part in value.elts)
                if isinstance(module, str) and isinstance(name, str):
                    whole = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
                    found[str(key.value)] = (whole, name)
    return found


@cache
def _source(module: str) -> ast.Module | None:
    """A module of vLLM, parsed, not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]).joinpath(*module.split(".")[1:])
    file = next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)
    return None if file is None else ast.parse(file.read_text(encoding="utf-8"))


def _absolute(module: str, node: ast.ImportFrom) -> str:
    """The module that a `from ... import` in `module` names."""
    package = module.split(".")[: -node.level] if node.level else []
    return ".".join([*package, *filter(None, [node.module])])
