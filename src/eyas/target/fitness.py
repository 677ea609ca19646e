"""Whether a target can be captured and can teach a draft, said before anything is loaded: rows for preflight and `eyas doctor`."""

from __future__ import annotations

from eyas.base.check import Check
from eyas.base.errors import InputError
from eyas.target.model_files import ModelInfo


def check_teacher(info: ModelInfo, *, needed: bool = True) -> Check:
    """Whether `eyas train` will rebuild the target's distribution from its stored state; `needed`: the state is stored at all."""
    from eyas.target.teacher import load_target_parts

    readout = info.readout
    name = "teacher"
    if info.weight_bytes:
        try:
            load_target_parts(info)
        except InputError as error:
            return Check(name, "FAIL" if needed else "WARN", error.what, error.remedy)
    if not readout.tried:
        return Check(
            name,
            "WARN",
            f"what follows the last layer could not be tried before the load: {readout.problem}",
            "parity compares the logits rebuilt from stored states with the engine's own",
        )
    if readout.problem:
        return Check(name, "FAIL" if needed else "WARN", f"the target's logits cannot be rebuilt: {readout.problem}")
    scales = [
        f"{what} {value:g}"
        for what, value in (("state times", readout.state_scale), ("logits times", readout.logit_scale))
        if value != 1.0
    ]
    cap = [] if readout.softcap is None else [f"soft cap {readout.softcap:g}"]
    bias = ["bias"] if "head_bias" in readout.names else []
    extras = ", ".join([f"{readout.norm_kind} norm (eps {readout.norm_eps:g})", "head", *bias, *scales, *cap])
    return Check(name, "OK", f"{extras}: as the model's own code computes them")


def check_streams(info: ModelInfo) -> Check:
    """Whether between layers there is one residual stream, as engine `transformers` captures it."""
    streams = info.readout.streams
    if streams > 1:
        return Check(
            "residual stream",
            "FAIL",
            f"{info.architecture} carries {streams} residual streams side by side between its layers (AltUp, hyper-connections); "
            "engine transformers captures models with one",
            "--engine vllm, where it supports this model",
        )
    return Check("residual stream", "OK", "one stream between the layers")
