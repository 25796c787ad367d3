"""Rates and sizes as people write them: 400mbit, 80gbit, 80GB, 74.5GiB."""

import re

_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SIZES = {"mb": 1e6, "gb": 1e9, "tb": 1e12, "mib": 2**20, "gib": 2**30, "tib": 2**40}
RATE_EXAMPLE, SIZE_EXAMPLE = "400mbit or 80gbit", "80GB or 74.5GiB"


def parse_rate(text: str) -> float | None:
    """Bytes per second of a text such as 400mbit; None if it is none, or 0."""
    value = _scaled(text, _RATES)
    return value / 8 if value else None


def parse_size(text: str) -> int | None:
    """Bytes of a text such as 80GB; None if it is none."""
    value = _scaled(text, _SIZES)
    return None if value is None else round(value)


def rate_text(bytes_per_s: float) -> str:
    """5e7 -> "400 Mbit/s"."""
    bits = 8 * bytes_per_s
    unit = next((unit for unit in ("tbit", "gbit", "mbit") if bits >= _RATES[unit]), "kbit")
    return f"{bits / _RATES[unit]:.4g} {unit[0].upper() if unit != 'kbit' else 'k'}bit/s"


def _scaled(text: str, units: dict[str, float]) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]+)", text.lower())
    return float(match[1]) * units[match[2]] if match and match[2] in units else None
