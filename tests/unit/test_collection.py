"""What pytest leaves out."""

from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_no_folder_of_tests_is_left_out(request):
    """pytest passes by folders of some names, `dist` among them, without a word."""
    left_out = request.config.getini("norecursedirs")
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    assert {"unit", "dist", "functional", "contract", "docs"} <= {folder.name for folder in folders}
    for folder in folders:
        for part in folder.relative_to(TESTS.parent).parts:
            assert not any(fnmatch(part, pattern) for pattern in left_out), (folder, left_out)
