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


FLAGS = {"--model-path", "--layer-ids", "--tp-size", "--final", "--revision", "--chat-template-kwargs"}


def test_flags_come_from_the_file_and_typed_ones_win(config):
    path = config("model_path: m\nlayer-ids: [2, final]\ntp_size: 8\nfinal: false\nrevision: null\n")
    assert expand_config(["--config", path, "--tp-size", "4"], FLAGS) == [
        "--tp-size", "4", "--model-path=m", "--layer-ids=2", "--layer-ids=final", "--final=false",
    ]  # fmt: skip
    assert expand_config(["--layer-ids", "3", "--no-final", f"--config={path}"], FLAGS) == [
        "--layer-ids", "3", "--no-final", "--model-path=m", "--tp-size=8",
    ]  # fmt: skip
    assert expand_config(["store"], FLAGS) == ["store"]
    kwargs = config("chat_template_kwargs: {enable_thinking: false}\n")
    assert expand_config(["--config", kwargs], FLAGS) == ['--chat-template-kwargs={"enable_thinking": false}']
    with pytest.raises(InputError, match="given twice"):
        expand_config(["--config", path, f"--config={path}"], FLAGS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "should map flags to values"),
        ("a: [", "is not YAML"),
        ("tp: 1\nlayers: 2\n", "no flag is called tp, layers"),
    ],
)
def test_files_that_are_no_config(config, text, says):
    with pytest.raises(InputError, match=says):
        expand_config(["--config", config(text)], FLAGS)
    with pytest.raises(InputError, match="No such file"):
        expand_config(["--config", "/nowhere.yaml"], FLAGS)
    with pytest.raises(InputError, match="names no file"):
        expand_config(["--config"], FLAGS)


def test_a_whole_run_and_an_unknown_flag(config, tiny_model, token_rows, tmp_path):
    text = f"model_path: {tiny_model('llama')}\nprepared_data: {token_rows([9, 30])}\noutput_dir: {tmp_path / 's'}\nlayer_ids: [2]\n"
    done = run_eyas("extract", "--config", config(text))
    assert done.returncode == 0, done.stderr
    assert "2 of 2" in done.stdout
    done = run_eyas("extract", "--config", config(text + "layer_idz: [3]\n"))
    assert done.returncode == 3
    assert "run.yaml: no flag is called layer-idz" in " ".join(done.stderr.split())
    done = run_eyas("extract", "--config", config(text + "enforce_eager: false\nfinal: false\n"))
    assert done.returncode == 8, "the same folder, now without the target state: both falses were understood"
