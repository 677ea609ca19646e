"""The command line as a user meets it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from eyas_process import eyas_environment, run_eyas

from eyas.base.errors import FolderConflictError, InputError, PreflightError
from eyas.cli.main import spread_lists


def loaded_modules(statement: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{statement}\nprint(*sys.modules)"],
        env=eyas_environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(done.stdout.split())


def test_import_and_help_load_nothing_heavy():
    heavy = {"torch", "transformers", "numpy", "pyarrow", "pydantic", "vllm", "accelerate", "datasets"}
    assert not heavy & loaded_modules("import eyas")
    assert not heavy & loaded_modules("import eyas.cli.main")


def test_every_public_name_resolves_to_a_function():
    import eyas

    for name in eyas.__all__:
        assert callable(getattr(eyas, name)), name


def test_several_layer_ids_after_one_flag():
    assert spread_lists(["extract", "--layer-ids", "2", "30", "final", "--tp-size", "8"]) == [
        "extract",
        "--layer-ids",
        "2",
        "--layer-ids",
        "30",
        "--layer-ids",
        "final",
        "--tp-size",
        "8",
    ]
    assert spread_lists(["--layer-ids", "2", "--layer-ids", "3"]) == ["--layer-ids", "2", "--layer-ids", "3"]
    assert spread_lists(["verify", "x"]) == ["verify", "x"]
    assert spread_lists(["extract", "--layer-ids"]) == ["extract", "--layer-ids"]


def test_errors_have_their_own_exit_codes_and_no_traceback(tiny_model, token_rows, tmp_path):
    model, data = tiny_model("llama"), token_rows([9, 30])

    def extract(*more: str):
        return run_eyas(
            "extract", "--model-path", model, "--prepared-data", data, "--output-dir", tmp_path / "s", *more
        )

    for more, code, says in [
        (("--layer-ids", "2", "99"), InputError.exit_code, "layer id 99 is out of range"),
        (("--layer-ids", "2", "2"), InputError.exit_code, "given twice"),
        (("--layer-ids", "2", "--max-seq-len", "5"), PreflightError.exit_code, "longer than 5"),
        (("--layer-ids", "2", "--shard-size", "0"), InputError.exit_code, "--shard-size is 0"),
        (("--layer-ids", "2", "--tp-size", "2"), InputError.exit_code, "--tp-size 2 is for engine vllm"),
        (("--layer-ids", "2", "--expert-parallel"), InputError.exit_code, "--expert-parallel is for engine vllm"),
        (("--layer-ids", "2", "--capture", "hooks"), InputError.exit_code, "engine transformers has no use for it"),
        (("--layer-ids", "2", "--rehearsal", "always"), InputError.exit_code, "nothing to rehearse"),
        (
            ("--engine", "vllm", "--device", "cuda:1"),
            InputError.exit_code,
            "--device cuda:1 is for engine transformers",
        ),
        (("--engine", "jax"), InputError.exit_code, "--engine is 'jax'"),
        (("--layer-ids",), 2, "requires an argument"),
        (("--layer-ids", "2", "--dtype", "int4"), 2, "int4"),
        (("--layer-ids", "2"), 0, ""),
        (
            ("--layer-ids", "1"),
            FolderConflictError.exit_code,
            "layer_ids: the directory has [2, 4], this run wants [1, 4]",
        ),
    ]:
        done = extract(*more)
        assert done.returncode == code, (more, done.stderr)
        assert says in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("prepare --data x --model-path x --output-dir x", "--workers", "0"),
        ("prepare --data x --model-path x --output-dir x", "--limit", "-1"),
        ("regenerate --data x --model-path x --output-dir x", "--limit", "-1"),
        ("regenerate --data x --model-path x --output-dir x", "--temperature", "-1"),
        ("regenerate --data x --model-path x --output-dir x", "--max-new-tokens", "0"),
        ("regenerate --data x --model-path x --output-dir x", "--batch-size", "0"),
        ("eval --draft x --model-path x", "--chain", "0"),
        ("eval --draft x --model-path x", "--limit", "0"),
        ("verify x", "--recompute", "-1"),
        ("inspect x", "--samples", "-1"),
        ("inspect x", "--tokens-per-second", "0"),
        ("runs list", "--limit", "-1"),
    ],
)
def test_values_out_of_range_are_refused_at_once(command, flag, value):
    from typer.testing import CliRunner

    from eyas.cli.main import app

    done = CliRunner().invoke(app, [*command.split(), flag, value], env={"NO_COLOR": "1", "COLUMNS": "200"})
    assert done.exit_code == 2
    assert f"Invalid value for '{flag}'" in done.output


@pytest.mark.parametrize("command", ["extract", "verify", "inspect", "prepare", "demo"])
def test_every_command_has_help(command):
    done = run_eyas(command, "--help")
    assert done.returncode == 0
    assert "Usage: eyas" in done.stdout


def test_inspect_shows_layers_norms_and_a_sample(tiny_model, token_rows, tmp_path):
    run_eyas(
        "extract",
        "--model-path",
        tiny_model("llama"),
        "--prepared-data",
        token_rows([9, 30]),
        "--output-dir",
        tmp_path / "s",
        "--layer-ids",
        "2",
    )
    done = run_eyas("inspect", tmp_path / "s", "--sample", "1")
    assert done.returncode == 0, done.stderr
    for words in ("2, 4 (final)", "mean norm", "30 tokens, 20 supervised", "not yet: `eyas verify`"):
        assert words in done.stdout
    for wrong in (("--sample", "7"), ("--sample", "-1"), ("--html", tmp_path / "x.html")):
        done = run_eyas("inspect", tmp_path / "s", *wrong)
        assert done.returncode == InputError.exit_code, wrong
        assert wrong[0] in done.stderr
    done = run_eyas("inspect", tmp_path)
    assert "has no manifest.json" in done.stderr
