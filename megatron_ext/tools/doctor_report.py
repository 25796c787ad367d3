"""What `doctor` finds, and how it is shown."""

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

WIDTH = 110
_NAME_COLUMN = 22
_INDENT = " " * (6 + _NAME_COLUMN)


@dataclass(frozen=True)
class Finding:
    """One line of the report; `fix` says what to do about a warning or a failure."""

    level: Literal["ok", "warn", "FAIL"]
    name: str
    value: str
    fix: str = ""


def text(finding: Finding) -> str:
    """Aligned lines, wrapped, the fix below."""
    lines = textwrap.wrap(
        finding.value,
        WIDTH,
        initial_indent=f"{finding.level:<6}{finding.name:<{_NAME_COLUMN}}",
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if finding.fix:
        lines += textwrap.wrap(
            f"-> {finding.fix}",
            WIDTH,
            initial_indent=_INDENT,
            subsequent_indent=_INDENT + "   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def verdict(findings: Iterable[Finding], asked: str) -> str:
    """The last line of the report."""
    levels = [finding.level for finding in findings]
    failed, warned = levels.count("FAIL"), levels.count("warn")
    if failed:
        return f"not healthy for {asked}: {failed} to fix (FAIL), {warned} to look at (warn)"
    return f"healthy for {asked}" + (f", {warned} to look at (warn)" if warned else "")


def as_json(findings: Iterable[Finding], asked: str) -> str:
    """The whole report for scripts."""
    findings = list(findings)
    healthy = all(finding.level != "FAIL" for finding in findings)
    return json.dumps(
        {"healthy": healthy, "asked": asked, "checks": [asdict(finding) for finding in findings]}, indent=2
    )
