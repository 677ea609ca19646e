"""Where chat data come from: files, directories and data sets, read row by row with the file and line of each.

`read_rows(source)` holds one row at a time. It does not parse JSON: that is the costly half, and is done where the rows are used
(`conversations.py`), in worker processes too. So what is wrong inside a row is that row's error; only what makes the rest of a file
unreadable (a cut or damaged file, text behind an array) is an error of the file, and comes as a row whose data is `Unreadable`.

The elements of a JSON array are found by their brackets: a parser (ijson too) converts numbers and text as it goes and would lose all
that follows a bad one.
"""

from __future__ import annotations

import bz2
import csv
import io
import json
import logging
import lzma
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from eyas.base.errors import InputError

log = logging.getLogger(__name__)

#: The longest element of a JSON array that is waited for: beyond it the array is taken to be broken.
ELEMENT_BYTES = 64 << 20


class BadRow(str):
    """In place of a row's data: why it cannot be used."""


class Unreadable(BadRow):
    """A `BadRow` that is the rest of its file: nothing behind it could be read."""


@dataclass(frozen=True)
class RawRow:
    """A row as read. `data` is the line's bytes (JSON not parsed yet) or a dict; `line` counts from 1 (rows, where a file has no lines)."""

    file: str
    line: int
    data: Any

    @property
    def source(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class DataSource:
    """Where rows come from: `path` is a file, a directory or a data set's name for the `datasets` library (with `config`, `split`)."""

    path: str
    config: str | None = None
    split: str = "train"

    def __post_init__(self) -> None:
        name = self.path
        hub = name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith(SUFFIXES)
        if not (hub or name.startswith("hf:") or Path(name).exists()):
            raise InputError(
                f"--data {name}: no such file or directory, and not a data set name of the form owner/name",
                "check the path; packaged sets are named `conversations`, `word_problems` and `word_problems_heldout`",
            )


def read_rows(source: DataSource) -> Iterator[RawRow]:
    """Yield the rows of one source in order; the part of a file that cannot be read comes as one row whose data is `Unreadable`.

    Raises:
        InputError: no such file, directory, data set or split, or a directory without data files.
    """
    path = Path(source.path)
    files, others = files_of(source)
    if others:
        log.warning("%s: not read, their format is not one of data: %s", path, ", ".join(others))
    if files:
        for file in files:
            yield from _read_file(file)
    elif path.exists():
        yield from _saved_dataset(path, source)
    else:
        yield from _hub_dataset(source)


def files_of(source: DataSource) -> tuple[list[Path], list[str]]:
    """The data files of a local source, in order, and the names of the files beside them that are of no format read here.

    Hidden files and directories are passed over. Both lists are empty for data sets of the `datasets` library.

    Nothing is opened. Raises InputError for a file of another format and for a directory without data files.
    """
    path = Path(source.path)
    if path.is_file():
        if _format_of(path) is None:
            raise InputError(f"{path}: unknown kind of data file", f"expected {', '.join(SUFFIXES)}")
        return [path], []
    if not path.is_dir() or (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return [], []
    visible = [p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    files = sorted(
        p for p in visible if p.is_symlink() or not p.is_dir()
    )  # a link without its file is data that is missing
    data = [p for p in files if _format_of(p) and not p.is_dir()]
    others = [_shown(p.relative_to(path)) for p in files if p not in set(data)]
    if not data:
        raise InputError(f"{path} holds no data files", f"expected files ending in {', '.join(SUFFIXES)}")
    return data, others


# ---------------------------------------------------------------- files


class _BreaksOffError(Exception):
    """The file is not readable from here on."""


def _read_file(path: Path) -> Iterator[RawRow]:
    name, number = _shown(path), 0
    reader, opener = _format_of(path) or (_lines, _COMPRESSIONS[""])
    try:
        with open(path, "rb") as raw:
            size = os.fstat(raw.fileno()).st_size
            try:
                if not size and not path.name.lower().endswith((".jsonl", ".ndjson")):  # lines may be none
                    raise _BreaksOffError("the file is empty")
                for number, data in reader(io.BufferedReader(opener(raw))):
                    yield RawRow(name, number, data)
            except _BreaksOffError as error:
                yield RawRow(name, number + 1, Unreadable(error))
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
                left = size - min(raw.tell(), size)
                yield RawRow(
                    name,
                    number + 1,
                    Unreadable(f"the file is cut or damaged behind row {number} ({error}); {left:,} of its {size:,} bytes were not read"),
                )  # fmt: skip
    except OSError as error:
        yield RawRow(name, number + 1, Unreadable(f"the file cannot be read: {error.strerror}"))


def _shown(path: Path) -> str:
    """A path as text that can be written anywhere, also where its name is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def _lines(file: io.BufferedReader) -> Iterator[tuple[int, Any]]:
    """JSON lines; a file that begins with a bracket is one array."""
    if file.peek(1).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
        yield from _array(file)
        return
    for number, line in enumerate(_whole_lines(file), 1):
        if not line.endswith(b"\n") and line.strip() and not _is_json(line):
            raise _BreaksOffError(f"the file ends in the middle of a row ({len(line):,} bytes, no line break)")
        if line.strip():
            yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file; only at a file's own end may one lack its line break."""
    for line in file:
        if not line.endswith(b"\n"):
            file.read(1)  # raises where the file is damaged here
        yield line
    file.read(1)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    except (ValueError, RecursionError):  # whole, and unusable for another reason: the row's own error
        return True
    return True


_SPACE, _SCALAR = re.compile(rb"\s*"), re.compile(rb"[^\s,\]]*")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKET = re.compile(rb'["\[\]{}]')
_CLOSING = {b"{": b"}", b"[": b"]"}


def _array(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The elements of one JSON array, each as its bytes, from a window of the file: a large file needs little memory."""
    text, at, number = b"", 0, 0

    def more() -> bool:
        nonlocal text, at
        chunk = file.read(
            max(1 << 20, len(text) - at)
        )  # twice as much each time: a long element is not looked through too often
        text, at = text[at:] + chunk, 0
        return bool(chunk)

    def next_byte() -> bytes:
        nonlocal at
        while True:
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            if at < len(text) or not more():
                return text[at : at + 1]

    def breaks_off(why: str) -> _BreaksOffError:
        left = len(text) - at + sum(len(chunk) for chunk in iter(lambda: file.read(1 << 20), b""))
        return _BreaksOffError(f"{why}; {left:,} bytes from there on were not read")

    more()
    at = text.index(b"[") + 1
    while next_byte() != b"]":
        if not text[at:]:
            raise breaks_off(f"the JSON array ends behind row {number} without its closing bracket")
        while (end := _element_end(text, at)) is None:
            if len(text) - at > ELEMENT_BYTES or not more():
                raise breaks_off(f"the JSON array ends in the middle of row {number + 1}")
        if end <= at:
            raise breaks_off(f"row {number + 1} of the JSON array is broken: its brackets do not match")
        number += 1
        yield number, text[at:end]
        at = end
        if (separator := next_byte()) == b",":
            at += 1
        elif separator not in (b"]", b""):
            raise breaks_off(f"behind row {number} of the JSON array stands neither a comma nor its closing bracket")
    at += 1
    if next_byte():
        raise breaks_off(f"text behind the end of the JSON array of {number} rows")


def _element_end(text: bytes, at: int) -> int | None:
    """Where the JSON value that begins at `at` ends; None when the text ends before, `at` or less when it is none."""
    if text[at : at + 1] not in _CLOSING:
        found = (_STRING if text[at : at + 1] == b'"' else _SCALAR).match(text, at)
        return found.end() if found and found.end() < len(text) else None
    expected: list[bytes] = []
    position = at
    while found := _BRACKET.search(text, position):
        if found.group() == b'"':
            if (found := _STRING.match(text, found.start())) is None:
                return None
        elif found.group() in _CLOSING:
            expected.append(_CLOSING[found.group()])
        elif expected.pop() != found.group():
            return at
        position = found.end()
        if not expected:
            return position
    return None


def _csv(file: io.BufferedReader, delimiter: str = ",") -> Iterator[tuple[int, Any]]:
    """Rows of a table with a header. A byte that is not UTF-8 becomes a lone surrogate: the row's error, not the file's."""
    csv.field_size_limit(sys.maxsize)
    last = b""

    def lines() -> Iterator[str]:
        nonlocal last
        for last in _whole_lines(file):
            yield last.decode("utf-8", "surrogateescape")

    rows = csv.reader(lines(), delimiter=delimiter, strict=True)
    try:
        header = [name.removeprefix("\ufeff").strip() for name in next(rows, [])]
        if not last.endswith((b"\n", b"\r")):
            raise _BreaksOffError("the file ends within its header")
        if twice := [name for name, count in Counter(header).items() if count > 1]:
            raise _BreaksOffError(f"the header names {', '.join(twice)} more than once; its rows were not read")
        first = rows.line_num + 1
        for values in rows:
            cut = not last.endswith((b"\n", b"\r"))
            if len(values) == len(header):
                if cut and isinstance(
                    name := getattr(file.raw, "name", None), str
                ):  # a cut compressed file says so itself
                    log.warning(
                        "%s:%d: no line break behind the last row; nothing can tell whether it is cut", name, first
                    )
                yield first, {name: value for name, value in zip(header, values, strict=True) if value}
            elif cut:
                raise _BreaksOffError(
                    f"the file ends in the middle of a row (line {first}: {len(values)} of {len(header)} values)"
                )
            elif values:
                yield first, BadRow(f"{len(values)} values under a header of {len(header)} columns")
            first = rows.line_num + 1
    except csv.Error as error:
        raise _BreaksOffError(
            f"not readable as a table from line {rows.line_num} on ({error}); the rest was not read"
        ) from None


def _tsv(file: io.BufferedReader) -> Iterator[tuple[int, Any]]:
    return _csv(file, "\t")


def _parquet(file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = rows = 0
    try:
        table = pq.ParquetFile(file, page_checksum_verification=True)
        rows = table.metadata.num_rows
        for batch in table.iter_batches(batch_size=256):
            for row in _rows_of(batch):
                number += 1
                yield number, row
    except (pa.ArrowException, OSError) as error:
        left = f"{rows - number:,} of its {rows:,} rows were not read" if rows else "none of its rows was read"
        raise _BreaksOffError(f"not a readable Parquet file: {error}; {left}") from None


def _rows_of(table: Any) -> Iterator[Any]:
    """The rows of an Arrow table; one with a value that Python cannot hold (text that is not UTF-8, a date beyond all years) is bad alone."""
    for at in range(table.num_rows):
        try:
            [row] = table.slice(at, 1).to_pylist()
            yield without_nulls(row)
        except (ValueError, OverflowError) as error:
            yield BadRow(f"a value that cannot be read: {error}")


def without_nulls(value: Any) -> Any:
    """Parquet gives every message the union of all keys, absent ones as None: leave those out again."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


class _Chunks(io.RawIOBase):
    """A file of chunks of bytes. Where they end in an error, all before it can be read first; the read behind them raises it."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks, self._left = chunks, b""
        self._error: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._error is not None:
            raise self._error
        try:
            while not self._left:
                self._left = next(self._chunks)
        except StopIteration:
            return 0
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            self._error = error
            return 0
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size


def _unpacked(raw: IO[bytes], new_decoder: Callable[[], Any]) -> Iterator[bytes]:
    """The text of a compressed file, or of several one behind the other (with zeros between), to the last byte: the standard library's
    own readers take what is no compressed file behind the first for its end."""
    decoder = new_decoder()
    while chunk := raw.read(1024):  # little, so that what stands before a damage comes out
        while chunk and (not decoder.eof or (chunk := chunk.lstrip(b"\0"))):
            decoder = new_decoder() if decoder.eof else decoder
            yield decoder.decompress(chunk)
            chunk = decoder.unused_data
    if not decoder.eof:
        raise EOFError("the compressed text has no end")


def _opener(new_decoder: Callable[[], Any]) -> Callable[[IO[bytes]], Any]:
    return lambda raw: _Chunks(_unpacked(raw, new_decoder))


def _zstd(raw: IO[bytes]) -> Any:
    import pyarrow as pa

    stream = pa.CompressedInputStream(raw, "zstd")
    return _Chunks(iter(lambda: stream.read(1 << 16), b""))


_FORMATS: dict[str, Callable[[Any], Iterable[tuple[int, Any]]]] = {
    ".jsonl": _lines, ".ndjson": _lines, ".json": _lines, ".parquet": _parquet, ".csv": _csv, ".tsv": _tsv,
}  # fmt: skip
_COMPRESSIONS: dict[str, Callable[[Any], Any]] = {
    "": lambda raw: raw,
    ".gz": _opener(lambda: zlib.decompressobj(wbits=31)),
    ".bz2": _opener(bz2.BZ2Decompressor),
    ".xz": _opener(lzma.LZMADecompressor),
    ".zst": _zstd,
}  # fmt: skip
#: Endings of the files that are read.
SUFFIXES = tuple(kind + packed for packed in _COMPRESSIONS for kind in _FORMATS if not packed or kind != ".parquet")


def _format_of(path: Path) -> tuple[Any, Any] | None:
    """(reader of rows, opener of the decompressed file) by a file's ending; None for a file that is no data."""
    ending = next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)
    if ending is None:
        return None
    kind = next(one for one in _FORMATS if ending.startswith(one))
    return _FORMATS[kind], _COMPRESSIONS[ending.removeprefix(kind)]


# ---------------------------------------------------------------- data sets of the `datasets` library


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise InputError(
            "reading this source needs the `datasets` library", "install it with `pip install 'eyas[datasets]'`"
        ) from None
    return datasets


def _saved_dataset(path: Path, source: DataSource) -> Iterator[RawRow]:
    """What `save_to_disk` wrote: a data set, or a directory of splits of which `--data-split` names one."""
    if (path / "dataset_dict.json").exists():
        splits = sorted(p.name for p in path.iterdir() if (p / "dataset_info.json").exists())
        if source.split not in splits:
            raise InputError(
                f"--data {path} holds the splits {', '.join(splits) or '(none)'}, and --data-split says {source.split!r}",
                "name one of them with --data-split",
            )
        path = path / source.split
    try:
        loaded = _datasets().load_from_disk(str(path))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"--data {path}: `datasets` could not load it: {error}", "save the data set again") from None
    yield from _records(loaded, _shown(path))


def _hub_dataset(source: DataSource) -> Iterator[RawRow]:
    path = source.path.removeprefix("hf:")
    try:
        loaded = _datasets().load_dataset(path, source.config, split=source.split, streaming=True)
    except (FileNotFoundError, ValueError, OSError) as error:
        raise InputError(
            f"--data {source.path}: no such file or directory, and `datasets` could not load it: {error}",
            "check the name, --data-config and --data-split; a local file needs its path",
        ) from None
    yield from _records(loaded, f"{source.path}[{source.split}]")


def _records(loaded: Any, name: str) -> Iterator[RawRow]:
    import pyarrow as pa

    number = 0
    try:
        tables = loaded.with_format("arrow").iter(256)
        for number, row in enumerate((row for table in tables for row in _rows_of(table)), 1):
            yield RawRow(name, number, row)
    except (pa.ArrowException, OSError, ValueError, _datasets().exceptions.DatasetsError) as error:
        yield RawRow(name, number + 1, Unreadable(f"the data set breaks off behind row {number}: {error}"))
