import pytest

from eyas.errors import InputError
from eyas.layers import default_aux_layers, describe_layer, resolve_layer_ids


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
