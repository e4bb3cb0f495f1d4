"""Files of records: JSONL, also gzipped, CSV and Parquet in; numbered dicts out; JSONL written whole or not at all.

Every mistake in a file's form (bytes, JSON, table) becomes a `CalibError` that names file and line.
Leaves to others: what the fields mean (`calib.questions`).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calib.errors import CalibError

__all__ = ["FORMATS", "described", "listed", "place", "quoted", "read_records", "stem", "write_jsonl"]

Record = Mapping[str, Any]

JSONL_FORMATS = (".jsonl", ".ndjson", ".jsonl.gz")
FORMATS = (*JSONL_FORMATS, ".csv", ".parquet")


def place(path: Path, number: int) -> str:
    """Name a record of a file by its line; in Parquet, which has none, by its number counted from 1."""
    return f"{path}, {'record' if _suffix(path) == '.parquet' else 'line'} {number}"


def stem(path: Path) -> str:
    """File name without the format's suffix: ``tests/a.b.jsonl.gz`` gives ``a.b``."""
    return path.name[: len(path.name) - len(_suffix(path))]


def read_records(path: Path, *, fields: Sequence[str], required: Sequence[str]) -> Iterator[tuple[int, Record]]:
    """Read the records of one file in order, each with its line (CSV: the first of its lines) or record number.

    Parameters
    ----------
    path : Path
        Ends in one of `FORMATS`.
    fields : sequence of str
        The fields that the caller knows; a Parquet file's other columns are not read.
    required : sequence of str
        The fields that a table must have a column for. In JSONL each record may differ: the caller checks it.

    Yields
    ------
    number : int
        See `place`.
    record : mapping of str to object
        As in the file. CSV: texts, without the empty cells.

    Raises
    ------
    CalibError
        An absent file, another format, undecodable bytes, a broken line or table.
    """
    suffix = _suffix(path)
    if suffix not in FORMATS:
        raise CalibError(f"{path}: not a format that calib reads; rename or convert it to one of {', '.join(FORMATS)}")
    with _file_errors(path):
        if suffix == ".csv":
            yield from _read_csv(path, fields, required)
        elif suffix == ".parquet":
            yield from _read_parquet(path, fields, required)
        else:
            yield from _read_jsonl(path)


def write_jsonl(records: Iterable[Record], path: Path) -> None:
    """Write records as JSONL, gzipped under ``.jsonl.gz``; the file appears whole or not at all.

    Raises
    ------
    CalibError
        A suffix that is not of JSONL, or a place that cannot be written.
    """
    suffix = _suffix(path)
    if suffix not in JSONL_FORMATS:
        raise CalibError(f"{path}: written as JSONL only; choose a name that ends in {', '.join(JSONL_FORMATS)}")
    data = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records).encode()
    if suffix == ".jsonl.gz":
        data = gzip.compress(data, mtime=0)  # the same records give the same bytes
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _file_errors(path):
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _suffix(path: Path) -> str:
    """Suffix in lower case, with the one before it only in ``.jsonl.gz``."""
    name = path.name.lower()
    return ".jsonl.gz" if name.endswith(".jsonl.gz") else Path(name).suffix


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Turn what the system says about a file into the user's error."""
    try:
        yield
    except FileNotFoundError:
        raise CalibError(f"{path}: no such file or folder; check the name, seen from {Path.cwd()}") from None
    except IsADirectoryError:
        raise CalibError(f"{path}: is a folder; name the files in it, such as {path / '*.jsonl'}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CalibError(f"{path}: not a whole gzip file ({error}); copy or compress it again") from None
    except OSError as error:
        raise CalibError(f"{path}: {error.strerror or error}", exit_code=1) from None


def _read_jsonl(path: Path) -> Iterator[tuple[int, Record]]:
    raw = path.read_bytes()
    text = _decoded(path, gzip.decompress(raw) if _suffix(path) == ".jsonl.gz" else raw)
    # Only "\n" ends a line: str.splitlines would also cut at U+2028 and others, which JSON allows inside a text.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line or line.isspace():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise CalibError(
                f"{path}, line {number}, column {error.colno}: broken JSON, {error.msg}: {_excerpt(line, error.pos)}; "
                "expected one whole JSON object on each line"
            ) from None
        except (ValueError, RecursionError) as error:
            raise CalibError(f"{path}, line {number}: JSON that cannot be used, {error}") from None
        if not isinstance(record, dict):
            raise CalibError(
                f"{path}, line {number}: expected a JSON object, {{...}}, got {described(record)}; "
                "write one object on each line, not one list of all"
            )
        yield number, record


