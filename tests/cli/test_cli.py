"""The command line as a user meets it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import get_type_hints

import pytest
from eyas_process import eyas_environment, run_eyas

from eyas.base.errors import FolderConflictError, InputError, PreflightError
from eyas.cli import command
from eyas.cli.main import COMMANDS, main
from eyas.extraction.settings import ExtractSettings


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


def test_every_public_name_resolves_and_stages_have_real_signatures():
    import eyas

    for name in eyas.__all__:
        assert getattr(eyas, name), name
    assert eyas.__version__ == version("eyas")
    stages = ["prepare", "regenerate", "extract", "rehearse", "verify", "train", "evaluate", "export", "import_draft"]
    for name in stages:
        parameters = inspect.signature(getattr(eyas, name)).parameters
        assert len(parameters) > 3, name
        assert not {one.kind for one in parameters.values()} & {
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        }


def given(*arguments: str):
    """The settings that a command line of `eyas extract` makes."""
    function = command.load(COMMANDS["extract"][0])
    inputs = command.inputs_of(function)
    app = command.app_of({"extract": ""}, {})
    command.add(app, ["extract"], "", inputs)
    found = command.parse(
        app, ["extract", "--model-path", "m", "--prepared-data", __file__, "--output-dir", "o", *arguments]
    )
    return command.arguments_of(get_type_hints(function), inputs, found)["settings"]


@pytest.mark.parametrize(
    "typed",
    [
        "--layer-ids 2 30 final",
        "--layer-ids 2,30,final",
        "--layer-ids 2 --layer-ids 30,final",
        "--layer-ids=2,30 final",
    ],
)
def test_several_layer_ids_after_one_flag(typed):
    assert given(*typed.split(), "--tp-size", "8", "--engine", "vllm").layer_ids == (2, 30, "final")


def test_what_is_not_typed_is_the_settings_own_default():
    made = ExtractSettings(model_path="m", prepared_data=__file__, output_dir="o")
    assert given() == made
    assert given("--no-final", "--shard-size", "2.5") == replace(made, final=False, shard_size=2.5)


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
        (("--engine", "jax"), 2, 'Invalid value "jax" for --engine. Choose from: "transformers", "vllm"'),
        (("--layer-ids",), 2, "--layer-ids requires at least 1 element"),
        (("--layer-ids", "x"), InputError.exit_code, "each a whole number or final"),
        (("--shard", "0/2"), 2, "--shard"),
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
def test_values_out_of_range_are_refused_at_once(command, flag, value, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)  # where the files named below are
    with pytest.raises(SystemExit) as ended:
        main([*command.replace(" x", " test_cli.py").split(), flag, value])
    assert ended.value.code == InputError.exit_code
    assert f"error: {flag} is {value}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("extrakt", 'Unknown command "extrakt". Did you mean "extract"?'),
        ("runs lst", 'Did you mean "list"?'),
        ("verify", "STORE is required"),
        ("verify x --recompute two", 'unable to convert "two" into int'),
        ("train --states x --model-path m", "--output-dir is required"),
        ("train --states x --model-path m --outptu-dir x", "unknown: --outptu-dir"),
        ("prepare --data x --model-path m --output-dir x --heldout 0.1", "--heldout"),
        ("eval --draft x --model-path", "--model-path requires a value"),
    ],
)
def test_a_mistyped_command_ends_with_2_and_makes_no_run(typed, says, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("EYAS_STATE_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(typed.split())
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("typed", "flag"),
    [
        ("extract --model-path smollm2 --prepared-data /nowhere --output-dir o", "--prepared-data"),
        ("train --states /nowhere --model-path smollm2 --output-dir o", "--states"),
        ("eval --draft /nowhere --model-path smollm2", "--draft"),
        ("export --draft /nowhere --output-dir o", "--draft"),
        ("verify /nowhere", "STORE"),
        ("inspect /nowhere", "DIRECTORY"),
    ],
)
def test_a_missing_file_is_named_before_anything_heavy_is_imported(typed, flag):
    script = f"""import sys
from eyas.cli.main import main
try:
    main({typed.split()!r})
except SystemExit as end:
    print(end.code, *sorted({{'torch', 'transformers', 'vllm', 'pyarrow'}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=eyas_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [str(InputError.exit_code)]
    assert f"error: {flag} /nowhere: no such file or directory" in done.stderr


def test_help_fits_80_columns_and_cuts_no_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name, (where, text) in COMMANDS.items():
        with pytest.raises(SystemExit) as ended:
            main([*name.split(), "--help"])
        shown = capsys.readouterr().out
        assert ended.value.code == 0
        assert max(map(len, shown.splitlines())) <= 80, name
        assert " ".join(text.split()) in " ".join(shown.split())
        for one in command.inputs_of(command.load(where)):
            if not one.setting.metadata.hidden:
                assert f"{one.setting.flag} " in shown.replace("\n", " \n").replace(",", " "), (name, one.setting.flag)
                assert one.help, f"{name} {one.setting.flag} has no help"


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
