"""Files of records: lines and bytes that are broken, tables without their columns, writing whole or not at all."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calib.errors import CalibError
from calib.records import listed, read_records, stem, write_jsonl


def read(path: Path) -> list[tuple[int, Any]]:
    return list(read_records(path, fields=["id", "note"], required=["id"]))


def error_of(path: Path) -> str:
    with pytest.raises(CalibError) as caught:
        read(path)
    return str(caught.value)


def save(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_blank_lines_line_ends_and_a_byte_order_mark_are_fine(tmp_path):
    content = b'\xef\xbb\xbf\n{"id": 1}\r\n \t\r\n\n{"id": 2}'
    assert read(save(tmp_path / "a.jsonl", content)) == [(2, {"id": 1}), (5, {"id": 2})]
    assert read(save(tmp_path / "a.jsonl.gz", gzip.compress(content))) == [(2, {"id": 1}), (5, {"id": 2})]
    content = b"\xef\xbb\xbf\r\nid,note\r\n\r\n1,\r\n,\r\n2,b\r\n"
    assert read(save(tmp_path / "a.csv", content)) == [(4, {"id": "1"}), (6, {"id": "2", "note": "b"})]


def test_only_a_newline_ends_a_json_line(tmp_path):
    path = save(tmp_path / "a.jsonl", '{"id": "a\u2028b\x85c"}\n'.encode())
    assert read(path) == [(1, {"id": "a\u2028b\x85c"})]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.csv", "a.jsonl.gz"])
def test_an_empty_file_has_no_records(tmp_path, name):
    for content in (b"", b"\n\n"):
        assert read(save(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"id": 1}\n{"id": 2,}\n', "line 2, column 10: broken JSON"),
        (b'{"id": 1}\n\n{"id": "cut', "line 3, column 8: broken JSON, Unterminated string"),
        (b'{"id": 1} {"id": 2}\n', "line 1, column 11: broken JSON, Extra data"),
        (b"[\n", "line 1, column 2: broken JSON"),
        (b'[{"id": 1}]\n', "line 1: expected a JSON object, {...}, got a list; write one object on each line"),
        (b'"id"\n', 'line 1: expected a JSON object, {...}, got the text "id"'),
        (b"null\n", "got null"),
        (b'{"id": ' + b"[" * 100_000 + b"\n", "line 1: JSON that cannot be used"),
        (b'{"id": ' + b"1" * 5000 + b"}\n", "line 1: JSON that cannot be used"),
        (b'{"id": 1}\n{"id": "caf\xe9"}\n', "line 2: byte 12 of the line, 0xe9, is not UTF-8"),
        (b'\xef\xbb\xbf{"id": "caf\xe9"}\n', "line 1: byte 12 of the line, 0xe9, is not UTF-8"),
    ],
)
def test_broken_lines(tmp_path, content, words):
    message = error_of(save(tmp_path / "a.jsonl", content))
    assert message.startswith(str(tmp_path / "a.jsonl"))
    assert words in message


def test_broken_gzip(tmp_path):
    whole = gzip.compress(b'{"id": 1}\n' * 100)
    broken = bytearray(whole)
    broken[-6] ^= 1  # the checksum
    for content in (b'{"id": 1}\n', whole[: len(whole) // 2], bytes(broken)):
        assert "not a whole gzip file" in error_of(save(tmp_path / "a.jsonl.gz", content))


def test_files_that_cannot_be_opened(tmp_path):
    assert "no such file" in error_of(tmp_path / "a.jsonl")
    assert "no such file" in error_of(tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").mkdir()
    assert "is a folder" in error_of(tmp_path / "b.jsonl")
    for name in ("a.json", "a.txt", "a.csv.gz", "jsonl"):
        assert ".jsonl, .ndjson, .jsonl.gz, .csv, .parquet" in error_of(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"name,note\n1,2\n", "line 1: no column id; the header has name and note"),
        (b"id;note\n1;2\n", 'separate the columns by commas, not by ";"'),
        (b"id,note,note\n1,2,3\n", "line 1: the header names note more than once"),
        (b"id,note\n1,a\n2,b,c\n", "line 3: 3 cells, but the header has 2"),
        (b'id,note\n1,"a\nb"\n2\n', "line 4: 1 cells, but the header has 2"),
        (b'id,note\n1,"never closed\n2,b\n', "line 2: broken CSV, unexpected end of data"),
        (b'id,note\n1,"a"b\n', "line 2: broken CSV"),
        (b"id,note\n1,caf\xe9\n", "line 2: byte 6 of the line, 0xe9, is not UTF-8"),
    ],
)
def test_broken_csv(tmp_path, content, words):
    message = error_of(save(tmp_path / "a.csv", content))
    assert message.startswith(str(tmp_path / "a.csv"))
    assert words in message


def test_long_cells_are_read_and_the_module_limit_is_set_back(tmp_path):
    before = csv.field_size_limit()
    path = save(tmp_path / "a.csv", b"id,note\n1," + b"x" * (before + 1) + b"\n")
    ((_, record),) = read(path)
    assert len(record["note"]) == before + 1
    assert csv.field_size_limit() == before


def test_parquet_reads_known_columns_in_batches(tmp_path):
    n = 5000  # more than one batch
    pq.write_table(pa.table({"id": range(n), "other": ["x"] * n}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [(i + 1, {"id": i}) for i in range(n)]


def test_broken_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    for content in (b"", b"PAR1 not really PAR1"):
        assert "not a readable Parquet file" in error_of(save(path, content))
    pq.write_table(pa.table({"name": [1]}), path)
    assert "no column id; the header has name" in error_of(path)
    undecodable = pa.Array.from_buffers(pa.utf8(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xe9")])
    pq.write_table(pa.table({"id": undecodable}), path)
    assert "text that is not UTF-8" in error_of(path)


def test_writing_replaces_whole_or_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    write_jsonl([{"id": "ü"}, {"id": 2}], path)
    assert path.read_bytes() == '{"id": "ü"}\n{"id": 2}\n'.encode()

    def fail(self: Path, data: bytes) -> int:
        with self.open("wb") as stream:
            stream.write(data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(CalibError, match="No space left on device") as caught:
        write_jsonl([{"id": 3}], path)
    assert caught.value.exit_code == 1  # a failure of the disk, not of the user
    assert [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").splitlines()] == ["ü", 2]
    assert list(tmp_path.iterdir()) == [path]


def test_names():
    assert stem(Path("x/a.b.jsonl.gz")) == "a.b"
    assert stem(Path("x/a.CSV")) == "a"
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
