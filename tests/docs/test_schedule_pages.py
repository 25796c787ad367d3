"""The table of schedules on its page is what schedule objects give, and the example of a new one works."""

import re
from pathlib import Path

from megatron_ext.schedules import families, table

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_is_computed():
    page = (DOCS / "pipeline-schedules.md").read_text()
    missing = [line for line in table.lines() if line not in page]
    assert missing == []


def test_the_example_of_a_new_schedule_runs(capsys):
    """Both blocks of code run as they stand; the new family is gone afterwards."""
    text = (DOCS / "adding-a-schedule.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    before = dict(families.FAMILIES)
    try:
        exec(compile("\n".join(blocks), "adding-a-schedule.md", "exec"), {})
    finally:
        families.FAMILIES.clear()
        families.FAMILIES.update(before)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in printed] == ["off", "vocab-1", "vocab-2"]
    makespans = [float(words[1]) for words in printed]
    held = [int(words[2]) for words in printed]
    # F, B of 8 microbatches on 4 ranks; half as many held as the 4 of 1F1B, and one more for each barrier.
    assert held == [2, 4, 3]
    assert all(makespan >= 24 + 9 for makespan in makespans)
