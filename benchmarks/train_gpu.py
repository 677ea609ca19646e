"""Draft training on one GPU: eyas against speculators' own model and loss, same weights, same batch, same GPU, same run.

    python benchmarks/train_gpu.py [--budget 280] [--steps 7 3] [--json OUT.json]

Shape: a Qwen3-8B draft (H 4096, MLP 12288, 32 heads, 8 KV heads, D 32000), 8192 tokens packed as 8 x 1024, AdamW, frozen head, bf16
compute over fp32 masters, clip 1.0. One optimizer step = target logits, K training-time-test steps, loss, backward, clip, AdamW.

Each measurement runs in a process of its own (memory is its own peak; a crash is reported, the others still run). The first forward
pass's losses, step by step, and its gradients are compared between the two. speculators 0.9.0 must be importable; without it only
eyas's figures are printed. `--tiny` runs the same comparison on a CPU with small shapes, as a check of the script and of the losses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

SHAPES = {
    "qwen3-8b": {
        "H": 4096,
        "mlp": 12288,
        "heads": 32,
        "kv": 8,
        "head_dim": 128,
        "V": 151936,
        "D": 32000,
        "n": 8,
        "T": 1024,
    },
    "tiny": {"H": 64, "mlp": 96, "heads": 4, "kv": 2, "head_dim": 16, "V": 300, "D": 128, "n": 4, "T": 64},
}
COMPARED = (
    "fc.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.mlp.down_proj.weight",
)


def make_tensor(name: str, shape, std: float, device, dtype):
    """The same numbers for the same name in every process."""
    import torch

    generator = torch.Generator(device=device).manual_seed(sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31)
    return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).mul_(std).to(dtype)


def draft_tensors(shape: dict, device) -> dict:
    """Weights under the names both implementations use."""
    import torch

    H, mlp, D = shape["H"], shape["mlp"], shape["D"]
    q, kv = shape["heads"] * shape["head_dim"], shape["kv"] * shape["head_dim"]
    sizes = {
        "fc.weight": (H, 3 * H),
        "layers.0.self_attn.q_proj.weight": (q, 2 * H),
        "layers.0.self_attn.k_proj.weight": (kv, 2 * H),
        "layers.0.self_attn.v_proj.weight": (kv, 2 * H),
        "layers.0.self_attn.o_proj.weight": (H, q),
        "layers.0.mlp.gate_proj.weight": (mlp, H),
        "layers.0.mlp.up_proj.weight": (mlp, H),
        "layers.0.mlp.down_proj.weight": (H, mlp),
        "lm_head.weight": (D, H),
    }
    weights = {n: make_tensor(n, s, s[1] ** -0.5, device, torch.float32) for n, s in sizes.items()}
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"layers.0.{norm}.weight"] = torch.ones(H, device=device)
    weights["norm.weight"] = torch.ones(H, device=device)
    return weights


def target_tensors(shape: dict, device, dtype) -> dict:
    H, n, T = shape["H"], shape["n"], shape["T"]
    import torch

    generator = torch.Generator().manual_seed(5)
    mask = torch.ones(n, T, dtype=torch.uint8)
    mask[:, :16] = 0  # a prompt; also keeps the peer's steps from running over into the next sample
    return {
        "ids": torch.randint(0, shape["V"], (n, T), generator=generator),
        "mask": mask,
        "aux": make_tensor("aux", (n * T, 3 * H), 1.0, device, dtype),
        "final": make_tensor("final", (n * T, H), 1.0, device, dtype),
        "embedding": make_tensor("embedding", (shape["V"], H), 0.05, device, dtype),
        "head": make_tensor("head", (shape["D"], H), 3.0 * H**-0.5, device, dtype),
    }


def timed(step, rounds: int, tokens: int, device, warm_up: int) -> dict:
    """Median seconds per optimizer step, after warming up (which compiles)."""
    import torch

    began = time.perf_counter()
    for _ in range(warm_up):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    warm = time.perf_counter() - began
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "tokens_per_second": tokens / statistics.median(seconds),
        "warm_up_seconds": warm,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None,
    }


def run_eyas(shape: dict, K: int, rounds: int, device: str, compiled: bool) -> dict:
    import torch

    from eyas.drafts.eagle3.model import Draft, DraftConfig
    from eyas.drafts.packing import pack
    from eyas.target.teacher import TargetParts, Teacher

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = DraftConfig(
        hidden_size=shape["H"],
        intermediate_size=shape["mlp"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=shape["head_dim"],
        vocab_size=shape["V"],
        draft_vocab_size=shape["D"],
        aux_layer_ids=(2, 18, 33),
        target_layers=36,
        rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 10000.0},
    )
    target = target_tensors(shape, device, dtype)
    with torch.device(device):
        draft = Draft(config)
    draft = draft.to(device)
    draft.load_state_dict(draft_tensors(shape, device), strict=False)
    draft.embed_tokens.weight = torch.nn.Parameter(target["embedding"], requires_grad=False)
    draft.lm_head.weight.requires_grad_(False)
    draft.compute_dtype, draft.compiled = dtype, compiled
    draft.check_filled()
    parts = TargetParts(target["embedding"], torch.ones(shape["H"]), None, "rms", 1e-6, target["head"])
    teacher = Teacher(parts, torch.arange(shape["D"]), device, dtype)
    n, T = shape["n"], shape["T"]
    batch = pack(
        list(target["ids"].numpy()),
        list(target["mask"].numpy()),
        list(target["aux"].cpu().split(T)),
        list(target["final"].cpu().split(T)),
        K,
        skip_prompts=False,  # every row computes, as in the peer
    ).to(device)
    counts = torch.tensor([float(t.count) for t in batch.targets], device=device)
    trained = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda")

    def forward():
        return draft(batch, teacher.logits(batch.final[batch.rows]), counts)

    out = forward()
    out.loss.backward()
    named = dict(draft.named_parameters())
    gradients = {name: named[name].grad[:256, :256].float().cpu() for name in COMPARED}
    losses = (out.losses / counts).tolist()
    optimizer.zero_grad(set_to_none=True)

    def step():
        forward().loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {"losses": losses, "gradients": gradients, **timed(step, rounds, n * T, device, 3)}


def run_speculators(shape: dict, K: int, rounds: int, device: str, loss: str) -> dict:
    import torch
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from transformers import LlamaConfig

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = LlamaConfig(
        hidden_size=shape["H"],
        intermediate_size=shape["mlp"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=shape["head_dim"],
        num_hidden_layers=1,
        vocab_size=shape["V"],
        rms_norm_eps=1e-6,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    layer._attn_implementation = "simple_flex_attention" if device == "cuda" else "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape["D"],
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=[2, 18, 33],
    )
    target = target_tensors(shape, device, dtype)
    model = Eagle3DraftModel(config).to(device)
    weights = {
        **draft_tensors(shape, device),
        "embed_tokens.weight": target["embedding"].float(),
        "verifier_lm_head.weight": target["head"].float(),
        "verifier_norm.weight": torch.ones(shape["H"], device=device),
    }
    missing, unknown = model.load_state_dict(weights, strict=False)
    left = [m for m in missing if m not in ("d2t", "t2d")]
    if left or unknown:
        raise RuntimeError(f"weights do not fit the peer: missing {left}, unknown {unknown}")
    model.lm_head.weight.requires_grad_(False)
    model.train()
    n, T = shape["n"], shape["T"]

    # Their alignment: row i holds (token i+1, aux i, final i+1), T-1 rows a sample; the row's tail is padding, document -1.
    def rows(x, drop_first: bool):
        x = x.view(n, T, -1)
        x = (x[:, 1:] if drop_first else x[:, :-1]).reshape(n * (T - 1), -1)
        return torch.cat([x, x.new_zeros(n, x.shape[1])]).unsqueeze(0)

    supervised = torch.zeros(n, T - 1)
    supervised[:, : T - 2] = target["mask"][:, 2:]  # row i learns token i + 2
    inputs = {
        "hidden_states": rows(target["aux"], False),
        "verifier_last_hidden_states": rows(target["final"], True),
        "input_ids": rows(target["ids"].reshape(n * T, 1).to(device), True).squeeze(-1),
        "document_ids": torch.cat([torch.arange(n).repeat_interleave(T - 1), torch.full((n,), -1)])
        .unsqueeze(0)
        .to(device),
        "position_ids": torch.cat([torch.arange(1, T).repeat(n), torch.zeros(n, dtype=torch.long)])
        .unsqueeze(0)
        .to(device),
        "loss_mask": torch.cat([supervised.flatten(), torch.zeros(n)]).bool().unsqueeze(0).to(device),
    }
    loss_config = resolve_loss_config("kl_div", loss)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda")

    def forward():
        with torch.autocast(device, dtype=dtype, enabled=device == "cuda"):
            _, total, metrics = model(**inputs, ttt_steps=K, ttt_step_loss_decay=1.0, loss_config=loss_config)
        return total, metrics

    total, metrics = forward()
    total.backward()
    named = dict(model.named_parameters())
    gradients = {name: named[name].grad[:256, :256].float().cpu() for name in COMPARED}
    losses = [float(metrics[f"loss_{k}_sum"]) for k in range(K)]
    optimizer.zero_grad(set_to_none=True)

    def step():
        forward()[0].backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {"losses": losses, "gradients": gradients, **timed(step, rounds, n * T, device, 3)}


def child(arguments: argparse.Namespace) -> None:
    """One measurement, its result into a file."""
    import torch

    torch.manual_seed(0)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    shape, K = SHAPES[arguments.shape], arguments.steps[0]
    if arguments.role.startswith("eyas"):
        result = run_eyas(shape, K, arguments.rounds, arguments.device, compiled=arguments.role == "eyas")
    else:
        result = run_speculators(
            shape, K, arguments.rounds, arguments.device, arguments.role.removeprefix("speculators-")
        )
    torch.save(result, arguments.out)


def spawn(role: str, K: int, arguments: argparse.Namespace, folder: Path, seconds: float) -> dict | None:
    """Run a child; None (with its last lines printed) when it failed or ran out of time."""
    import torch

    out = folder / f"{role}-{K}.pt"
    command = [
        sys.executable,
        __file__,
        "--role",
        role,
        "--steps",
        str(K),
        "--shape",
        arguments.shape,
        "--out",
        str(out),
    ]
    command += ["--device", arguments.device, "--rounds", str(arguments.rounds)]
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 5), check=False)
        tail = done.stderr[-1500:]
    except subprocess.TimeoutExpired:
        tail = f"no result within {seconds:.0f} s"
    if not out.exists():
        print(f"{role}, K {K}: failed after {time.monotonic() - began:.0f} s\n{tail}", flush=True)
        return None
    result = torch.load(out, weights_only=False)
    memory = f"{result['memory_gb']:.1f} GB" if result["memory_gb"] else "-"
    print(
        f"{role:<20} K {K}  {result['tokens_per_second']:>10,.0f} tok/s  {1000 * result['seconds']:>8.1f} ms  {memory:>9}  "
        f"(warm-up {result['warm_up_seconds']:.0f} s, process {time.monotonic() - began:.0f} s)",
        flush=True,
    )
    return result


def compare(ours: dict, theirs: dict) -> dict:
    """Losses side by side, and how far the gradients' corners lie apart (relative L2, cosine)."""
    import torch

    lines = [abs(a - b) / b for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
    print("  loss by step, eyas:        " + "  ".join(f"{x:.5f}" for x in ours["losses"]))
    print("  loss by step, speculators: " + "  ".join(f"{x:.5f}" for x in theirs["losses"]))
    gradients = {}
    for name, a in ours["gradients"].items():
        b = theirs["gradients"][name]
        gradients[name] = float((a - b).norm() / b.norm())
        cosine = float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))
        print(f"  gradient of {name}: relative difference {gradients[name]:.2e}, cosine {cosine:.5f}")
    return {"loss_relative_difference": lines, "gradient_relative_difference": gradients}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--budget", type=float, default=280, help="seconds for everything; later measurements are skipped"
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[7, 3])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small shapes, on the CPU when there is no GPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=["eyas", "speculators"], help="skip the other")
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        child(arguments)
        return
    import torch

    arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.tiny or arguments.device == "cpu":
        arguments.shape = "tiny"
    hardware = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(
        f"{hardware}, torch {torch.__version__}, python {sys.version.split()[0]}, shape {SHAPES[arguments.shape]}",
        flush=True,
    )
    end = time.monotonic() + arguments.budget
    results: dict = {"hardware": hardware, "torch": torch.__version__, "shape": arguments.shape, "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(folder) / "inductor"))
        for K in arguments.steps:
            found: dict[str, dict] = {}
            roles = [["eyas", "eyas-plain"], ["speculators-eager"]]
            for names in roles:
                if arguments.only and not names[0].startswith(arguments.only):
                    continue
                for role in names:  # the second is the fallback when the first does not run
                    left = end - time.monotonic()
                    result = spawn(role, K, arguments, Path(folder), left) if left > 15 else None
                    if result is not None:
                        found[role.split("-")[0]] = result
                        break
            for role, result in found.items():
                results["runs"][f"{role}-{K}"] = {k: v for k, v in result.items() if k != "gradients"}
            if len(found) == 2:
                ratio = found["eyas"]["tokens_per_second"] / found["speculators"]["tokens_per_second"]
                results["runs"][f"compared-{K}"] = {
                    "speed_ratio": ratio,
                    **compare(found["eyas"], found["speculators"]),
                }
                print(f"  eyas / speculators at K {K}: {ratio:.2f} times the tokens/s", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
