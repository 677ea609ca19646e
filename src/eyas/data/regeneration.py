"""`eyas regenerate`: the target itself answers the prompts of chat data; its answers, as tokens, become the dataset.

    eyas regenerate --data word_problems --model-path smollm2 --output-dir out/answers --max-new-tokens 200

A draft learns what the target says, so data that the target wrote teach it more than data that others wrote. Every answer keeps the
token ids that were generated: nothing is tokenised again from text. The prompt of each turn is what serving would send (the template's
generation prompt, with the thinking mode of --chat-template-kwargs), and later turns see the answers generated before.

Each finished conversation is one line of `answers.jsonl`; the same command goes on where it stopped. When all are answered, the
dataset is written. Two turns share one sample where the second prompt continues the first one's tokens exactly, and are two samples
where it does not (a template that removes thinking, or text that tokenises otherwise than it was generated).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from eyas.base.errors import FolderConflictError, InputError
from eyas.base.files import write_json
from eyas.base.locks import only_writer
from eyas.base.manifest import MANIFEST, differing_fields
from eyas.data.chat_template import ChatTemplate, MaskError
from eyas.data.conversations import Conversation, RowError, check_columns, parse_row
from eyas.data.dataset import REGENERATION, DatasetWriter, Sample
from eyas.data.generators import Answer, Generator
from eyas.data.preparation import REJECTED, describe_source, sources_of
from eyas.data.rows import is_heldout, split_key
from eyas.data.settings import MaskSettings, RegenerateSettings
from eyas.data.sources import RawRow, Unreadable, read_rows
from eyas.target.tokenizer import (
    describe_shape,
    describe_tokenizer,
    embedding_rows,
    load_tokenizer,
    stop_ids,
    unknown_token,
)

log = logging.getLogger(__name__)

ANSWERS, CONVERSATIONS, RUN = "answers.jsonl", "conversations.jsonl", REGENERATION
DATASET_FILES = {MANIFEST, "data-*.parquet", ANSWERS, CONVERSATIONS, RUN, REJECTED, "heldout", ".*.tmp"}


@dataclass
class RegenerateReport:
    """Counts of one run; `finish_reasons` counts answers. `resumed`: conversations that an earlier run had answered;
    `stopped_early`: conversations whose later questions no longer fitted into the length limit. `out_of_time`: there may be more to answer."""

    rows: int = 0
    conversations: int = 0
    resumed: int = 0
    repeated: int = 0
    rejected: int = 0
    broken_sources: int = 0
    stopped_early: int = 0
    out_of_time: bool = False
    answers: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    generated_tokens: int = 0
    samples: int = 0
    heldout_samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    output: str = ""


@dataclass
class Dialogue:
    """One conversation being answered: what has been said, what is still to be said, and each answer's tokens.

    Recorded tool calls are kept as they are, because their results were recorded too; every other assistant turn is generated.
    """

    key: str
    source: str
    tools: Any
    ahead: list[dict[str, Any]]
    split: str
    history: list[dict[str, Any]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None
    prompt: list[int] | None = None
    stopped_early: bool = False

    def advance(self, template: ChatTemplate, max_seq_len: int, rows: int | None) -> bool:
        """Go on to the next turn that is to be generated and set `prompt`; False when there is none."""
        self.prompt = None
        while self.problem is None:
            turn = self.ahead.pop(0) if self.ahead else None
            if turn is not None and (turn["role"] != "assistant" or turn.get("tool_calls") or not self._asked()):
                self.history.append(turn)
                continue
            if turn is None and not self._asked():
                return False
            try:
                prompt = template.prompt_ids(self.history, self.tools)
            except MaskError as error:
                self.problem = str(error)
                return False
            unfit = unknown_token(prompt, rows)
            if len(prompt) + 2 > max_seq_len:
                unfit = f"the prompt alone has {len(prompt)} tokens, more than --max-seq-len {max_seq_len} allows"
            if unfit:
                self.problem = None if self.turns else unfit
                self.stopped_early = True  # earlier turns are kept
                return False
            self.prompt = prompt
            return True
        return False

    def _asked(self) -> bool:
        return bool(self.history) and self.history[-1]["role"] in ("user", "tool")

    def accept(self, answer: Answer, template: ChatTemplate) -> None:
        """Take an answer to `prompt`; a cut answer ends the conversation."""
        if answer.finish_reason not in ("stop", "length") or not answer.token_ids:
            reason = (
                answer.finish_reason
                if answer.finish_reason.startswith("error")
                else f"no usable answer ({answer.finish_reason})"
            )
            if not self.turns:
                self.problem = reason
            self.ahead = []
            self.history.append({"role": "assistant", "content": ""})
            return
        prompt = self.prompt or []
        self.turns.append({"prompt": prompt, "answer": answer.token_ids, "finish_reason": answer.finish_reason})
        message = message_of(answer.token_ids, prompt, template)
        if answer.finish_reason == "length":
            message["finish_reason"] = "length"
            self.ahead = []
        self.history.append(message)


def message_of(answer: list[int], prompt: list[int], template: ChatTemplate) -> dict[str, Any]:
    """An answer as the message that later turns see: its text without the end of turn, the reasoning apart where it was opened.

    The text serves only to build later prompts; the answer's own tokens stay as generated.
    """
    text = template.decode_answer(answer)
    channels = re.findall(
        r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|end\|>|<\|return\|>|<\|start\|>|$)", text, re.DOTALL
    )
    if channels:  # harmony: analysis, then final
        thought = "".join(said for name, said in channels if name == "analysis")
        spoken = "".join(said for name, said in channels if name != "analysis")
        return {"role": "assistant", "content": spoken} | ({"reasoning_content": thought} if thought else {})
    closed = re.search(r"</think>|◁/think▷|\[/THINK\]", text)
    opened = template.opens_thinking(prompt)
    if closed and (opened or re.match(r"\s*(<think>|◁think▷|\[THINK\])", text)):
        thought = re.sub(r"^\s*(<think>|◁think▷|\[THINK\])", "", text[: closed.start()])
        message = {"role": "assistant", "content": text[closed.end() :].lstrip("\n")}
        return message | ({"reasoning_content": thought.strip("\n")} if thought.strip() else {})
    return {"role": "assistant", "content": text}


def samples_of(turns: Sequence[dict[str, Any]]) -> list[tuple[list[int], list[int], str]]:
    """(token ids, mask, finish reason of the last answer) of each sample; turns are joined where the tokens continue exactly."""
    samples: list[tuple[list[int], list[int], str]] = []
    for turn in turns:
        ids, mask, reason = (
            [*turn["prompt"], *turn["answer"]],
            [0] * len(turn["prompt"]) + [1] * len(turn["answer"]),
            turn["finish_reason"],
        )
        if samples and turn["prompt"][: len(samples[-1][0])] == samples[-1][0]:
            before = samples.pop()
            mask[: len(before[1])] = before[1]
        samples.append((ids, mask, reason))
    return samples


# ---------------------------------------------------------------- the stage


def regenerate(
    settings: RegenerateSettings,
    generator: Callable[[ChatTemplate, list[int]], Generator],
    *,
    progress: Callable[[RegenerateReport], None] | None = None,
) -> RegenerateReport:
    """Answer the prompts of chat data with the target itself and write the dataset.

    Args:
        generator: makes the one who answers, from the template and the tokens that end a turn (see `eyas.engines.generation`).
        progress: called with the running report after each window of conversations.

    Raises:
        InputError: unreadable source, no template, or nothing could be answered.
        EngineError: the generator failed; what was answered is kept, the same call resumes.
        FolderConflictError: the folder holds something else, or answers of another model or with other settings, or another run writes it.
    """
    check_columns(settings.columns)
    sources_of(settings)  # one that is not there is told before the tokenizer is loaded
    mask = MaskSettings(chat_template_kwargs=settings.chat_template_kwargs)
    tokenizer = load_tokenizer(settings.model_path, settings.trust_remote_code)
    template = ChatTemplate(tokenizer, mask, settings.template_text())
    rows = embedding_rows(settings.model_path, settings.trust_remote_code)
    folder = settings.output_dir
    described = {
        "source": describe_source(settings),
        "tokenizer": describe_tokenizer(template.tokenizer, template.source, settings.model_path),
        "settings": settings.content(),
    }
    with only_writer(folder, DATASET_FILES):
        done = _resume(folder, described)
        report = RegenerateReport(resumed=len(done), output=str(folder))
        started = time.monotonic()
        answerer: Generator | None = None
        rejected: dict[str, str] = {}
        try:
            dialogues = _open(template, settings, rows, set(done), report, rejected)
            with open(folder / ANSWERS, "a", encoding="utf-8") as log_file:
                for number, batch in enumerate(
                    iter(lambda: list(islice(dialogues, settings.conversations_at_once)), [])
                ):
                    if number and settings.seconds is not None and time.monotonic() - started >= settings.seconds:
                        report.out_of_time = True
                        break
                    if answerer is None:
                        answerer = generator(
                            template, sorted({*template.end_of_turn_ids(), *stop_ids(settings.model_path)})
                        )
                        write_json(folder / RUN, described | {"engine": answerer.description})
                    for one in _answered(batch, answerer, template, settings, rows, number, report):
                        if one.problem is not None:
                            rejected[one.source] = one.problem
                            report.rejected += 1
                            continue
                        line = {
                            "key": one.key,
                            "source": one.source,
                            "split": one.split,
                            "turns": one.turns,
                            "messages": one.history,
                            "tools": one.tools,
                        }
                        log_file.write(json.dumps(line, ensure_ascii=False) + "\n")
                        log_file.flush()
                        report.conversations += 1
                        report.stopped_early += one.stopped_early
                    report.seconds = time.monotonic() - started
                    if progress:
                        progress(report)
        finally:
            if answerer is not None:
                answerer.close()
        engine = json.loads((folder / RUN).read_text(encoding="utf-8")).get("engine")
        _write_rejected(folder, rejected)
        _write_dataset(folder, described, engine, report, settings)
        report.seconds = time.monotonic() - started
        return report


def _resume(folder: Path, described: dict[str, Any]) -> list[str]:
    """Keys of conversations that are answered already. Cuts a half line that a killed run left."""
    run = folder / RUN
    if run.exists():
        before = json.loads(run.read_text(encoding="utf-8"))
        described = described | {"engine": before.get("engine")}
        if differing := differing_fields(before, described):
            raise FolderConflictError(
                f"{folder} holds answers made otherwise:\n  " + "\n  ".join(differing[:8]), "name another --output-dir"
            )
    elif (folder / ANSWERS).exists() or (folder / MANIFEST).exists():
        raise FolderConflictError(f"{folder} holds a dataset of another stage", "name another --output-dir")
    write_json(run, described)
    answers = folder / ANSWERS
    keys: list[str] = []
    if answers.exists():
        whole = 0
        with open(answers, "rb") as file:
            for line in file:
                try:
                    keys.append(json.loads(line)["key"] if line.endswith(b"\n") else "")
                except (ValueError, KeyError):
                    break
                if not line.endswith(b"\n"):
                    keys.pop()
                    break
                whole += len(line)
        with open(answers, "r+b") as file:
            file.truncate(whole)
    return keys


def _open(
    template: ChatTemplate,
    settings: RegenerateSettings,
    rows: int | None,
    done: set[str],
    report: RegenerateReport,
    rejected: dict[str, str],
) -> Iterator[Dialogue]:
    """The conversations still to be answered, each with its first prompt."""
    source_rows: Iterator[RawRow] = islice(
        (row for source in sources_of(settings) for row in read_rows(source)), settings.limit
    )
    seen: set[str] = set()
    for row in source_rows:
        report.rows += 1
        report.broken_sources += isinstance(row.data, Unreadable)
        try:
            item = parse_row(row, settings.columns, need_answer=False)
            if not isinstance(item, Conversation):
                raise RowError("tokens already: there is no text to answer")
        except RowError as error:
            rejected[row.source] = str(error)
            report.rejected += 1
            continue
        asked = [m for m in item.messages if m["role"] != "assistant" or m.get("tool_calls")]
        key = hashlib.blake2b(json.dumps([asked, item.tools], sort_keys=True).encode(), digest_size=16).hexdigest()
        if key in seen:
            report.repeated += 1
            continue
        seen.add(key)
        if key in done:
            continue
        part = "heldout" if settings.held_out and is_heldout(split_key(item), settings.held_out) else "train"
        one = Dialogue(key, row.source, item.tools, list(item.messages), part)
        if one.advance(template, settings.max_seq_len, rows):
            yield one
        else:
            rejected[row.source] = one.problem or "no question to answer"
            report.rejected += 1


def _answered(
    batch: list[Dialogue],
    answerer: Generator,
    template: ChatTemplate,
    settings: RegenerateSettings,
    rows: int | None,
    number: int,
    report: RegenerateReport,
) -> list[Dialogue]:
    """Answer a window of conversations turn by turn."""
    open_ones, turn = batch, 0
    while open_ones:
        prompts = [one.prompt or [] for one in open_ones]
        limits = [min(settings.sampling.max_new_tokens, settings.max_seq_len - len(prompt)) for prompt in prompts]
        for one, answer in zip(
            open_ones, answerer.answer(prompts, limits, (number * 1000 + turn) * 100_000), strict=True
        ):
            one.accept(answer, template)
            report.answers += 1
            report.finish_reasons[answer.finish_reason.split(":")[0]] += 1
            report.generated_tokens += len(answer.token_ids)
        open_ones = [one for one in open_ones if one.advance(template, settings.max_seq_len, rows)]
        turn += 1
    return batch


def _write_rejected(folder: Path, rejected: Mapping[str, str]) -> None:
    with open(folder / REJECTED, "w", encoding="utf-8") as file:
        for source, reason in rejected.items():
            name, _, line = source.rpartition(":")
            file.write(json.dumps({"file": name, "line": int(line), "reason": reason}, ensure_ascii=False) + "\n")


def _write_dataset(
    folder: Path,
    described: dict[str, Any],
    engine: dict[str, Any] | None,
    report: RegenerateReport,
    settings: RegenerateSettings,
) -> None:
    """The dataset from `answers.jsonl`, and the conversations as text beside it (for reading; the tokens are the dataset's)."""
    (folder / MANIFEST).unlink(missing_ok=True)
    for file in folder.glob("data-*.parquet"):
        file.unlink()
    writers = {"train": DatasetWriter(folder)}
    reasons: Counter[str] = Counter()
    answers = 0
    with (
        open(folder / ANSWERS, encoding="utf-8") as lines,
        open(folder / CONVERSATIONS, "w", encoding="utf-8") as texts,
    ):
        for line in lines:
            row = json.loads(line)
            text = {"messages": row["messages"]} | ({"tools": row["tools"]} if row["tools"] else {})
            texts.write(json.dumps(text, ensure_ascii=False) + "\n")
            answers += len(row["turns"])
            reasons.update(turn["finish_reason"] for turn in row["turns"])
            for ids, mask, reason in samples_of(row["turns"]):
                writer = (
                    writers.setdefault(row["split"], DatasetWriter(folder / "heldout"))
                    if row["split"] != "train"
                    else writers["train"]
                )
                writer.add(
                    Sample.of(ids, mask),
                    source=row["source"],
                    truncated=reason == "length",
                    split=row["split"],
                    finish_reason=reason,
                )
    if not writers["train"].ids:
        raise InputError("no prompt was answered", f"the reasons are in {folder / REJECTED}")
    counts = {
        "rows": report.rows,
        "dropped": report.rejected,
        "duplicates": report.repeated,
        "answers": answers,
        "answers_unfinished": reasons["length"],
        "out_of_time": report.out_of_time,
        "finish_reasons": dict(reasons),
    }
    shape = describe_shape(settings.model_path, settings.trust_remote_code)
    for part, writer in writers.items():
        manifest = writer.close(
            source=described["source"],
            tokenizer=described["tokenizer"],
            regeneration={"settings": described["settings"], "engine": engine},
            model=shape,
            counts=counts,
            part=part if len(writers) > 1 else "all",
        )
        report.samples += manifest["samples"]
        report.tokens += manifest["tokens"]
        report.supervised_tokens += manifest["supervised_tokens"]
        report.heldout_samples += manifest["samples"] if part == "heldout" else 0
