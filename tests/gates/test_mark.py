"""What counts as verified: a whole mark with `passed`, and nothing else."""

import json
from types import SimpleNamespace

import pytest

from eyas.base.errors import StoreError
from eyas.gates.mark import read_mark
from eyas.training.inputs import validate_store

OLD = {"passed": True, "time": "2026-01-02T03:04:05Z", "samples": 8, "recomputed": {"passed": True}, "problems": []}


@pytest.mark.parametrize(
    "verified",
    [
        None,
        {},
        True,
        "passed",
        [],
        {"passed": True},
        {"time": OLD["time"]},
        {"passed": 1, "time": OLD["time"]},
        {"ok": True},
    ],
)
def test_what_is_no_mark_is_not_verified_and_train_refuses_it(verified, tmp_path):
    manifest = {"parity": {"passed": True}, "verified": verified}
    assert read_mark(manifest) is None
    states = SimpleNamespace(manifest=json.loads(json.dumps(manifest)), path=tmp_path)
    with pytest.raises(StoreError, match="has not passed `eyas verify`"):
        validate_store(states, None, None, allow_unverified=False)


def test_marks_of_earlier_versions_are_read_for_what_they_proved():
    mark = read_mark({"parity": {"passed": True}, "verified": OLD})
    assert (mark.passed, mark.bytes, mark.parity, mark.recomputed) == (True, True, True, True)
    mark = read_mark({"parity": {"passed": True}, "verified": {**OLD, "recomputed": None}})
    assert (mark.passed, mark.recomputed) == (True, False)
    mark = read_mark({"parity": None, "verified": {**OLD, "passed": False, "problems": ["no parity"]}})
    assert (mark.passed, mark.bytes, mark.parity) == (False, False, False)
    assert "FAILED" in mark.text
    assert "no parity" in mark.text


def test_a_mark_that_names_problems_has_not_passed():
    assert not read_mark({"verified": {**OLD, "problems": ["one shard is cut short"]}}).passed
