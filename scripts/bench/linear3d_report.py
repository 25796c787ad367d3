"""Tables of the benchmark of 3-D linear layers."""

from itertools import groupby

STOCK = "1-D as shipped"
BASE = "1-D"


def report(rows: list[dict]) -> str:
    """One table for every setting, in Markdown; ratios are those of one run."""
    order = lambda row: (row["ranks"], row["shape"], row["rate"] or 0, row["save"], row["overlap"])  # noqa: E731
    parts = []
    for (ranks, shape, rate, save, overlap), group in groupby(sorted(rows, key=order), key=order):
        seq, batch, hidden, heads = shape
        links = f"{rate / 1e6:g} Mbit/s a rank" if rate else "links without limits"
        parts.append(
            f"## {ranks} ranks, {links}\n\n{seq} x {batch} tokens, h {hidden}, {heads} heads; save policy "
            f"{save}, overlap {overlap}\n\n{table(list(group), batch)}\n"
        )
    return "\n".join(parts)


def table(rows: list[dict], batch: int) -> str:
    """Times of the slowest rank, bytes of the busiest, and both against 1-D."""
    base = next((row for row in rows if row["method"] == BASE), rows[0])
    head = (
        "| method | forward | backward | step | per sample | against 1-D | MB sent | 1-D's bytes over these "
        "| peak MB | multiply-adds |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    lines = [
        f"| {row['method']} | {row['forward_s']:.3f} s | {row['backward_s']:.3f} s | {row['step_s']:.3f} s | "
        f"{row['step_s'] / batch * 1e3:.1f} ms | {base['step_s'] / row['step_s']:.2f} x | "
        f"{row['bytes'] / 1e6:.2f} | {base['bytes'] / row['bytes'] if row['bytes'] else float('inf'):.2f} x "
        f"| {row['peak_bytes'] / 1e6:.2f} | {row['macs'] / 1e6:.1f} M |"
        for row in rows
    ]
    return "\n".join([head, *lines])
