"""A bar chart as SVG, for the benchmarks' results."""

from html import escape

WIDTH, LABEL, BAR, GAP = 900, 420, 16, 6


def bars(rows: list[tuple[str, float]], unit: str) -> str:
    """One horizontal bar for each (label, value), with the value behind it."""
    most = max((value for _, value in rows), default=1.0) or 1.0
    height = len(rows) * (BAR + GAP) + 40
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LABEL}" y="18" fill="#555">{escape(unit)}</text>',
    ]
    for index, (label, value) in enumerate(rows):
        y = 28 + index * (BAR + GAP)
        length = (WIDTH - LABEL - 80) * value / most
        out.append(f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(label)}</text>')
        out.append(f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" fill="#4878a8"/>')
        out.append(f'<text x="{LABEL + length + 6:.1f}" y="{y + 12}" fill="#222">{value:g}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
