"""Tables of the benchmark of 3-D linear layers."""

from itertools import groupby

STOCK = "1-D as shipped"
BASE = "1-D"


def report(rows: list[dict]) -> str:
    """For every setting times and ratios, those of one run; then how steps scale with ranks. Markdown."""
    order = lambda row: (row["ranks"], row["shape"], row["rate"] or 0, row["save"], row["gflops"] or 0)  # noqa: E731
    parts = []
    for (ranks, shape, rate, save, gflops), group in groupby(sorted(rows, key=order), key=order):
        seq, batch, hidden, heads = shape
        found = list(group)
        links = f"{rate / 1e6:g} Mbit/s a rank" if rate else "links without limits"
        speed = f"; matrix products at {gflops:g} GFLOP/s a rank" if gflops else ""
        parts.append(
            f"## {ranks} ranks, {links}\n\n{seq} x {batch} tokens, h {hidden}, {heads} heads; save policy "
            f"{save}{speed}\n\n{table(found, batch)}\n\n{ratios(found)}\n"
        )
    return "\n".join([*parts, *scaling(rows)])


def table(rows: list[dict], batch: int) -> str:
    """Times of the slowest rank, bytes of the busiest."""
    head = (
        "| method | forward | backward | step | per sample | products alone | of the step | MB sent "
        "| peak MB | multiply-adds |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    lines = [
        f"| {row['method']} | {row['forward_s']:.3f} s | {row['backward_s']:.3f} s | {row['step_s']:.3f} s | "
        f"{row['step_s'] / batch * 1e3:.1f} ms | {products(row):.3f} s | "
        f"{100 * products(row) / row['step_s']:.0f} % | {row['bytes'] / 1e6:.2f} | "
        f"{row['peak_bytes'] / 1e6:.2f} | {row['macs'] / 1e6:.1f} M |"
        for row in rows
    ]
    return "\n".join([head, *lines])


def products(row: dict) -> float:
    """Seconds of the matrix products."""
    return row["macs"] / (row["gflops"] * 5e8) if row["gflops"] else row["products_s"]


def ratios(rows: list[dict]) -> str:
    """Every grid against everything else: times, bytes, and how far they differ."""
    grids = [row for row in rows if row["method"].startswith("3-D")]
    others = [row for row in rows if not row["method"].startswith("3-D")]
    lines = ["| grid | against | times less time | times fewer bytes | off |\n|---|---|---|---|---|"]
    for row in grids:
        for other in others:
            time, sent = other["step_s"] / row["step_s"], other["bytes"] / row["bytes"]
            off = f"{100 * (time / sent - 1):+.0f} %"
            lines.append(f"| {row['method']} | {other['method']} | {time:.2f} | {sent:.2f} | {off} |")
    return "\n".join(lines)


def scaling(rows: list[dict]) -> list[str]:
    """Steps by the number of ranks: of the same tokens (strong) and of tokens that grow with ranks (weak)."""

    def strong(row: dict) -> tuple:
        return "strong", row["shape"], *_links(row)

    def weak(row: dict) -> tuple:
        seq, batch, *rest = row["shape"]
        return "weak", [seq, batch / row["ranks"], *rest], *_links(row)

    parts = []
    for key in (strong, weak):
        for (kind, *_), group in groupby(sorted(rows, key=key), key=key):
            found = list(group)
            counts = sorted({row["ranks"] for row in found})
            if len(counts) > 1:
                parts.append(f"## {kind.capitalize()} scaling\n\n{_steps(found, counts)}\n")
    return parts


def _links(row: dict) -> tuple:
    return row["rate"] or 0, row["save"], row["gflops"] or 0


def _steps(rows: list[dict], counts: list[int]) -> str:
    """One line for each kind of method."""
    lines = [
        "| | " + " | ".join(f"{ranks} ranks" for ranks in counts) + " |",
        "|---" * (len(counts) + 1) + "|",
    ]
    for kind in dict.fromkeys(map(_kind, rows)):
        cells = []
        for ranks in counts:
            own = [row for row in rows if row["ranks"] == ranks and _kind(row) == kind]
            best = min(own, key=lambda row: row["step_s"], default=None)
            cells.append(f"{best['step_s']:.3f} s, {best['peak_bytes'] / 1e6:.2f} MB" if best else "")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _kind(row: dict) -> str:
    """A method without its sizes; cubes stand beside the best grid."""
    name, _, rest = row["method"].partition(" ")
    if name != "3-D":
        return row["method"] if name == "1-D" else name + (", panels in turn" if "in turn" in rest else "")
    sizes = rest.split(",")[0].split(" x ")
    return "3-D, cube" if len(set(sizes)) == 1 else "3-D, best grid"
