"""The picture and the page: geometry of small timelines with known numbers, read back from the SVG."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from megatron_ext.schedules import render_svg
from megatron_ext.schedules.action import Action
from megatron_ext.schedules.build import build
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.lower import lower
from megatron_ext.schedules.render_html import Table, page
from megatron_ext.schedules.render_panel import Panel, Window, units_of
from megatron_ext.schedules.simulate import Span, simulate

_NUMBER = re.compile(r"\d+(\.\d+)?")
SVG = "{http://www.w3.org/2000/svg}"


def _panel(p: int, m: int, vocab: str = "off", costs: Costs | None = None, **options) -> Panel:
    return Panel("planned", simulate(lower(build(p, m, vocab=vocab), **options), costs or Costs()))


def _draw(*panels: Panel, window: Window | None = None) -> ET.Element:
    return ET.fromstring(render_svg.picture(panels, units_of(panels, False), "A title & more", window))


def _texts(root: ET.Element, css: str | None = None) -> list[str]:
    return [e.text or "" for e in root.iter(f"{SVG}text") if css is None or e.get("class") == css]


def _boxes(root: ET.Element) -> dict[str, tuple[float, float, float]]:
    """What hover says an element is, up to the colon -> (x, y, width)."""
    found = {}
    for box in root.iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None and title.text is not None:
            values = tuple(float(box.get(name, "")) for name in ("x", "y", "width"))
            found.setdefault(title.text.split(":")[0], values)
    return found


def _scale(root: ET.Element, times: tuple[float, float]) -> tuple[float, float]:
    """(x of time 0, pixels of a unit of time), from two labels of the time axis."""
    labels = [
        e for e in root.iter(f"{SVG}text") if e.get("class") == "soft" and _NUMBER.fullmatch(e.text or "")
    ]
    at = {float(e.text or ""): float(e.get("x", "")) for e in labels}
    first, second = (at[time] for time in times)
    unit = (second - first) / (times[1] - times[0])
    return first - times[0] * unit, unit


def test_blocks_are_where_the_time_axis_says():
    panel = _panel(2, 3)
    root = _draw(panel)
    zero, unit = _scale(root, (0, 10))
    boxes = _boxes(root)
    assert len(boxes) == 12
    for span in panel.timeline.spans:
        if span.lane == "compute":
            x, _, width = boxes[f"{span.action} on rank {span.rank}"]
            assert x == pytest.approx(zero + span.start * unit, abs=0.2)
            assert width == pytest.approx((span.end - span.start) * unit, abs=0.2)
    tops = [{y for name, (_, y, _) in boxes.items() if name.endswith(f"rank {r}")} for r in range(2)]
    assert [len(of_rank) for of_rank in tops] == [1, 1]
    assert max(tops[0]) < min(tops[1])


def test_title_legend_and_numbers_of_each_rank():
    words = _texts(_draw(_panel(2, 3)))
    for expected in ("A title & more", "forward pass", "backward pass", "rank 0", "rank 1", "bubble 25.0 %"):
        assert expected in words
    assert "at most 2" in words
    assert "at most 1" in words
    assert any("time" in word and "F = 1" in word for word in words)
    assert "output pass S" not in words


def test_every_wide_block_has_its_name():
    both_ranks = [f"{kind}{i}" for kind in "BF" for i in range(3) for _ in range(2)]
    assert sorted(_texts(_draw(_panel(2, 3)), "on")) == both_ranks


def test_in_flight_line_follows_the_passes():
    root = _draw(_panel(2, 3))
    zero, unit = _scale(root, (0, 10))
    lines = [e.get("d", "") for e in root.iter(f"{SVG}path") if e.get("class") == "flying"]
    line = next(d for d in lines if d.count("H") > 4)  # of rank 0, legend's sample aside
    xs = [(float(x) - zero) / unit for x in re.findall(r"H([\d.]+)", line)]
    # Rank 0: F0 0, F1 1, F2 6; B0 ends 6, B1 9, B2 12.
    assert xs[:2] == pytest.approx([0, 1], abs=0.02) or xs[:1] == pytest.approx([1], abs=0.02)
    assert xs[-4:] == pytest.approx([6, 9, 12, 12], abs=0.02)


def test_lanes_of_transfers_are_thin_below_their_rank():
    costs = Costs(output_s=1, output_t=1, comm={"C0": 0.5, "C1": 0.5, "p2p": 0.25})
    root = _draw(_panel(2, 2, "vocab-2", costs))
    zero, unit = _scale(root, (0, 10))
    boxes = _boxes(root)
    x, y, width = boxes["C0(0) on rank 1"]
    assert x == pytest.approx(zero + 2.25 * unit, abs=0.2)
    assert width == pytest.approx(0.5 * unit, abs=0.2)
    assert boxes["F0 on rank 1"][1] < y < boxes["F0 on rank 1"][1] + 50
    send, receive = boxes["SF(0) on rank 0"], boxes["RF(0) on rank 1"]
    assert send[0] == receive[0] == pytest.approx(zero + unit, abs=0.2)
    words = _texts(root)
    assert "C0: hidden states" in words
    assert "send forward" in words
    assert "G: loss gradient" not in words  # takes no time here


def test_hover_has_the_exact_times():
    titles = [e.text for e in _draw(_panel(2, 3)).iter(f"{SVG}title")]
    assert "B1 on rank 0: 7 to 9 F, 2 F" in titles


def test_the_window_cuts_blocks_at_its_edges():
    root = _draw(_panel(2, 3), window=Window(5, 8))
    zero, unit = _scale(root, (5, 8))
    boxes = _boxes(root)
    assert set(boxes) == {"B0 on rank 0", "F2 on rank 0", "B1 on rank 0", "B1 on rank 1", "F2 on rank 1"}
    x, _, width = boxes["B0 on rank 0"]
    assert x == pytest.approx(zero + 5 * unit, abs=0.2)
    assert width == pytest.approx(unit, abs=0.2)
    assert any(re.search(r"\b5( F)? to 8 F", word) for word in _texts(root))


def test_thin_blocks_have_no_labels():
    blocks = _panel(4, 64)
    wide = _draw(blocks, window=Window(0, 20))
    assert "F0" in _texts(wide, "on")
    narrow = _draw(_panel(16, 128))
    for text in (e for e in narrow.iter(f"{SVG}text") if e.get("class") == "on"):
        assert len(text.text or "") <= 3


def test_large_schedules_stay_small_enough_to_open():
    costs = Costs(
        output_s=0.4, output_t=0.2, comm={"C0": 0.1, "C1": 0.2, "G": 0.1, "e": 0.1, "g": 0.1, "p2p": 0.1}
    )
    panel = _panel(16, 128, "vocab-2", costs)
    text = render_svg.picture([panel], units_of([panel], False), "large")
    elements = sum(1 for _ in ET.fromstring(text).iter())
    assert len(text) < 3_000_000
    assert elements < 20_000
    assert "bubble" in text


def test_two_timelines_have_one_time_scale():
    planned = _panel(2, 3)
    slower = _panel(2, 3, costs=Costs(forward=2, backward=4))
    wait = Span(1, "wait", Action("F", 0), 0.0, 2.0)
    root = _draw(planned, Panel("measured", slower.timeline, (wait,)))
    zero, unit = _scale(root, (0, 10))
    last = [
        float(box.get("x", "")) + float(box.get("width", ""))
        for box in root.iter(f"{SVG}rect")
        if (title := box.find(f"{SVG}title")) is not None and (title.text or "").startswith("B2 on rank 0:")
    ]
    assert last == pytest.approx([zero + 12 * unit, zero + 24 * unit], abs=0.3)
    x, _, width = _boxes(root)["F0 waits on rank 1"]
    assert (x, width) == pytest.approx((zero, 2 * unit), abs=0.3)
    words = _texts(root)
    assert "planned: makespan 12 F, bubble 25.0 %" in words
    assert "measured: makespan 24 F, bubble 25.0 %" in words


class _Names(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


def test_page_is_self_contained_and_escaped():
    panel = _panel(2, 3)
    drawn = render_svg.picture([panel], units_of([panel], False), "title")
    table = Table("Ranks <1>", [["rank", "busy & more"], ["0", "9"], ["all", "9"]], "What it says")
    text = page("A & B", drawn, ["first <note>"], [table], [("Lists", "F0 <B0>")])
    parsed = _Names(text)
    names = [tag for tag, _ in parsed.tags]
    assert not {"script", "link", "img", "iframe"} & set(names)
    assert not [a for _, attrs in parsed.tags for a in attrs if a in ("src", "href")]
    assert not re.search(r"url\((?!#)|@import", text)
    assert names.count("svg") == 1
    for words in ("A & B", "first <note>", "Ranks <1>", "busy & more", "F0 <B0>", "What it says"):
        assert words in parsed.words
    assert "prefers-color-scheme: dark" in text
