"""Prompt sets of every accepted form."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas.base.errors import InputError
from eyas.data.dataset import DatasetWriter, Sample
from eyas.data.prompts import load_prompts

WORDS = ["<unk>", "user", "assistant", "why", "how", "because", "def", "f", ":"]


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words)
    made.chat_template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
    return made


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_each_kind_of_row_becomes_the_prompt_before_an_answer(tokenizer, tmp_path):
    rows = {
        "messages": {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "because"}]},
        "question": {"messages": [{"role": "user", "content": "why"}]},
        "sharegpt": {"conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "because"}]},
        "gsm8k": {"question": "why", "answer": "because"},
        "humaneval": {"prompt": "why", "canonical_solution": "because"},
        "mtbench": {"question_id": 1, "turns": ["why", "how"]},
        "mtbench_hub": {"prompt": ["why", "how"], "reference": []},
    }
    for name, row in rows.items():
        found = load_prompts(write(tmp_path / f"{name}.jsonl", row), tokenizer)
        assert (found.name, found.prompts) == (name, [[1, 3, 2]]), name
    several = {
        "messages": [
            {"role": r, "content": c}
            for r, c in zip(["user", "assistant", "user"], ["why", "because", "how"], strict=True)
        ]
    }
    found = load_prompts("mine=" + write(tmp_path / "several.jsonl", several, several), tokenizer, limit=1)
    assert (found.name, found.prompts) == ("mine", [[1, 3, 2, 5, 1, 4, 2]])


def test_token_rows_and_packaged_sets(tokenizer, tmp_path):
    row = {"input_ids": [4, 5, 6, 7], "loss_mask": [0, 0, 1, 1]}
    assert load_prompts(write(tmp_path / "rows.jsonl", row), tokenizer).prompts == [[4, 5]]
    writer = DatasetWriter(tmp_path / "data")
    writer.add(Sample.of([3, 4, 5], [0, 1, 1]))
    writer.close()
    assert load_prompts(str(tmp_path / "data"), tokenizer).prompts == [[3]]
    packaged = load_prompts("word_problems_heldout", tokenizer, limit=3)
    assert (packaged.name, len(packaged.prompts)) == ("word_problems_heldout", 3)


def test_rows_without_a_prompt_are_named(tokenizer, tmp_path):
    with pytest.raises(InputError, match=r"bad\.jsonl:1"):
        load_prompts(write(tmp_path / "bad.jsonl", {"text": "x"}), tokenizer)
    (tmp_path / "broken.jsonl").write_text("{not json\n")
    with pytest.raises(InputError, match=r"broken\.jsonl:1: not JSON"):
        load_prompts(str(tmp_path / "broken.jsonl"), tokenizer)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match="no prompts"):
        load_prompts(str(tmp_path / "empty.jsonl"), tokenizer)


def test_names_and_places(tokenizer, tmp_path):
    import gzip

    (tmp_path / "a=b").mkdir()
    inside = write(tmp_path / "a=b" / "questions.v2.jsonl", {"question": "why"})
    assert load_prompts(inside, tokenizer).name == "questions.v2"
    assert load_prompts(f"mine={inside}", tokenizer).name == "mine"
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "def f :"}) + "\n")
    found = load_prompts(str(tmp_path / "HumanEval.jsonl.gz"), tokenizer)
    assert (found.name, found.prompts) == ("HumanEval", [[1, 6, 7, 8, 2]])
    for wrong in ("gsm8k", "mine=", "mine=gsm8k", str(tmp_path / "none.jsonl")):
        with pytest.raises(InputError, match="no such file, directory or packaged set"):
            load_prompts(wrong, tokenizer)
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(InputError, match=r"latin\.jsonl:1: not UTF-8"):
        load_prompts(str(tmp_path / "latin.jsonl"), tokenizer)


def test_a_split_of_a_data_set_is_read_by_datasets(tokenizer, tmp_path):
    """The hub's form, on a local folder of the same shape."""
    pytest.importorskip("datasets")
    folder = tmp_path / "owner" / "quiz"
    folder.mkdir(parents=True)
    write(folder / "train.jsonl", {"question": "how"})
    write(folder / "test.jsonl", {"question": "why"})
    found = load_prompts(f"hf:{folder}::test", tokenizer)
    assert (found.name, found.prompts) == ("quiz", [[1, 3, 2]])
    assert load_prompts(f"q=hf:{folder}", tokenizer).prompts == [[1, 4, 2]]
    with pytest.raises(InputError, match="no data set's name"):
        load_prompts("hf:", tokenizer)
