"""`eyas prepare`: chat data -> token dataset with loss masks, streaming.

    eyas prepare --data conversations --model-path smollm2 --output-dir out/dataset

Rows are read one by one (`conversations.py`), made tokens and masks in worker processes (`masks.py`), and written as they come, in the
order of the input. Nothing is lost silently: every row that was not used stands in `rejected.jsonl` with file, line and reason, and the
report counts what was cut.

Trade-off: exact duplicates are found by a set of 16-byte sample ids, the one thing in memory that grows with the number of rows (about
100 bytes a row); two spellings of one conversation are two samples.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from eyas.base.errors import EyasError, FolderConflictError, InputError
from eyas.base.files import translate_disk_full, write_json
from eyas.base.locks import only_writer
from eyas.base.manifest import MANIFEST, differing_fields, read_manifest
from eyas.base.settings import takes
from eyas.data import progress as checkpoint
from eyas.data.conversations import check_columns
from eyas.data.dataset import PROGRESS, DatasetWriter, Sample
from eyas.data.rows import Piece, RowMaker, RowResult, is_heldout
from eyas.data.settings import PrepareSettings, SourceSettings
from eyas.data.sources import DataSource, RawRow, files_of, read_rows
from eyas.target.tokenizer import describe_shape, describe_tokenizer

log = logging.getLogger(__name__)

#: The sets written for this project that ship inside the package.
PACKAGED = ("conversations", "word_problems", "word_problems_heldout")
REJECTED, REPORT, HELDOUT = "rejected.jsonl", "report.json", "heldout"
#: Ids of samples that came again, one a line, while a dataset is not finished.
REPEATS = ".repeats"
DATASET_FILES = {MANIFEST, "data-*.parquet", REJECTED, REPORT, HELDOUT, PROGRESS, REPEATS, ".*.tmp"}
#: After so many rows all files are finished, and a killed run resumes behind them.
CHECKPOINT_ROWS = 32_768
#: Rows that one task of a worker process handles: large enough for batched tokenising, small enough for a bounded queue.
CHUNK_ROWS = 128
#: Inputs of fewer chunks than this are prepared without worker processes.
CHUNKS_ALONE = 16
HISTOGRAM_EDGES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass
class PrepareReport:
    """Counts of one run. rows = kept + dropped (rows); samples can be more than kept rows (unrolled, split) or fewer (duplicates)."""

    rows: int = 0
    kept: int = 0
    dropped: int = 0
    samples: int = 0
    heldout_samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    truncated: int = 0
    answers: int = 0
    answers_cut: int = 0
    answers_lost: int = 0
    answers_unfinished: int = 0
    answers_left_out: int = 0  # that the data mark as not to be learnt
    windows: int = 0  # samples that --on-long split made of long rows
    duplicates: int = 0
    broken_sources: int = 0  # files that are cut or damaged: what follows in them was not read
    files_passed_over: list[str] = field(default_factory=list)  # files of no data format, beside those that were read
    notes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    rejected: list[dict[str, Any]] = field(default_factory=list)  # the first ones; all of them are in rejected.jsonl
    histogram: dict[str, int] = field(default_factory=dict)
    longest: int = 0
    resumed: int = 0  # rows that an earlier run of the same command had done
    seconds: float = 0.0
    workers: int = 1
    output: str = ""
    model: dict[str, int] | None = None

    @property
    def rows_per_second(self) -> float:
        return (self.rows - self.resumed) / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.rows_per_second * self.tokens / self.rows if self.rows else 0.0


def packaged(name: str) -> Path:
    """Path of a set that ships with eyas: `conversations`, `word_problems`, `word_problems_heldout`. Raises InputError for another name."""
    path = Path(__file__).with_name("packaged") / f"{name}.jsonl"
    if name not in PACKAGED or not path.exists():
        raise InputError(f"no packaged set named {name!r}", f"there are {', '.join(PACKAGED)}")
    return path


# ---------------------------------------------------------------- chunks of rows, in worker processes


def length_histogram(lengths: np.ndarray) -> dict[str, int]:
    """Number of samples by length in tokens, in bins that double; empty bins are left out."""
    return _named_bins(np.bincount(np.searchsorted(HISTOGRAM_EDGES, lengths), minlength=len(HISTOGRAM_EDGES) + 1))


def _named_bins(bins: np.ndarray) -> dict[str, int]:
    edges = [0, *HISTOGRAM_EDGES]
    names = [f"{low + 1}-{high}" for low, high in pairwise(edges)] + [f">{edges[-1]}"]
    return {name: int(count) for name, count in zip(names, bins, strict=True) if count}


_maker: RowMaker | None = None


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _start_worker(settings: PrepareSettings) -> None:
    global _maker
    threading.Thread(
        target=_leave_with_parent, daemon=True
    ).start()  # also when it is killed: nobody else would end this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _maker = RowMaker(settings)


def _work(rows: list[RawRow]) -> list[RowResult]:
    assert _maker is not None
    return _maker(rows)


def _chunks(sources: Sequence[DataSource], done: int, limit: int | None) -> Iterator[list[RawRow]]:
    stream = islice((row for source in sources for row in read_rows(source)), done, limit)
    while chunk := list(islice(stream, CHUNK_ROWS)):
        yield chunk


def _results(
    chunks: Iterator[list[RawRow]], maker: RowMaker, workers: int, settings: PrepareSettings
) -> Iterator[list[RowResult]]:
    """Results in the order of the rows; worker processes are started only for inputs that repay it."""
    if workers == 1:
        for chunk in chunks:
            yield maker(chunk)
        return
    ahead = list(islice(chunks, CHUNKS_ALONE))
    if len(ahead) < CHUNKS_ALONE:  # starting processes costs seconds
        for chunk in ahead:
            yield maker(chunk)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (settings,))
    waiting: deque[Future[list[RowResult]]] = deque(pool.submit(_work, chunk) for chunk in ahead)
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_work, chunk))
            if len(waiting) > 3 * workers:  # back-pressure: rows in flight are bounded
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise EyasError(
            "a tokenising process died (out of memory, or a script that calls prepare() without `if __name__ == '__main__':`)",
            "run again with --workers 1",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# ---------------------------------------------------------------- the stage


def sources_of(settings: SourceSettings) -> list[DataSource]:
    """What `--data` names: a packaged set, unless there is a file of that name, or whatever else it says."""
    return [
        DataSource(
            str(packaged(name)) if name in PACKAGED and not Path(name).exists() else name,
            settings.data_config,
            settings.data_split,
        )
        for name in settings.data
    ]


def describe_source(settings: SourceSettings) -> dict[str, Any]:
    """The input, as manifests have it."""
    return {
        "data": list(settings.data),
        "columns": settings.columns,
        "config": settings.data_config,
        "split": settings.data_split,
        "limit": settings.limit,
    }


@takes(PrepareSettings)
def prepare(settings: PrepareSettings, *, progress: Callable[[PrepareReport], None] | None = None) -> PrepareReport:
    """Make a token dataset from chat data, with the target's tokenizer and chat template.

    A held-out part is a dataset of its own in the subdirectory `heldout`.

    Args:
        progress: called with the running report after each chunk of rows.

    Returns:
        The report; also written to `report.json`, with every rejected row in `rejected.jsonl`.

    Raises:
        InputError: unreadable source, no template, or not one row could be used (the first reasons are named).
        FolderConflictError: the folder holds something else, or a dataset made from other input or settings, or another run writes it.
    """
    check_columns(settings.columns)
    sources = sources_of(settings)
    maker = RowMaker(settings)
    described: dict[str, Any] = {
        "source": describe_source(settings),
        "tokenizer": describe_tokenizer(maker.template.tokenizer, maker.template.source, settings.model_path),
        "settings": settings.content(),
    }
    folder = settings.output_dir
    made = {**described, "inputs": checkpoint.inputs_hash(sources)}
    with only_writer(folder, DATASET_FILES), translate_disk_full(folder):
        if whole := _finished(folder, made, settings.overwrite):
            log.info("%s is complete, nothing to do (--overwrite makes it anew)", folder)
            return whole
        report = PrepareReport(
            workers=settings.workers or available_cores(),
            output=str(folder),
            files_passed_over=[name for source in sources for name in files_of(source)[1]],
        )
        before = checkpoint.load(folder, made)
        if before is None:
            _clear(folder)
        sink = _Sink(folder, settings, report, made, before)
        started = time.monotonic()
        for results in _results(_chunks(sources, report.rows, settings.limit), maker, report.workers, settings):
            for result in results:
                sink.add(result)
            if report.rows >= sink.next_checkpoint:
                sink.checkpoint()
            report.seconds = time.monotonic() - started
            if progress:
                progress(report)
        if report.samples == report.heldout_samples:  # nothing, or nothing but held-out samples
            sink.abandon()
            if report.samples:
                raise InputError(
                    f"all {report.samples} samples fell into the held-out part",
                    "give more data, or a smaller --held-out",
                )
            shown = (
                "; ".join(f"{r['file']}:{r['line']}: {r['reason']}" for r in report.rejected[:3])
                or "the input is empty"
            )
            raise InputError(
                f"not one of {report.rows} rows could be used: {shown}",
                "fix the data, or the template (--chat-template)",
            )
        report.model = describe_shape(settings.model_path, settings.trust_remote_code)
        sink.close({**made, "model": report.model})
        report.seconds = time.monotonic() - started
        log.info(
            "prepared %d rows: %d kept, %d dropped, %d samples, %d tokens (%.0f tokens/s, %d processes)",
            report.rows, report.kept, report.dropped, report.samples, report.tokens, report.tokens_per_second, report.workers,
        )  # fmt: skip
        return report


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def predicted_bytes(tokens: int, hidden_size: int, layers: int = 4, bytes_per_value: int = 2) -> int:
    """Size of the states of `tokens` tokens: layers x hidden size x bytes a value, and 5 bytes of id and mask a token."""
    return tokens * (layers * hidden_size * bytes_per_value + 5)


def _finished(folder: Path, made: dict[str, Any], overwrite: bool) -> PrepareReport | None:
    """The report of a whole dataset of the same making in the folder; None where it is to be made. One of another making is refused."""
    if overwrite or not (folder / MANIFEST).exists():
        return None
    manifest = read_manifest(folder, "eyas.dataset", 1, ("files",))
    have = {key: manifest.get(key) for key in made}
    same_inputs = have.pop("inputs") == made["inputs"]
    if differing := differing_fields(have, {key: made[key] for key in have}):
        raise FolderConflictError(
            f"{folder} holds a dataset made otherwise:\n  " + "\n  ".join(differing[:8]),
            "name another --output-dir, or replace it with --overwrite",
        )
    files = [folder / REPORT, *(folder / str(entry.get("name")) for entry in manifest["files"])]
    if not same_inputs or not all(file.exists() for file in files):
        return None
    report = PrepareReport(output=str(folder), model=manifest.get("model"))
    checkpoint.take_counts(report, json.loads((folder / REPORT).read_text(encoding="utf-8")))
    return report


def _clear(folder: Path) -> None:
    """Make room for the dataset."""
    (folder / MANIFEST).unlink(missing_ok=True)  # first, so that a reader never sees an old manifest with new files
    for file in [*folder.glob("data-*.parquet"), *(folder / name for name in (REJECTED, REPORT, PROGRESS, REPEATS))]:
        file.unlink(missing_ok=True)
    shutil.rmtree(folder / HELDOUT, ignore_errors=True)


class _Sink:
    """Receives rows in order: writes samples, counts everything, remembers which samples came before."""

    def __init__(
        self,
        folder: Path,
        settings: PrepareSettings,
        report: PrepareReport,
        made: dict[str, Any],
        before: dict[str, Any] | None,
    ):
        self.made = made
        self.folder, self.settings, self.report = folder, settings, report
        self.writer = DatasetWriter(folder)
        self.heldout = DatasetWriter(folder / HELDOUT) if settings.held_out else None
        self.rejected = open(folder / REJECTED, "ab")  # noqa: SIM115 - closed by close() or abandon()
        self.repeats = open(folder / REPEATS, "a+b")  # noqa: SIM115 - likewise
        self.seen: dict[bytes, bool] = {}  # sample id -> whether it is in the held-out part
        self.counts: Counter[str] = Counter()
        self.bins = np.zeros(len(HISTOGRAM_EDGES) + 1, dtype=np.int64)
        if before is None:
            self.checkpoint()
        else:
            self._resume(before["state"], before["parts"])
        self.next_checkpoint = report.rows + CHECKPOINT_ROWS

    def checkpoint(self) -> None:
        """Finish all files; a killed run resumes here. At the same rows in every run, so that all give the same files."""
        for writer in (self.writer, self.heldout):
            if writer:
                writer.finish_files()
        sizes = []
        for file in (self.rejected, self.repeats):
            file.flush()
            os.fsync(file.fileno())
            sizes.append(file.tell())
        state = {
            "report": checkpoint.report_counts(self.report),
            "bins": self.bins.tolist(),
            "sizes": sizes,
            "needs": [REJECTED, REPEATS],
        }
        checkpoint.save(self.folder, self.made, state, (self.writer, self.heldout))
        self.next_checkpoint = self.report.rows + CHECKPOINT_ROWS

    def _resume(self, state: dict[str, Any], parts: list[Any]) -> None:
        checkpoint.take_counts(self.report, state["report"])
        self.report.resumed = self.report.rows
        self.bins += np.asarray(state["bins"])
        for file, size in zip((self.rejected, self.repeats), state["sizes"], strict=True):
            file.truncate(size)
        self.repeats.seek(0)
        self.counts.update(line.decode().strip() for line in self.repeats)
        for writer, part in zip((self.writer, self.heldout), parts, strict=True):
            if writer:
                checkpoint.restore(writer, part)
                self.seen.update((bytes.fromhex(one), writer is self.heldout) for one in writer.ids)
        log.info("resuming behind row %d", self.report.rows)

    def add(self, result: RowResult) -> None:
        report = self.report
        report.rows += 1
        report.answers += result.answers
        report.answers_lost += result.lost
        report.answers_left_out += result.left_out
        report.broken_sources += result.breaks_off
        if result.reason is not None:
            self._reject(result)
            return
        report.kept += 1
        report.notes.update(set(result.notes))
        apart = self.heldout is not None and is_heldout(result.key, self.settings.held_out)
        report.truncated += (
            any(
                piece.cut or piece.lost or (len(piece.token_ids) == self.settings.max_seq_len and piece.truncated)
                for piece in result.pieces
            )
            and self.settings.on_long == "truncate"
        )
        report.answers_unfinished += sum(piece.unfinished for piece in result.pieces)
        for piece in result.pieces:
            report.answers_cut += piece.cut
            report.answers_lost += piece.lost
            sample = Sample.of(piece.token_ids, piece.loss_mask)
            digest = bytes.fromhex(sample.id)
            if digest in self.seen:
                report.duplicates += 1
                self.counts[sample.id] += 1
                self.repeats.write(sample.id.encode() + b"\n")
                if self.settings.duplicates == "once":
                    continue
            # An equal sample stays on its side, also if it came as chat once and as tokens once.
            self._write(sample, piece, result, self.seen.setdefault(digest, apart))
        if len(result.pieces) > 1 and self.settings.on_long == "split":
            report.windows += len(result.pieces)

    def _write(self, sample: Sample, piece: Piece, result: RowResult, apart: bool) -> None:
        report = self.report
        writer = self.heldout if apart and self.heldout else self.writer
        writer.add(
            sample,
            source=result.place.source,
            truncated=piece.truncated,
            split="heldout" if apart else "train",
            finish_reason="length" if piece.unfinished else None,
        )
        report.samples += 1
        report.heldout_samples += apart
        report.tokens += len(sample)
        report.supervised_tokens += int(sample.loss_mask.sum())
        report.longest = max(report.longest, len(sample))
        self.bins[int(np.searchsorted(HISTOGRAM_EDGES, len(sample)))] += 1

    def _reject(self, result: RowResult) -> None:
        entry = {"file": result.place.file, "line": result.place.line, "reason": result.reason}
        self.rejected.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        self.report.dropped += 1
        self.report.reasons[_kind_of(str(result.reason))] += 1
        if result.breaks_off:
            self.report.rejected.insert(0, entry)
        elif len(self.report.rejected) < 20:
            self.report.rejected.append(entry)

    def abandon(self) -> None:
        """Nothing is made, and there is nothing to resume."""
        self.rejected.close()
        self.repeats.close()
        for name in (PROGRESS, REPEATS):
            (self.folder / name).unlink(missing_ok=True)

    def close(self, described: dict[str, Any]) -> None:
        self.rejected.close()
        report = self.report
        report.histogram = _named_bins(self.bins)
        counts = checkpoint.report_counts(report)
        if self.heldout is not None:
            if self.heldout.ids:
                self.heldout.finish_files()
                self._write_counts(self.heldout)
                self.heldout.close(**described, part="heldout")
            else:
                log.warning(
                    "the held-out part is empty: %d samples are few for a share of %s",
                    report.samples,
                    self.settings.held_out,
                )
                shutil.rmtree(self.folder / HELDOUT, ignore_errors=True)
        self.writer.finish_files()
        self._write_counts(self.writer)
        write_json(self.folder / REPORT, counts)
        self.writer.close(**described, counts=counts, part="train" if self.heldout else "all")
        self.abandon()

    def _write_counts(self, writer: DatasetWriter) -> None:
        """How often a sample came is known only at the end: rewrite the `count` column where a sample came again."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self.counts or self.settings.duplicates == "keep":
            return
        for entry in writer.files:
            path = writer.folder / entry["name"]
            table = pq.ParquetFile(path)
            groups = [
                table.read_row_group(i, columns=["sample_id"]).column(0).to_pylist()
                for i in range(table.num_row_groups)
            ]
            if not any(one in self.counts for group in groups for one in group):
                continue
            temporary = path.with_name(f".{path.name}.tmp")
            with pq.ParquetWriter(temporary, table.schema_arrow, compression="zstd") as out:
                for index, group in enumerate(groups):
                    rows = table.read_row_group(index)
                    counted = pa.array([1 + self.counts.get(one, 0) for one in group], pa.int32())
                    out.write_table(rows.set_column(rows.schema.get_field_index("count"), "count", counted))
            os.replace(temporary, path)


def _kind_of(reason: str) -> str:
    """A reason without its numbers and quotations, for counting."""
    import re

    return re.sub(r"'[^']*'|\d+", "…", reason)[:120]
