"""From files to documents, and every way in which a file can be unusable."""

import gzip
import json

import pytest

from megatron_ext.tools import data_documents
from megatron_ext.tools.data_documents import Document, ReadOptions, SourceReader
from megatron_ext.tools.data_sources import find_sources


def _read(path, **options):
    named = options.pop("named", True)
    (source,) = find_sources([str(path if named else path.parent)], suffixes=[path.suffix])
    reader = SourceReader(source, ReadOptions(**options))
    items = list(reader)
    assert reader.position == path.stat().st_size
    return items


def _only_problem(path, **options):
    (problem,) = _read(path, **options)
    return problem


def test_a_text_file_is_one_document_as_it_is(tmp_path):
    path = tmp_path / "a.txt"
    text = "\ufeffone\r\n\n\ttwo  \x0c\u2028 \u00e9\U0001f600\n"
    path.write_bytes(text.encode())
    assert _read(path) == [Document(text, len(text.encode()))]


def test_a_jsonl_line_is_one_document_and_blank_lines_are_none(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\n"}\n\n{"id": 3, "text": "\\u00e9\\u0000"}\r\n  \n{"text": "last"}')
    assert _read(path) == [Document("one\n", 4), Document("\u00e9\x00", 3), Document("last", 4)]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_gzip(tmp_path, name):
    path = tmp_path / name
    line = b'{"text": "one"}\n'
    path.write_bytes(gzip.compress(line))
    assert [item.text for item in _read(path)] == [line.decode() if "txt" in name else "one"]


def test_broken_gzip(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(b"plain text")
    assert "a.txt.gz: is no valid gzip file" in str(_only_problem(path))
    path.write_bytes(gzip.compress(b"text" * 1000)[:-20])
    assert "is no valid gzip file" in str(_only_problem(path))


def test_json_key(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "x"}\n')
    assert _read(path, json_key="content") == [Document("x", 1)]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_empty_file_is_reported_and_stops_nothing(tmp_path, name):
    (tmp_path / name).touch()
    problem = _only_problem(tmp_path / name, errors="stop")
    assert (problem.kind, problem.fatal) == ("empty file", False)


def test_empty_json_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    problem = _only_problem(tmp_path / "a.jsonl")
    assert (problem.kind, problem.fatal) == ("empty text", False)


def test_binary_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\0def")
    assert "a.txt (byte 3): is binary" in str(_only_problem(tmp_path / "a.txt"))


def test_undecodable_text_names_the_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc \xe9 def")
    assert "a.txt: is not UTF-8 at byte 4 (0xe9); convert it" in str(_only_problem(tmp_path / "a.txt"))


def test_undecodable_json_line_names_line_and_byte(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xff"}\n')
    document, problem = _read(tmp_path / "a.jsonl")
    assert document.text == "x"
    assert "a.jsonl:2: is not UTF-8 at byte 24 (0xff)" in str(problem)


def test_undecodable_gzip_says_which_bytes_are_counted(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a\xff"))
    assert "byte 1 of the unpacked text" in str(_only_problem(tmp_path / "a.txt.gz"))


def test_lone_surrogate(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n')
    assert "a.jsonl:1: has the lone surrogate U+D800" in str(_only_problem(path))
    assert _read(path, errors="replace") == [Document("a\ufffdb", 5)]


def test_replace_puts_the_replacement_character(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\xffb")
    assert _read(tmp_path / "a.txt", errors="replace") == [Document("a\ufffdb", 5)]


@pytest.mark.parametrize(
    ("named", "errors", "fatal"),
    [
        (True, None, True),
        (False, None, False),
        (True, "skip", False),
        (False, "stop", True),
        (True, "replace", True),
        (False, "replace", False),
    ],
)
def test_what_stops_the_run(tmp_path, named, errors, fatal):
    (tmp_path / "a.txt").write_bytes(b"\0")
    assert _only_problem(tmp_path / "a.txt", named=named, errors=errors).fatal is fatal


def test_bad_json_names_the_line_and_reading_goes_on(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": \n{"text": "y"}\n')
    items = _read(tmp_path / "a.jsonl")
    assert [item.text for item in items if isinstance(item, Document)] == ["x", "y"]
    assert "a.jsonl:2: is no valid JSON" in str(items[1])


def test_deeply_nested_json_is_bad_json(tmp_path):
    (tmp_path / "a.jsonl").write_text("[" * 200_000)
    assert _only_problem(tmp_path / "a.jsonl").kind == "bad JSON"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"content": "x", "id": 1}', "has no key 'text' (its keys: 'content', 'id'); give the right one"),
        ("{}", "(its keys: none)"),
        ('["x"]', "is a JSON list where an object"),
        ('{"text": 3}', "has a int under 'text' where a string is needed"),
    ],
)
def test_missing_json_key(tmp_path, line, what):
    (tmp_path / "a.jsonl").write_text(line + "\n")
    problem = _only_problem(tmp_path / "a.jsonl")
    assert problem.kind == "missing JSON key"
    assert what in str(problem)
    assert ":1: " in str(problem)


def test_huge_line_in_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\u00e9" * 10 + "\n" + "\u00e9" * 11 + "\n")
    assert "a line of 11 characters, over the limit of 10; " in str(_only_problem(path, max_line_chars=10))
    assert len(_read(path, max_line_chars=11)) == 1


def test_huge_json_line_is_passed_over_without_holding_it(tmp_path):
    path = tmp_path / "a.jsonl"
    good = json.dumps({"text": "good"}) + "\n"
    path.write_text(
        json.dumps({"text": "x" * 500}) + "\n" + good + json.dumps({"text": "x" * 20}) + "\n" + good
    )
    first, good1, second, good2 = _read(path, max_line_chars=len(good) - 1)
    assert (good1.text, good2.text) == ("good", "good")
    assert "a.jsonl:1: has a line over the limit of 16" in str(first)
    assert "a.jsonl:3: has a line of 32 characters, over the limit of 16" in str(second)


def test_huge_last_json_line_without_newline(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("x" * 1000)
    assert _only_problem(path, max_line_chars=10).kind == "huge line"


def test_huge_file(tmp_path, monkeypatch):
    monkeypatch.setattr(data_documents, "MAX_DOCUMENT_BYTES", 2**20)
    (tmp_path / "a.txt").write_bytes(b"x\n" * 2**20)
    assert "a.txt: is over 1 MiB, and a text file is one document" in str(_only_problem(tmp_path / "a.txt"))


def test_file_that_went_away(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x")
    (source,) = find_sources([str(path)])
    path.unlink()
    (problem,) = SourceReader(source, ReadOptions())
    assert "a.txt: cannot be read: No such file" in str(problem)
