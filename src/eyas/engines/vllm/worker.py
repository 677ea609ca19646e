"""The worker that captures: a class on top of the platform's own, named to vLLM by `worker_cls`. No file of vLLM is changed.

Imported in every worker process (CPU and CUDA). It adds to vLLM's worker:

- after `load_model`: find the decoder, ask it for auxiliary states of the wanted layers (before anything is compiled or profiled);
- after each `execute_model`: give the step's states to `vllm_capture.Capture`;
- RPC methods `eyas_*`, which carry settings, counts, checks and errors, never states.

Works with both model runners of vLLM: V1 keeps row order in `runner.input_batch`, V2 in `execute_model_state.input_batch`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform

from eyas.base.errors import ContractError, EyasError, InputError
from eyas.engines.vllm import dummy  # noqa: F401 - registers its load format with vLLM
from eyas.engines.vllm.capture import Capture, Step
from eyas.engines.vllm.stop import end_without_collecting
from eyas.engines.vllm.witness import Witness, stream_hooks
from eyas.runs.logs import attach_process
from eyas.store.format import StoreSpec
from eyas.store.writer import ShardWriter

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

log = logging.getLogger(__name__)

#: Ways of capture that take the states here.
OURS = ("aux", "transformers", "hooks")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def decoder_layers(module: Any) -> Any:
    """A decoder's list of layers, whatever its architecture calls it; None for a module that has none."""
    found = (getattr(module, name, None) for name in ("layers", "h", "blocks"))
    return next((one for one in found if isinstance(one, (torch.nn.ModuleList, torch.nn.Sequential))), None)


