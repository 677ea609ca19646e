"""What a target does between its last layer and its logits, found by running its own code.

    logits = softcap * tanh(logit_scale * (W (state_scale * norm(x)) + b) / softcap)

The norm's kind, the scales (Cohere and HyperCLOVA-X multiply the logits, Granite divides them, MiniCPM divides the state), the cap and
the bias stand in configs under many names. Instead of guessing from names, the model's class is built without weights, random ones
are put into its final norm and head, random rows are fed into the norm, and this formula is fitted and then held against what the
class computes. What does not fit is said, with what was found.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.base.errors import EngineError
from eyas.target.decoder import Decoder, find_decoder, is_other_tower
from eyas.target.skeleton import build_skeleton

#: Kinds of norm: rms x / sqrt(mean(x^2) + eps) times w, rms_1p the same times (1 + w), layer the same of x - mean(x), times w.
KINDS = ("rms", "rms_1p", "layer", "layer_1p")
#: Rows and tokens of a trial.
ROWS, VOCABULARY = 24, 64
#: Largest relative L2 between the class's own results and the formula, both in float32.
EXACT = 1e-4


@dataclass(frozen=True)
class Readout:
    """The formula of this module's opening for one target, and where its parts are.

    Attributes:
        tried: whether the target's class could be built and run. problem: why the formula does not hold (tried) or what kept it from
            being tried; None when it was tried and holds.
        streams: residual streams side by side between the layers, 1 for most models.
        tied: whether head and embedding are one parameter; None where the class could not be built.
        names: part (`norm`, `norm_bias`, `head`, `head_bias`, `embedding`) -> the parameter's name in the class, for those it has.
    """

    norm_kind: str
    norm_eps: float
    state_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    tried: bool = False
    problem: str | None = None
    streams: int = 1
    tied: bool | None = None
    names: dict[str, str] = field(default_factory=dict)


def normalise(x: Tensor, kind: str, eps: float, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """The one final norm. x: [n, H], computed in float32 (float64 for float64). weight, bias: [H] or None."""
    x = x if x.dtype == torch.float64 else x.float()
    if kind.startswith("layer"):
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        gain = weight.to(x.device, x.dtype)
        x = x * (1 + gain if kind.endswith("_1p") else gain)
    return x if bias is None else x + bias.to(x.device, x.dtype)


def squash(z: Tensor, logit_scale: float, softcap: float | None) -> Tensor:
    """The head's product [n, V] -> logits."""
    if logit_scale != 1.0:
        z = z * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def try_readout(config: Any, trust_remote_code: bool = False) -> Readout:
    """The readout of a target, from its (resolved) transformers config. Takes a fraction of a second; a class is tried once per process."""
    key = config.to_json_string(use_diff=False)
    if key not in _tried:
        _tried[key] = _try_readout(config, trust_remote_code)
    return _tried[key]


_tried: dict[str, Readout] = {}


