"""What `megatron-ext trace` says about timelines: titles, notes, and tables for the terminal and the page."""

from collections.abc import Sequence

from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.render_html import Table
from megatron_ext.schedules.render_panel import Panel, Units
from megatron_ext.schedules.render_text import percent, rank_rows
from megatron_ext.schedules.simulate import Span
from megatron_ext.schedules.transfers import Share, gaps, transfer, vocabulary_shares
from megatron_ext.tools.trace_read import MEASURED, Measured

# Of the unit of one forward pass. vocab-2 has two of the three matrix products in S, the others one.
_UNIT_COSTS = {
    "off": {},
    "naive": {"output_s": 0.15, "output_u": 0.05, "output_t": 0.4},
    "vocab-1": {"output_s": 0.2, "output_t": 0.4},
    "vocab-2": {"output_s": 0.4, "output_t": 0.2},
    "interlaced": {"output_s": 0.2, "output_t": 0.4},
}
_LETTERS = {"output_s": "S", "output_u": "U", "output_t": "T"}


def unit_costs(vocab: str) -> Costs:
    """Costs where none are given."""
    return Costs(**_UNIT_COSTS[vocab])


def unit_words(vocab: str) -> str:
    """What those costs are."""
    parts = [
        "F = 1",
        "B = 2",
        *(f"{_LETTERS[name]} = {value:g}" for name, value in _UNIT_COSTS[vocab].items()),
    ]
    return f"{', '.join(parts)}, everything else 0 (no --costs FILE was given)"


def schedule_words(panel: Panel) -> str:
    """ "1F1B with vocab-2, p = 8, m = 16" and what is special."""
    program = panel.timeline.program
    schedule = program.schedule
    vocab = "without vocabulary parallelism" if schedule.vocab == "off" else f"with {schedule.vocab}"
    words = f"{schedule.pipeline.upper()} {vocab}, p = {schedule.p}, m = {schedule.m}"
    words += ", forward only" if schedule.forward_only else ""
    return words if program.overlap else f"{words}, without overlap"


def title(panels: Sequence[Panel], units: Units) -> str:
    """The schedule with its makespan and mean bubble; planned and measured, with both makespans."""
    words = schedule_words(panels[0])
    if len(panels) == 1:
        timeline = panels[0].timeline
        return f"{words}: makespan {units.text(timeline.makespan)}, bubble {percent(panels[0].mean_bubble())}"
    makespans = ", ".join(f"{panel.name} {units.text(panel.timeline.makespan)}" for panel in panels)
    return f"{words}: makespan {makespans}"


def measured_notes(measured: Measured, costs: str) -> list[str]:
    """Where the numbers come from, and what to know about them."""
    notes = [f"Measured: step {measured.step}. Planned: the same schedule, simulated with {costs}."]
    if not measured.static:
        notes.append("The run did not have the static order of passes; the plan has the run's order.")
    if measured.replicas > 1:
        notes.append(
            f"Each stage has {measured.replicas} ranks; shown is number {measured.replica} of each "
            f"(--replica 0 to {measured.replicas - 1})."
        )
    if (skew := clock_skew(measured.panel)) > 0:
        notes.append(
            f"Clocks of the ranks differ by {skew * 1e3:.3g} ms or more: data arrived before it was sent. "
            "Times of transfers are no better than that."
        )
    return notes


def clock_skew(panel: Panel) -> float:
    """Seconds by which a receive ended before its send began, at most: 0 where clocks agree."""
    place = panel.timeline.program.schedule.place
    sends = {transfer(s, place): s.start for s in panel.timeline.spans if s.action.kind in ("SF", "SB")}
    skew = 0.0
    for span in panel.timeline.spans:
        if span.action.kind in ("RF", "RB"):
            skew = max(skew, sends[transfer(span, place)] - span.end)
    return skew