def decoder_path(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """From the outermost class to the module that holds the decoder layers, as (attribute path, module).

    Follows `get_language_model()` or `language_model` (multimodal wrappers), then `model`, until a module has layers.
    Raises ContractError when none has.
    """
    path: list[tuple[str, Any]] = [("", model)]
    for _ in range(6):
        name, here = path[-1]
        if decoder_layers(here) is not None:
            return path
        following: Any = None
        for attribute in ("language_model", "model", "transformer", "decoder"):
            following = getattr(here, attribute, None)
            if isinstance(following, torch.nn.Module):
                path.append((f"{name}.{attribute}".lstrip("."), following))
                break
        else:
            break
    shown = " -> ".join(type(module).__name__ for _, module in path)
    raise ContractError(
        f"no decoder layers found in {shown}", "this architecture is not known to eyas; see `docs/engines.md`, Models"
    )


class CaptureWorker(PlatformWorker):
    """The platform's worker plus the capture of auxiliary hidden states."""

    _capture: Capture | None = None
    _capture_error: EyasError | None = None
    _fault_file: Path | None = None
    _witness: Witness | None = None
    _hooked: list[list[torch.Tensor]] | None = None

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        attach_process("rank", self.rank)

    # -- loading

    def load_model(self, **keywords: Any) -> None:
        super().load_model(**keywords)
        try:
            self._ask_for_states()
        except EyasError as error:
            self._keep_error(error)
            raise

    def _ask_for_states(self) -> None:
        wanted = self.vllm_config.additional_config["eyas"]
        model = self.model_runner.get_model()
        self._path = decoder_path(model)
        self._layer_ids: list[int] = sorted(wanted["layer_ids"])
        if wanted["capture"] not in OURS:
            return
        depth = len(decoder_layers(self._path[-1][1]))
        outside = [i for i in self._layer_ids if not 0 <= i <= depth]
        if outside:
            raise InputError(f"layer id {outside[0]} is out of range: the loaded model has {depth} layers")
        if wanted["capture"] == "hooks":
            self._install_hooks()
            return
        if not hasattr(model, "set_aux_hidden_state_layers"):
            raise ContractError(
                f"{self._shown_path()} has no auxiliary-hidden-state interface in this vLLM",
                "use --capture auto: vLLM's Transformers backend, or hooks in eager mode",
            )
        model.set_aux_hidden_state_layers(tuple(self._asked_of_model()))
        self._reserve_pipeline_slots(model)
        from vllm.distributed.parallel_state import get_pp_group

        self.model_runner.use_aux_hidden_state_outputs = get_pp_group().is_last_rank

    def _asked_of_model(self) -> list[int]:
        """Ids that the model's own code can return; id 0 of models whose code adds a missing residual is made by `_embedding`."""
        return [i for i in self._layer_ids if not (i == 0 and self._zero_is_ours())]

    def _zero_is_ours(self) -> bool:
        # Models of EagleModelMixin know that there is no residual yet at id 0; others (DeepSeek, Kimi) add None and crash.
        return not hasattr(self._path[-1][1], "_maybe_add_hidden_state")

    def _reserve_pipeline_slots(self, model: Any) -> None:
        """With pipeline stages, vLLM passes early layers' states on to the last stage: tell its runner which."""
        if self.parallel_config.pipeline_parallel_size == 1:
            return
        from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

        if not getattr(self._path[-1][1], "supports_aux_hidden_states_over_pp", False):
            raise ContractError(
                f"{self._shown_path()} does not pass auxiliary states through pipeline stages in this vLLM",
                "use tensor parallelism only (--pp-size 1), or runs side by side with --part i/n",
            )
        eagle3_utils.reserve_aux_intermediate_tensor_slots(model)
        handler = getattr(self.model_runner, "pp_handler", None)
        if handler is not None:
            handler.configure_aux_hidden_state_relay(model)
        elif self.parallel_config.pipeline_parallel_size > 2:
            raise ContractError(
                "stages between the first and the last pass auxiliary states on only with vLLM's model runner V2",
                "set VLLM_USE_V2_MODEL_RUNNER=1, or use --pp-size 1 or 2",
            )
        from vllm.distributed.parallel_state import get_pp_group

        if handler is None and not get_pp_group().is_first_rank and self.model_runner.intermediate_tensors is None:
            # V1 makes them in its warm-up, which the CPU worker skips in eager mode.
            self.model_runner.intermediate_tensors = model.make_empty_intermediate_tensors(
                batch_size=self.model_runner.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    def _shown_path(self) -> str:
        names = " -> ".join(type(module).__name__ for _, module in self._path)
        return f"{names}, {len(decoder_layers(self._path[-1][1]))} layers"

    def determine_available_memory(self) -> int:
        available = super().determine_available_memory()
        if not current_platform.is_cpu() and self.vllm_config.additional_config["eyas"]["capture"] in OURS:
            # Two steps' gathered rows live beside the engine while they are copied to the host.
            tokens = self.scheduler_config.max_num_batched_tokens
            width = self.model_config.get_hidden_size() * self.model_config.dtype.itemsize
            available -= 2 * tokens * len(self._layer_ids) * width
        return available

    # -- one step

    def execute_model(self, *arguments: Any, **keywords: Any) -> Any:
        if self._hooked is not None:
            for states in self._hooked:
                states.clear()
        if self._witness is not None:
            self._witness.begin_step()
        output = super().execute_model(*arguments, **keywords)
        if self._capture is None and self._witness is None:
            return output
        scheduled = arguments[0] if arguments else keywords["scheduler_output"]
        if self._witness is not None and scheduled.total_num_scheduled_tokens > 0:
            requests, counts, _, state = self._batch(scheduled)
            hidden = getattr(state, "hidden_states", None)
            self._witness.step(scheduled.scheduled_new_reqs, requests, counts, _computed(scheduled), hidden)
        if self._capture is None:
            return output
        try:
            self._capture_step(self._capture, scheduled, output)
        except EyasError as error:
            # The engine goes on, nothing more is captured: the driver finds the error, stops, and every other rank ends in order.
            self._keep_error(error)
            self._capture.discard(error)
            self._capture = None
        return output

    def _capture_step(self, capture: Capture, scheduled: Any, output: Any) -> None:
        for new in scheduled.scheduled_new_reqs:
            extra = new.sampling_params.extra_args if new.sampling_params is not None else None
            capture.begin(new.req_id, new.prompt_token_ids, (extra or {}).get("eyas"))
        if scheduled.total_num_scheduled_tokens > 0:
            if output is not None:
                raise ContractError(
                    f"execute_model answered with {type(output).__name__} where this vLLM was known to keep its state for sampling",
                    "this version of vLLM is not supported; `docs/engines.md` lists which are",
                )
            step = self._step(scheduled, _computed(scheduled))
            capture.step(step)
        capture.finish(list(scheduled.finished_req_ids))

    def _step(self, scheduled: Any, computed: dict[str, int]) -> Step:
        requests, counts, input_ids, state = self._batch(scheduled)
        rows = sum(counts)
        return Step(requests, counts, computed, self._states(state, input_ids, rows), input_ids[:rows])

    def _batch(self, scheduled: Any) -> tuple[list[str], list[int], torch.Tensor, Any]:
        """Requests and rows of the step that was run, its input ids and its results, out of whichever model runner this is."""
        runner = self.model_runner
        state = runner.execute_model_state
        if hasattr(state, "input_batch"):  # V2
            requests = list(state.input_batch.req_ids)
            counts = [int(n) for n in state.input_batch.num_scheduled_tokens[: len(requests)]]
            return requests, counts, state.input_batch.input_ids, state
        requests = list(runner.input_batch.req_ids)  # V1
        ids = runner.input_ids
        return requests, [scheduled.num_scheduled_tokens[r] for r in requests], getattr(ids, "gpu", ids), state

    def _states(self, state: Any, input_ids: torch.Tensor, rows: int) -> Any:
        if self._hooked is not None:
            return [torch.cat(parts) if len(parts) != 1 else parts[0] for parts in self._hooked if parts]
        aux = state.aux_hidden_states
        if 0 in self._layer_ids and self._zero_is_ours() and isinstance(aux, (list, tuple)):
            return [self._embedding(input_ids[:rows]), *aux]
        return aux

    @torch.inference_mode()
    def _embedding(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Id 0, the embedding output [rows, H]: computed again, on every rank (the table is split over them)."""
        decoder = self._path[-1][1]
        return (
            decoder.embed_input_ids(input_ids)
            if hasattr(decoder, "embed_input_ids")
            else decoder.embed_tokens(input_ids)
        )

    def _keep_error(self, error: EyasError) -> None:
        """Leave the error where the driver finds it, also after this engine has died."""
        self._capture_error = error
        log.error("%s", error)
        file = self._fault_file
        if file is None and "EYAS_FAULT_DIR" in os.environ:
            file = Path(os.environ["EYAS_FAULT_DIR"]) / f"fault-r{self.rank:03d}.json"
        if (
            file is not None and file.parent.is_dir()
        ):  # the directory of the engine's start is the driver's host's alone
            with contextlib.suppress(OSError):  # a full disk may be the error; the log has it
                file.write_text(json.dumps({**_as_record(error)["error"], "rank": self.rank}), encoding="utf-8")

    # -- decoder-layer hooks (`--capture hooks`)

    def _install_hooks(self) -> None:
        """Catch `hidden + residual` at decoder layers of a model without the interface. Needs eager mode: compiled layers call no hooks."""
        decoder = self._path[-1][1]
        self._hooked = [[] for _ in self._layer_ids]
        stream_hooks(decoder, decoder_layers(decoder), self._layer_ids, self._catch)

    def _catch(self, layer: int, stream: torch.Tensor) -> None:
        if self._capture is not None and self._hooked is not None:
            self._hooked[self._layer_ids.index(layer)].append(stream.clone())

    # -- RPC

    def eyas_describe(self) -> dict[str, Any]:
        """What was loaded: path, depth, sizes, dtype, runner, device."""
        decoder = self._path[-1][1]
        return {
            "path": [type(module).__name__ for _, module in self._path],
            "where": self._path[-1][0],
            "num_layers": len(decoder_layers(decoder)),
            "hidden_size": self.model_config.get_hidden_size(),
            "dtype": dtype_name(self.model_config.dtype),
            "runner": "V2" if hasattr(self.model_runner, "req_states") else "V1",
            "device": current_platform.get_device_name() or "cpu",
            "compile_mode": str(getattr(self.compilation_config.mode, "name", self.compilation_config.mode)),
            "cudagraph_mode": str(getattr(self.compilation_config.cudagraph_mode, "name", None)),
            "rank": self.rank,
        }

    def eyas_open(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Begin a capture. `settings`: `folder`, `spec` (of StoreSpec), `name`, `shard_bytes`, `buffers`, `trace_steps`. Returns {} or {"error"}."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        try:
            self._capture_error = None
            folder = Path(settings["folder"])
            name = f"{settings['name']}r{self.rank:03d}"
            self._fault_file = folder / f"fault-{name}.json"
            self._fault_file.unlink(missing_ok=True)
            if not get_pp_group().is_last_rank:
                return {"rank": self.rank, "writes": False}
            tp = get_tp_group()
            spec = StoreSpec(**{**settings["spec"], "layer_ids": tuple(settings["spec"]["layer_ids"])})
            cuda = self.device is not None and torch.device(self.device).type == "cuda"
            writer = ShardWriter(
                folder,
                spec,
                name,
                shard_bytes=settings["shard_bytes"],
                buffers=settings["buffers"],
                threads=settings["threads"],
                pin=cuda,
                on_device=cuda,
            )
            self._capture = Capture(
                writer,
                rank=self.rank,
                owner=tp.rank_in_group,
                owners=tp.world_size,
                device=torch.device(self.device),
                where=self._path[-1][0],
                trace=folder / f"trace-{name}.jsonl" if settings["trace_steps"] else None,
                trace_steps=settings["trace_steps"],
            )
            writer._on_shard = self._capture.record_shard if settings["trace_steps"] else None
        except EyasError as error:
            return _as_record(error)
        return {"rank": self.rank, "writes": True}

    def eyas_close(self) -> dict[str, Any]:
        """End the capture: write what is complete, wait for the disk. Returns totals, or {"error": ...}."""
        capture, self._capture = self._capture, None
        if self._capture_error is not None:
            return _as_record(self._capture_error)
        if capture is None:
            return {"rank": self.rank, "samples": 0, "tokens": 0, "bytes": 0, "shards": 0, "dropped": 0, "steps": 0}
        try:
            return {
                "rank": self.rank,
                **capture.close(),
                "entries": capture.writer.shards,
                "rejected": capture.writer.rejected,
            }
        except EyasError as error:
            return _as_record(error)

    def eyas_witness(self, settings: dict[str, Any] | None) -> dict[str, Any]:
        """Let a `Witness` look at the next passes (`settings`: `folder`, `positions`, `layers`), or, with None, end it. Returns what its `close` does."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        if settings is None:
            witness, self._witness = self._witness, None
            return {} if witness is None else {"ids": witness.ids, **witness.close()}
        decoder, layers = self._path[-1][1], decoder_layers(self._path[-1][1])
        first, end = getattr(decoder, "start_layer", 0), getattr(decoder, "end_layer", len(layers))
        near = {j for i in self._layer_ids for j in (i - 1, i, i + 1)}
        tp = get_tp_group()
        self._witness = Witness(
            self.model_runner.get_model(),
            decoder,
            layers,
            ids=sorted(i for i in near if first <= i < end or i == end == len(layers)) if settings["layers"] else [],
            positions=settings["positions"],
            file=Path(settings["folder"]) / f"witness-{settings['layers']:d}-r{self.rank:03d}.safetensors",
            owner=tp.rank_in_group,
            owners=tp.world_size,
            logits=get_pp_group().is_last_rank,
        )
        return {}

    def shutdown(self) -> None:
        """Also on a signal: finish the open shard, so that a stopped run loses nothing that was complete."""
        if self._capture is not None:
            record = self.eyas_close()
            log.info("capture closed at shutdown: %s", {k: v for k, v in record.items() if k != "entries"})
        end_without_collecting()
        super().shutdown()


def _as_record(error: EyasError) -> dict[str, Any]:
    return {"error": {"class": type(error).__name__, "what": error.what, "remedy": error.remedy}}


def _computed(scheduled: Any) -> dict[str, int]:
    """Request -> how many of its tokens were computed before this step."""
    cached = scheduled.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return before | {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