def _try_readout(config: Any, trust_remote_code: bool) -> Readout:
    text = config.get_text_config()
    unknown = _by_names(text.to_dict())
    try:
        model = build_skeleton(config, VOCABULARY, trust_remote_code)
        decoder = find_decoder(model, text.num_hidden_layers)
    except EngineError as error:
        return replace(unknown, problem=error.what)
    head = model.get_output_embeddings()
    tied = getattr(head, "weight", None) is model.get_input_embeddings().weight
    unknown = replace(unknown, names=_parameter_names(model, decoder, head), tied=tied)
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode():
            torch.manual_seed(0)
            trial = _Trial(model, decoder, head, text.hidden_size)
            return replace(trial.fit(), tried=True, names=unknown.names, tied=tied)
    except _NotRebuiltError as error:
        return replace(unknown, tried=True, problem=f"{type(model).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - any class's own code runs here, on a body without weights
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return replace(unknown, problem=f"{type(model).__name__} could not be tried without its weights: {reason}")


def _by_names(text: dict[str, Any]) -> Readout:
    """A guess for a class that cannot be run: an engine's parity compares it with the engine's own logits."""
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    name = next((n for n in names if text.get(n) is not None), "rms_norm_eps")
    scale = float(text.get("logit_scale") or 1.0) / float(text.get("logits_scaling") or 1.0)
    kind = "rms" if name == "rms_norm_eps" else "layer"
    return Readout(
        kind, float(text.get(name) or 1e-6), logit_scale=scale, softcap=text.get("final_logit_softcapping") or None
    )


def _parameter_names(model: Any, decoder: Decoder, head: Any) -> dict[str, str]:
    modules = {"norm": decoder.norm, "head": head, "embedding": model.get_input_embeddings()}
    prefix = {id(module): name for name, module in model.named_modules()}
    names = {}
    for part, module in modules.items():
        for parameter, suffix in (("weight", ""), ("bias", "_bias")):
            if isinstance(getattr(module, parameter, None), Tensor) and id(module) in prefix:
                names[part + suffix] = f"{prefix[id(module)]}.{parameter}"
    return names


class _NotRebuiltError(Exception):
    """The class was run, and the formula is not what it computes."""


class _Trial:
    """A class without its layers' weights, run with rows of our choice in place of what enters its final norm."""

    def __init__(self, model: Any, decoder: Decoder, head: Any, hidden_size: int):
        self.model, self.decoder, self.head = model, decoder, head
        self.seen: dict[str, Any] = {}
        self.pairs = False
        if not isinstance(getattr(head, "weight", None), Tensor) or head.weight.dim() != 2:
            raise _NotRebuiltError(f"its head is a {type(head).__name__}, not one matrix")
        inside = {id(module) for module in decoder.layers.modules()}
        for name, module in model.named_modules():
            if id(module) in inside or is_other_tower(name):
                continue
            spread = {id(decoder.norm): 0.3, id(head): hidden_size**-0.5}.get(id(module))
            for kind in (module._parameters, module._buffers):
                for key, tensor in kind.items():
                    if tensor is not None:
                        kind[key] = _body(tensor, spread)
        self.drawn = [parameter.data.clone() for parameter in head.parameters(recurse=False)]
        # From tiny rows, where a norm's epsilon shows, to large ones; the mean is not zero, so that centring shows.
        size = torch.logspace(-3, 2, ROWS)[:, None]
        self.rows = size * (torch.randn(ROWS, hidden_size) + 0.5)
        for layer in decoder.layers:
            layer.forward = self._layer
        decoder.norm.register_forward_pre_hook(self._enter_norm, with_kwargs=True)
        decoder.norm.register_forward_hook(lambda _m, _a, out: self.seen.update(normed=out))
        head.register_forward_pre_hook(lambda _m, args: self.seen.update(read=args[0]))
        head.register_forward_hook(lambda _m, _a, out: self.seen.update(product=out))

    def _layer(self, *args: Any, **kwargs: Any) -> Any:
        stream = args[0] if args else kwargs["hidden_states"]
        self.seen["stream"] = tuple(stream.shape)
        return (stream, None) if self.pairs else stream

    def _enter_norm(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.seen["enters"] = tuple((args[0] if args else kwargs["hidden_states"]).shape)
        return (self.rows[None], *args[1:]), {k: v for k, v in kwargs.items() if k != "hidden_states"}

    def run(self, head_size: float = 1.0) -> dict[str, Tensor]:
        """`normed`, `read` (by the head), `product`, `logits`, each [ROWS, ...], with the head's parameters times `head_size`."""
        for parameter, drawn in zip(self.head.parameters(recurse=False), self.drawn, strict=True):
            parameter.data = drawn * head_size
        ids = torch.arange(ROWS)[None] % VOCABULARY
        failure: Exception | None = None
        for self.pairs in (False, True):  # a layer returns its stream, or a tuple that begins with it
            self.seen = {}
            try:
                logits = self.model(input_ids=ids, use_cache=False).logits
                break
            except Exception as error:  # noqa: BLE001 - see `_try_readout`
                failure = failure or error
        else:
            raise failure or RuntimeError("not run")
        found = {**{k: self.seen.get(k) for k in ("normed", "read", "product")}, "logits": logits}
        for name, tensor in found.items():
            if not isinstance(tensor, Tensor) or tensor.numel() // tensor.shape[-1] != ROWS:
                raise _NotRebuiltError(f"its {name.replace('read', 'input of the head')} could not be observed")
        return {name: tensor.reshape(ROWS, -1).float() for name, tensor in found.items()}

    def fit(self) -> Readout:
        found = self.run()
        kind, eps = self._norm(found["normed"])
        state_scale = _factor(
            found["normed"], found["read"], "between the final norm and the head the state is changed"
        )
        _require(
            F.linear(found["read"], self.head.weight, getattr(self.head, "bias", None)),
            found["product"],
            "its head is not W x + b",
        )
        small, large = self.run(1e-3 / float(found["product"].abs().max())), self.run(1e6)
        if found["logits"].shape != found["product"].shape:
            raise _NotRebuiltError(f"{VOCABULARY} tokens have {found['logits'].shape[-1]} logits")
        changed = "after the head the logits are changed otherwise than by a factor and a soft cap"
        logit_scale = _factor(small["product"], small["logits"], changed)
        softcap = None
        if not _error(large["product"] * logit_scale, large["logits"]) <= EXACT:
            softcap = float(large["logits"].abs().max())
        _require(squash(found["product"], logit_scale, softcap), found["logits"], changed)
        return Readout(
            kind,
            eps,
            _tidy(state_scale),
            _tidy(logit_scale),
            None if softcap is None else _tidy(softcap),
            streams=_streams(self.seen["stream"]),
        )

    def _norm(self, normed: Tensor) -> tuple[str, float]:
        norm = self.decoder.norm
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        own = [getattr(norm, n, None) for n in ("variance_epsilon", "eps", "epsilon", "norm_eps")]
        epsilons = [float(e) for e in own if isinstance(e, (int, float))] or [1e-5, 1e-6, 1e-12, 0.0]
        errors = {
            (kind, eps): _error(normalise(self.rows, kind, eps, weight, bias), normed)
            for kind in KINDS
            for eps in epsilons
        }
        best = min(errors, key=lambda pair: errors[pair])
        if not errors[best] <= EXACT:
            raise _NotRebuiltError(
                f"its final norm {type(norm).__name__} is none of {', '.join(KINDS)} (nearest: {best[0]}, off by {errors[best]:.2g})"
            )
        return best


def _body(tensor: Tensor, spread: float | None) -> Tensor:
    """Memory for a tensor of the `meta` device: random numbers, or zeros that cost nothing whatever their shape."""
    if spread is not None:
        made = torch.randn(tensor.shape) * spread
    else:
        made = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    return torch.nn.Parameter(made, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else made


def _streams(shape: tuple[int, ...]) -> int:
    tokens = 1
    for size in shape[:-1]:
        tokens *= size
    return tokens // ROWS


def _error(rebuilt: Tensor, own: Tensor) -> float:
    """Root mean square over rows of the relative L2, so that small rows count like large ones."""
    if rebuilt.shape != own.shape:
        return float("inf")
    difference = (rebuilt.double() - own.double()).norm(dim=-1) / own.double().norm(dim=-1).clamp_min(1e-30)
    return float(difference.square().mean().sqrt())


def _require(rebuilt: Tensor, own: Tensor, otherwise: str) -> None:
    if not _error(rebuilt, own) <= EXACT:
        raise _NotRebuiltError(f"{otherwise} (off by {_error(rebuilt, own):.2g})")


def _factor(a: Tensor, b: Tensor, otherwise: str) -> float:
    """The c in b = c a, held to `EXACT`."""
    if a.shape != b.shape:
        raise _NotRebuiltError(otherwise)
    factor = float((a.double() * b.double()).sum() / a.double().square().sum())
    _require(a * factor, b, otherwise)
    return factor


def _tidy(value: float) -> float:
    """A fitted factor without the rounding of its fit: 0.24999999 is 0.25."""
    tidy = float(f"{value:.5g}")
    return tidy if abs(tidy - value) <= 1e-6 * abs(value) else value