def _read_csv(path: Path, fields: Sequence[str], required: Sequence[str]) -> Iterator[tuple[int, Record]]:
    rows = _csv_rows(path, _decoded(path, path.read_bytes()))
    if not rows:
        return
    header = [name.strip() for name in rows[0][1]]
    _check_header(place(path, rows[0][0]), header, fields, required)
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise CalibError(
                f"{path}, line {line}: {len(row)} cells, but the header has {len(header)}; "
                "put a cell that holds a comma, a quote or a newline in quotes"
            )
        yield line, {name: cell for name, cell in zip(header, row, strict=True) if cell}


def _csv_rows(path: Path, text: str) -> list[tuple[int, list[str]]]:
    """Rows with their first lines, without blank lines and the rows of empty cells that spreadsheets leave behind."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[tuple[int, list[str]]] = []
    line = 1
    limit = csv.field_size_limit(2**31 - 1)  # the default, 131,072 characters a cell, is less than long states need
    try:
        for row in reader:
            if any(row):
                rows.append((line, row))
            line = reader.line_num + 1
    except csv.Error as error:
        raise CalibError(
            f"{path}, line {line}: broken CSV, {error}; put a cell that holds a comma, a quote or a newline "
            'in quotes, and write each quote inside it twice ("")'
        ) from None
    finally:
        csv.field_size_limit(limit)
    return rows


def _check_header(where: str, header: Sequence[str], fields: Sequence[str], required: Sequence[str]) -> None:
    missing = [name for name in required if name not in header]
    if missing:
        apart = next((mark for mark in (";", "\t") if len(header) == 1 and mark in header[0]), None)
        raise CalibError(
            f"{where}: no column {listed(missing)}; the header has {listed(header)}"
            + (f"; separate the columns by commas, not by {quoted(apart)}" if apart else "")
        )
    twice = [name for name, n in Counter(header).items() if n > 1 and name in fields]
    if twice:
        raise CalibError(f"{where}: the header names {listed(twice)} more than once; rename or remove one of the two")


def _read_parquet(path: Path, fields: Sequence[str], required: Sequence[str]) -> Iterator[tuple[int, Record]]:
    import pyarrow  # slow to import, and only this format needs it
    import pyarrow.parquet

    number = 0
    try:
        with path.open("rb") as stream, pyarrow.parquet.ParquetFile(stream) as file:
            names = file.schema_arrow.names
            _check_header(str(path), names, fields, required)
            columns = [name for name in names if name in fields]
            for batch in file.iter_batches(columns=columns, batch_size=4096):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except pyarrow.ArrowException as error:
        raise CalibError(f"{path}: not a readable Parquet file, {error}") from None
    except UnicodeDecodeError as error:
        raise CalibError(f"{path}, after record {number}: text that is not UTF-8, {error.reason}") from None


def _decoded(path: Path, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start]  # error.object, not raw: positions are counted after a byte-order mark
        line = before.count(b"\n") + 1
        column = len(before) - before.rfind(b"\n")
        raise CalibError(
            f"{path}, line {line}: byte {column} of the line, 0x{error.object[error.start]:02x}, "
            "is not UTF-8; save the file with the encoding UTF-8"
        ) from None


def quoted(text: str, most: int = 60) -> str:
    """Return the text as a JSON string, cut to ``most`` characters."""
    return json.dumps(text if len(text) <= most else text[: most - 3] + "...", ensure_ascii=False)


def listed(names: Sequence[str]) -> str:
    """Return "a", "a and b", or "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def described(value: Any) -> str:
    """Return the value with its JSON type: what the user sees in the file."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {quoted(value)}"
    if isinstance(value, (int, float)):
        return f"the number {quoted(str(value))[1:-1]}"
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else f"a value of type {type(value).__name__}"


def _excerpt(line: str, at: int, around: int = 20) -> str:
    part = line[max(0, at - around) : at + around].strip()
    return quoted(part) if part else "nothing follows"
