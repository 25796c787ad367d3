"""Colours of schedule pictures: one per kind of action, for light and dark pages; and the legend."""

from collections.abc import Sequence
from html import escape

from megatron_ext.schedules.render_panel import WORDS, Panel, kinds_of

FILLS = {
    # Blocks carry dark text, so their fills are light on both pages.
    "F": "#8db8f2",
    "B": "#79cfa3",
    "W": "#c9d98a",
    "S": "#f8b26a",
    "U": "#f19a9a",
    "T": "#f3d55c",
    "L": "#c9a5f0",
    "IF": "#b5dbe4",
    "IB": "#8fbfae",
    # Transfers are thin and carry no text.
    "e": "#2aa5bd",
    "g": "#1f8468",
    "C0": "#d9822b",
    "C1": "#d1495b",
    "C2": "#a23fa0",
    "C3": "#6b4fc4",
    "G": "#8a8f98",
    "SF": "#3d78cf",
    "RF": "#6d9fe6",
    "SB": "#23905b",
    "RB": "#56bd88",
}
_LIGHT = {
    "card": "#ffffff",
    "ink": "#1b2330",
    "soft": "#5a6575",
    "rule": "#dfe3e9",
    "idle": "#eef0f4",
    "hatch": "#cfd5de",
    "wait": "#f7dcdf",
}
_DARK = {
    "card": "#1a2029",
    "ink": "#e6eaf0",
    "soft": "#9da8b7",
    "rule": "#343e4b",
    "idle": "#242c37",
    "hatch": "#3d4756",
    "wait": "#5a323a",
}


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


STYLE = (
    ".sched { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif; }\n"
    f".sched {{ {_variables(_LIGHT)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ .sched {{ {_variables(_DARK)} }} }}\n"
    ".sched .card { fill: var(--card); }\n"
    ".sched text { fill: var(--ink); font-size: 12px; font-variant-numeric: tabular-nums; }\n"
    ".sched .title { font-size: 18px; font-weight: 600; }\n"
    ".sched .head { font-size: 13.5px; font-weight: 600; }\n"
    ".sched .soft { fill: var(--soft); font-size: 11px; }\n"
    ".sched .on { fill: #10151c; font-size: 10.5px; text-anchor: middle; pointer-events: none; }\n"
    ".sched .idle { fill: var(--idle); }\n"
    ".sched .hatch { stroke: var(--hatch); stroke-width: 1.1; }\n"
    ".sched .wait { fill: var(--wait); }\n"
    ".sched .lane { fill: var(--idle); opacity: 0.6; }\n"
    ".sched .pale { opacity: 0.32; }\n"
    ".sched .rule { stroke: var(--rule); fill: none; }\n"
    ".sched .end { stroke: var(--ink); stroke-dasharray: 4 3; fill: none; opacity: 0.7; }\n"
    ".sched .flying { stroke: var(--ink); fill: none; stroke-width: 1.2; stroke-linejoin: round; }\n"
    ".sched .under { fill: var(--soft); opacity: 0.16; }\n"
    ".sched .block { stroke: var(--card); stroke-width: 0.6; }\n"
    ".sched .block:hover, .sched .thin:hover { stroke: var(--ink); stroke-width: 1.4; }\n"
    + "".join(f".sched .k-{kind} {{ fill: {fill}; }}\n" for kind, fill in FILLS.items())
)

COMM_LANES = ("comm", "p2p-f", "p2p-b")


def legend(panels: Sequence[Panel], left: float, right: float, y: float) -> tuple[list[str], float]:
    """Samples of all that the panels show, in lines from `y` down, and the y below them."""
    spans = [span for panel in panels for span in panel.timeline.spans]
    passes, transfers = kinds_of(spans, ("compute",)), kinds_of(spans, COMM_LANES)
    entries = [(f"k-{kind}", WORDS[kind], 11) for kind in passes]
    entries.append(("bubble", "bubble", 11))
    if any(panel.waits for panel in panels):
        entries.append(("wait", "waits for a transfer (measured)", 11))
    entries += [(f"k-{kind}", WORDS[kind], 5) for kind in transfers]
    if transfers and any(panel.waits for panel in panels):
        entries.append(("pale", "pale: the other side is not there yet", 5))
    entries.append(("line", "microbatches in flight", 0))
    body, x = [], left
    for css, words, height in entries:
        width = 32 + 6.4 * len(words)
        if x + width > right and x > left:
            x, y = left, y + 18
        body.append(_sample(css, x, y, height))
        body.append(f'<text class="soft" x="{x + 18:.1f}" y="{y + 9:.1f}">{escape(words)}</text>')
        x += width
    return body, y + 20


def _sample(css: str, x: float, y: float, height: int) -> str:
    if css == "line":
        return f'<path class="flying" d="M{x:.1f} {y + 9:.1f}h5v-6h4v3h4"/>'
    top = y + (11 - height) / 2
    box = f'x="{x:.1f}" y="{top:.1f}" width="13" height="{height}"'
    if css == "bubble":
        return f'<rect class="idle" {box}/><rect fill="url(#bubble)" {box}/>'
    if css == "pale":
        return f'<rect class="k-C1 pale" {box}/>'
    return f'<rect class="{css}" {box}/>'
