"""`--config run.yaml`: flags from a file, what is typed wins."""

from __future__ import annotations

import pytest
from eyas_process import run_eyas

from eyas.base.errors import InputError
from eyas.cli.config_file import expand_config


@pytest.fixture
def config(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_flags_come_from_the_file_and_typed_ones_win(config):
    path = config("model_path: m\nlayer-ids: [2, final]\ntp_size: 8\nfinal: false\nrevision: null\n")
    assert expand_config(["extract", "--config", path, "--tp-size", "4"]) == [
        "extract", "--model-path", "m", "--layer-ids", "2", "--layer-ids", "final", "--no-final", "--tp-size", "4",
    ]  # fmt: skip
    assert expand_config(["extract", "--layer-ids", "3", "--final", "--config", path]) == [
        "extract", "--layer-ids", "3", "--final", "--model-path", "m", "--tp-size", "8",
    ]  # fmt: skip
    assert expand_config(["verify", "store"]) == ["verify", "store"]
    assert expand_config(["extract", f"--config={path}", "--tp-size", "4"]) == expand_config(
        ["extract", "--config", path, "--tp-size", "4"]
    )
    with pytest.raises(InputError, match="stands twice"):
        expand_config(["extract", "--config", path, f"--config={path}"])


@pytest.mark.parametrize(
    ("text", "says"),
    [("- a\n- b\n", "should map flags to values"), ("a: [", "is not YAML"), ("batch: {a: 1}", "which no flag takes")],
)
def test_files_that_are_no_config(config, text, says):
    with pytest.raises(InputError, match=says):
        expand_config(["extract", "--config", config(text)])
    with pytest.raises(InputError, match="No such file"):
        expand_config(["extract", "--config", "/nowhere.yaml"])
    with pytest.raises(InputError, match="names no file"):
        expand_config(["extract", "--config"])


def test_a_whole_run_and_an_unknown_flag(config, tiny_model, token_rows, tmp_path):
    text = f"model_path: {tiny_model('llama')}\nprepared_data: {token_rows([9, 30])}\noutput_dir: {tmp_path / 's'}\nlayer_ids: [2]\n"
    done = run_eyas("extract", "--config", config(text))
    assert done.returncode == 0, done.stderr
    assert "2 of 2" in done.stdout
    done = run_eyas("extract", "--config", config(text + "layer_idz: [3]\n"))
    assert done.returncode == 3
    assert "run.yaml: `layer_idz` is no flag of `eyas extract`" in " ".join(done.stderr.split())
    done = run_eyas("extract", "--config", config(text + "enforce_eager: false\nfinal: false\n"))
    assert done.returncode == 8, "the same folder, now without the target state: both falses were understood"