def tables(panels: Sequence[Panel], units: Units) -> list[Table]:
    """The tables of one timeline, or of a planned and a measured one."""
    if len(panels) == 1:
        about = (
            "Bubble: share of the makespan in which a rank does not compute. In flight: most microbatches, "
            "or where ranks have several chunks, most of their activations."
        )
        found = [Table("Ranks", rank_rows(panels[0], units), about)]
    else:
        found = [_makespans(panels, units), _both_ranks(panels, units)]
    return [*found, *_transfer_table(panels, units)]


def _makespans(panels: Sequence[Panel], units: Units) -> Table:
    planned, measured = (panel.timeline.makespan for panel in panels)
    rows = [
        ["", "makespan", "bubble"],
        *(
            [panel.name, units.text(panel.timeline.makespan), percent(panel.mean_bubble())]
            for panel in panels
        ),
        ["measured / planned", f"{measured / planned:.3f}", ""],
    ]
    return Table("Step", rows)


def _both_ranks(panels: Sequence[Panel], units: Units) -> Table:
    names = (f"busy ({units.name})", "bubble", f"waits ({units.name})", "in flight")
    rows = [["rank", *(f"{name}\n{panel.name}" for name in names for panel in panels)]]
    for rank in range(panels[0].p):
        cells = [_rank_cells(panel, rank, units) for panel in panels]
        rows.append([str(rank), *(cell for pair in zip(*cells, strict=True) for cell in pair)])
    about = (
        "Waits: time before passes in which the rank had nothing to do; measured with overlap, what passes "
        "waited for transfers. The rest of a bubble is the end of the step, and work between passes."
    )
    return Table("Ranks", rows, about)


def _rank_cells(panel: Panel, rank: int, units: Units) -> list[str]:
    timeline = panel.timeline
    waited = sum(span.end - span.start for span in _waits(panel) if span.rank == rank)
    return [
        units.number(timeline.busy(rank)),
        percent(timeline.bubble(rank)),
        units.number(waited),
        str(timeline.in_flight_peak(rank)),
    ]


def _waits(panel: Panel) -> tuple[Span, ...]:
    """Recorded waits; without overlap launches hold the rank, and it is the gaps between passes."""
    recorded = panel.name == MEASURED and panel.timeline.program.overlap
    return panel.waits if recorded else gaps(panel.timeline)


def _transfer_table(panels: Sequence[Panel], units: Units) -> list[Table]:
    """Vocabulary communication by kind; no table where there is none."""
    p = panels[0].p
    shares = [vocabulary_shares(panel.timeline, _waits(panel)) for panel in panels]
    kinds = [kind for kind in ("e", "C0", "C1", "C2", "C3", "G", "g") if any(kind in of for of in shares)]
    if not any(share.moved for of in shares for share in of.values()):
        return []
    # A simulated transfer takes time only once all its ranks are there.
    columns = [f"moving ({units.name})", "hidden", "exposed", f"early ({units.name})"]
    heads = [[f"{column}\n{panel.name}" for panel in panels] for column in columns]
    heads = [*heads[:3], heads[3][1:]] if len(panels) > 1 else [[column] for column in columns[:3]]
    rows = [["collective", *(cell for group in heads for cell in group)]]
    for name in (*kinds, "all"):
        shown = [sum(of.values(), Share()) if name == "all" else of.get(name, Share()) for of in shares]
        moving, hidden, exposed, early = zip(*(_share_cells(share, p, units) for share in shown), strict=True)
        rows.append([name, *moving, *hidden, *exposed, *early[1:]])
    about = (
        "Per rank, averaged. Moving: time from when the ranks that it needs had launched it to its end. Of "
        "that, hidden: beside a pass of the same rank; exposed: a pass waited for it; the rest passed while "
        "the rank waited for another stage."
    )
    if len(panels) > 1:
        about += " Early: time before the other ranks came."
    return [Table("Vocabulary communication", rows, about)]


def _share_cells(share: Share, p: int, units: Units) -> list[str]:
    def part(time: float) -> str:
        return percent(time / share.moved) if share.moved else "-"

    return [
        units.number(share.moved / p),
        part(share.hidden),
        part(share.exposed),
        units.number(share.early / p),
    ]
