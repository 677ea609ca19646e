import pytest
from sglang_rules import sglang_captures

from eyas.base.errors import InputError
from eyas.target.layers import default_aux_layers, describe_layer, from_sglang, resolve_layer_ids, to_sglang


def test_a_numbering_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="'outputs' is not known"):
        resolve_layer_ids([2], 6, index="outputs")  # type: ignore[arg-type]


def test_default_is_second_middle_and_third_last():
    assert default_aux_layers(61) == [2, 30, 58]
    assert resolve_layer_ids(None, 61) == [2, 30, 58, 61]


def test_order_is_kept_and_final_is_last_unless_named():
    assert resolve_layer_ids(["58", "2"], 61) == [58, 2, 61]
    assert resolve_layer_ids(["final", "2"], 61) == [61, 2]
    assert resolve_layer_ids([0, 4], 4) == [0, 4]
    assert resolve_layer_ids([2], 4, with_final=False) == [2]


def test_output_numbering_is_translated_at_the_edge():
    assert resolve_layer_ids([1, 29, 57, 60], 61, index="output") == [2, 30, 58, 61]


@pytest.mark.parametrize(
    ("ids", "index", "says"),
    [
        ([2, 2], "stream", "layer id 2 is given twice"),  # F17
        (["final", 4], "stream", "`final` is that id"),
        ([5], "stream", "go from 0 to 4"),
        ([-1], "stream", "out of range"),
        ([4], "output", "go from 0 to 3"),
        ([-1], "output", "out of range"),
        ([5], "stream", "use --layer-index output if"),
        ([4], "output", r"output of 0-based layer j \(3 = final\)$"),
        (["two"], "stream", "not a number"),
    ],
)
def test_bad_ids_are_refused(ids, index, says):
    with pytest.raises(InputError, match=says):
        resolve_layer_ids(ids, 4, index=index)


def test_too_shallow_for_the_default():
    with pytest.raises(InputError, match="--layer-ids"):
        default_aux_layers(4)


def test_names():
    assert [describe_layer(i, 4) for i in (0, 2, 4)] == ["0 (embeddings)", "2", "4 (final)"]


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        "Qwen3MoeForCausalLM",
        "GptOssForCausalLM",
        "DeepseekV3ForCausalLM",
        "KimiK25ForConditionalGeneration",
    ],
)
@pytest.mark.parametrize("ids", [[2, 30, 58], [1, 30, 60], [3, 4, 5], [58, 2, 30], [1, 2], [2], [7], [59, 1, 60]])
def test_sglang_captures_the_layers_that_feed_the_draft(architecture, ids):
    named = to_sglang(ids, architecture, 61)
    assert sglang_captures(named, architecture, 61) == sorted(ids)
    assert from_sglang(named, architecture) == sorted(ids)


def test_what_sglang_cannot_capture_is_refused():
    for ids in ([0, 2], [2, 61]):
        with pytest.raises(InputError, match="captures neither the embeddings"):
            to_sglang(ids, "LlamaForCausalLM", 61)
    assert to_sglang([1], "LlamaForCausalLM", 61) == [0]
    with pytest.raises(InputError, match="layer 1 alone"):
        to_sglang([1], "DeepseekV3ForCausalLM", 61)
