"""Numbers as people read them. Exact values go to the JSON and CSV files."""

import math

_BINARY = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def byte_unit(most: float) -> tuple[float, str]:
    """(bytes per unit, unit name) fit for showing values up to `most` bytes."""
    return next(((size, unit) for size, unit in _BINARY if most >= size), (1, "B"))


def time_unit(most: float) -> tuple[float, str]:
    """(seconds per unit, unit name) fit for showing values up to `most` seconds."""
    return next(((size, unit) for size, unit in _SECONDS if most >= size), _SECONDS[-1])


def _digits(value: float) -> str:
    """Three significant digits, or all digits of a larger whole part: 0.412, 9.93, 41.2, 1,024."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def human_bytes(count: float | None) -> str:
    """1536 -> "1.50 KiB"; below 1 KiB a whole count of bytes stays whole; None -> "-"."""
    if count is None:
        return "-"
    size, unit = byte_unit(count)
    return f"{count:.0f} B" if size == 1 and count == int(count) else f"{_digits(count / size)} {unit}"


def human_time(seconds: float | None) -> str:
    """0.0412 -> "41.2 ms"; None -> "-"."""
    if seconds is None:
        return "-"
    size, unit = time_unit(seconds)
    return f"{_digits(seconds / size)} {unit}"


def human_rate(per_second: float | None) -> str:
    """9934.2 -> "9,934"; None -> "-"."""
    return "-" if per_second is None else _digits(per_second)


def human_difference(value: float | None) -> str:
    """A relative difference: 3.14e-7 -> "3.1e-07", 0 -> "0", None -> "-"."""
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.1e}"


def human_loss(value: float | None) -> str:
    """Seven significant digits, about what fp32 holds; None -> "-"; non-finite values in capitals."""
    if value is None:
        return "-"
    return f"{value:#.7g}" if math.isfinite(value) else str(value).replace("nan", "NaN")
