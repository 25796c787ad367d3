"""Which files `megatron-ext data` reads, and in which order."""

import os

import pytest

from megatron_ext.tools.data_errors import DataError
from megatron_ext.tools.data_sources import find_sources


def _write(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def _names(root, sources):
    return [os.path.relpath(source.path, root) for source in sources]


def test_folders_are_walked_in_sorted_order_by_suffix(tmp_path):
    _write(tmp_path, "b.py", "a/z.txt", "a/B.MD", "c.bin", "a/data.jsonl.gz", "notes", "x.py.gz")
    assert _names(tmp_path, find_sources([str(tmp_path)])) == [
        "b.py",
        "x.py.gz",
        "a/B.MD",
        "a/data.jsonl.gz",
        "a/z.txt",
    ]


def test_hidden_names_and_caches_are_skipped(tmp_path):
    _write(tmp_path, "a.py", ".git/b.py", ".hidden.py", "__pycache__/c.py", "pkg/node_modules/d.js")
    assert _names(tmp_path, find_sources([str(tmp_path)])) == ["a.py"]


def test_exclude_takes_names_and_patterns_at_any_depth(tmp_path):
    _write(tmp_path, "a.py", "test/b.py", "pkg/tests/c.py", "pkg/test_d.py", "pkg/attest.py")
    assert _names(tmp_path, find_sources([str(tmp_path)], exclude=["test", "tests", "test_*"])) == [
        "a.py",
        "pkg/attest.py",
    ]


def test_suffixes_replace_the_default(tmp_path):
    _write(tmp_path, "a.py", "b.foo")
    assert _names(tmp_path, find_sources([str(tmp_path)], suffixes=[".foo"])) == ["b.foo"]


def test_named_files_are_taken_whatever_their_suffix_and_only_once(tmp_path):
    _write(tmp_path, "LICENSE", "a.py")
    named = str(tmp_path / "LICENSE")
    sources = find_sources([named, str(tmp_path), named], never=[str(tmp_path / "none.py")])
    assert _names(tmp_path, sources) == ["LICENSE", "a.py"]
    assert [source.named for source in sources] == [True, False]


def test_own_outputs_are_no_input(tmp_path):
    _write(tmp_path, "a.txt", "out.txt")
    sources = find_sources([str(tmp_path)], never=[str(tmp_path / "out.txt")])
    assert _names(tmp_path, sources) == ["a.txt"]


def test_size_and_time_are_recorded(tmp_path):
    _write(tmp_path, "a.txt")
    os.utime(tmp_path / "a.txt", ns=(5, 7))
    (source,) = find_sources([str(tmp_path / "a.txt")])
    assert (source.size, source.mtime_ns) == (5, 7)


def test_missing_input(tmp_path):
    with pytest.raises(DataError, match=r"--input .*nowhere does not exist"):
        find_sources([str(tmp_path / "nowhere")])


def test_nothing_found_names_the_suffixes_and_the_exclusions(tmp_path):
    _write(tmp_path, "a.bin", "test/a.py")
    with pytest.raises(DataError, match=r"no input file found .*--exclude test.*\.txt .*--suffixes"):
        find_sources([str(tmp_path)], exclude=["test"])


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a regular file nor a folder"):
        find_sources([str(tmp_path / "pipe")])


def test_dangling_links_in_folders_are_skipped_and_named_ones_refused(tmp_path):
    _write(tmp_path, "a.py")
    (tmp_path / "b.py").symlink_to(tmp_path / "gone")
    assert _names(tmp_path, find_sources([str(tmp_path)])) == ["a.py"]
    with pytest.raises(DataError, match=r"b\.py is a link to a file that does not exist"):
        find_sources([str(tmp_path / "b.py")])
