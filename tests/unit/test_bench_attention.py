"""The attention benchmark: its bytes and bounds against known numbers, its tiles, and its reports."""

import argparse
import importlib
import itertools
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
MODULES = ("attention_report", "attention_baselines", "attention_peers", "attention_train")


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules by name."""
    sys.path.insert(0, str(BENCH))
    try:
        yield argparse.Namespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(BENCH))
        for name in (*MODULES, "charts"):
            sys.modules.pop(name, None)


@pytest.fixture
def report(bench):
    return bench.attention_report


def case(report, ranks=16, seq=1024, heads=16, key_heads=16, head_dim=64, causal=True, rate=4 * 10**8):
    return report.Case(ranks, seq, heads, key_heads, head_dim, causal, rate)


def test_sizes_of_messages(report):
    of = case(report)
    assert of.query_bytes == 64 * 16 * 64 * 4
    assert of.pair_bytes == 2 * of.query_bytes
    assert case(report, key_heads=4).pair_bytes == of.pair_bytes / 4


def test_bytes_of_a_plain_ring_and_of_a_gather(report):
    """In units of a rank's queries, with as many key heads: 2 (P-1) forward, 2 (P-1) and 2 P backward."""
    of = case(report)
    ring, gather = (report.busiest(of, report.Method(n)) for n in (report.RING, report.GATHER))
    assert ring == 92 * of.query_bytes
    assert gather == 90 * of.query_bytes
    assert report.busiest(case(report, ranks=1), report.Method(report.RING)) == 0


@pytest.mark.parametrize(
    ("text", "blocks", "number"), [("4x1", 35.234375, 4), ("4x4", 57.234375, 1), ("2x2-direct", 49.234375, 4)]
)
def test_bytes_of_ours(report, text, blocks, number):
    """(4,1): 3 + 6 + 3 forward; 3 + 3, 6 + 6 + 2, 3 backward; and row statistics."""
    of, method = case(report), report.Method.parse(text)
    assert report.busiest(of, method) == blocks * of.query_bytes
    assert report.steps(of, method) == number
    row = report.Row(of, method, (1.0,), (2.0,))
    assert row.bound() == pytest.approx(92 / blocks)


def test_methods_are_parsed(report):
    parse = report.Method.parse
    assert parse("4x1") == report.Method("C=4 K=1", (4, 1), "relocate")
    assert parse("4x2-direct") == report.Method("C=4 K=2 direct", (4, 2), "direct")
    assert parse(report.RING).shape is None
    for wrong in ("4x1-fast", "0x1"):
        with pytest.raises(ValueError, match="is no shape: write team size x bundle"):
            parse(wrong)


def rows(report, **seconds):
    names = {"ring": report.Method(report.RING), "best": report.Method.parse("4x1")}
    names |= {"other": report.Method.parse("4x4"), "peer": report.Method("yunchang")}
    ring = tuple(seconds["ring"])
    return [
        report.Row(case(report), names[key], tuple(values), ring, 2.0**20) for key, values in seconds.items()
    ]


def test_gains_are_taken_round_by_round(report):
    """A slow round of both is no gain of either."""
    _, best = rows(report, ring=[1.0, 4.0, 1.0], best=[0.5, 2.0, 0.25])
    assert best.gains() == [2.0, 2.0, 4.0]
    assert best.median == 0.5
    assert best.link_share() == pytest.approx(35.234375 * 2**18 * 8 / 4e8 / 0.5)


def test_report(report, tmp_path):
    measured = rows(report, ring=[1.0, 1.2, 0.8], best=[0.5, 0.5, 0.5], other=[0.7, 0.7, 0.7], peer=[2.0] * 3)
    found = report.Found(measured, [report.Compute(case(report), 0.2)], ["yunchang did not run: no."])
    report.write(tmp_path, found, {"rounds": "3"})
    text = (tmp_path / "results.md").read_text()
    assert "CP=16, N=1024, 16 heads (16 of keys) of 64, causal, 400 Mbit/s" in text
    assert "Messages of the plain ring: 512 KiB." in text
    assert "Its computation alone takes 0.200 s of 1.000 s: 80% of its step is communication." in text
    assert "Best: C=4 K=1, 2.00 times as fast." in text
    assert "| C=4 K=1 | 4 | 8.81 | 1.00 | 0.500 | 0.500 to 0.500 | 2.00 | 1.60 to 2.40 | 2.61 | 37% |" in text
    assert "| yunchang |  |  | 1.00 | 2.000 |" in text
    assert text.endswith("- yunchang did not run: no.\n")
    assert (tmp_path / "results.svg").read_text().count("<rect") == 1 + len(measured)
    assert report.read(tmp_path) == found


def test_a_later_run_replaces_what_it_measures_again(report, tmp_path):
    assert report.read(tmp_path).rows == []
    first = report.Found(rows(report, ring=[1.0], best=[0.5]), [report.Compute(case(report), 0.2)], ["a"])
    later = report.Found(rows(report, ring=[3.0]), [report.Compute(case(report), 0.3)], ["a", "b"])
    merged = first.merged(later)
    assert [row.median for row in merged.rows] == [3.0, 0.5]
    assert [c.seconds for c in merged.compute] == [0.3]
    assert merged.notes == ["a", "b"]


# --- baselines ---------------------------------------------------------------------------------------------


def covered(tiles, own, keys):
    """How often each pair of an own token and a key is computed; `own` and `keys` are positions."""
    pairs = {}
    for tile in tiles:
        queries, seen = own[tile.q], keys[tile.k]
        assert not tile.causal or len(queries) == len(seen)
        for (i, query), (j, key) in itertools.product(enumerate(queries), enumerate(seen)):
            if not tile.causal or j <= i:
                pairs[query, key] = pairs.get((query, key), 0) + 1
    return pairs


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_of_the_baselines_cover_the_mask_once(bench, size, causal):
    base, rows, total = bench.attention_baselines, 4, 4 * size
    half = rows // 2
    order = base._order(size, rows, causal).argsort().view(size, rows).tolist()
    for rank in range(size):
        own = order[rank]
        if causal:
            assert own == [p for n in (rank, 2 * size - 1 - rank) for p in range(n * half, n * half + half)]
        wanted = {(q, k): 1 for q in own for k in range(total) if not causal or k <= q}
        found = {}
        for home in range(size):
            found |= covered(base._ring_tiles(rank, home, rows, causal), own, order[home])
        assert found == wanted
        assert covered(base._gather_tiles(rank, size, rows, causal), own, list(range(total))) == wanted


def test_rows_that_are_computed_first_are_fresh_once(bench):
    base = bench.attention_baselines
    for rank in range(4):
        ring = [tile for home in (rank, *range(rank)) for tile in base._ring_tiles(rank, home, 4, True)]
        assert [tile.fresh for tile in ring] == [True, *[False] * rank]
        gather = base._gather_tiles(rank, 4, 4, True)
        assert [tile.q for tile in gather if tile.fresh] == [slice(0, 2), slice(2, 4)]


def test_peers_that_cannot_run_say_why(bench, monkeypatch):
    peers = bench.attention_peers
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert peers.why_not("yunchang", True) == "not installed: pip install yunchang"
    monkeypatch.setattr(peers, "find_spec", lambda name: object())
    assert peers.why_not("yunchang", True) is None
    assert "for causal attention only" in peers.why_not("yunchang", False)
    assert peers.why_not("torch all-gather", True) is None


# --- training ----------------------------------------------------------------------------------------------


def options(bench, *argv):
    parser = argparse.ArgumentParser()
    bench.attention_train.add_arguments(parser.add_subparsers())
    return parser.parse_args(["train", *argv])


def test_jobs(bench):
    train, args = bench.attention_train, options(bench, "--ranks", "4", "--seq", "256")
    ring, best = args.shapes
    command = train.command_of(args, train.Job("gpt", True, best))
    joined = " ".join(command)
    assert "--context-parallel-size 4 --cp-comm-type wallfacer" in joined
    assert "--wallfacer-team-size 4 --wallfacer-kv-bundle 1 --wallfacer-movement relocate" in joined
    assert "--recompute-granularity full" in joined
    assert "--seq-length 256" in joined
    dit = " ".join(train.command_of(args, train.Job("dit", False, ring)))
    assert "pretrain_dit.py --dit-data random" in dit
    assert "recompute" not in dit
    with pytest.raises(argparse.ArgumentTypeError, match="'ring' is no shape"):
        train.shape("ring")


@pytest.mark.parametrize(("seq", "size", "frames"), [(1024, 64, 1), (256, 32, 1), (2048, 64, 2), (96, 8, 6)])
def test_pictures_have_as_many_tokens_as_asked(bench, seq, size, frames):
    flags = bench.attention_train.picture(seq)
    found = {name: int(value) for name, value in itertools.batched(flags[2:], 2)}
    assert (found["--dit-image-size"], found["--dit-frames"]) == (size, frames)
    assert (size // 2) ** 2 * frames == seq


def test_a_job_is_as_fast_as_its_slowest_rank(bench):
    def rank(*seconds, sent=5, **more):
        traffic = [{"feature": "wallfacer", "bytes": sent}, {"feature": "other", "bytes": 99}] * 2
        more |= {"tokens": 100, "traffic": traffic}
        steps = [{"event": "step", "step_time_s": s, **more} for s in seconds]
        return [{"event": "start"}, *steps, {"event": "end"}]

    records = [rank(9.0, 1.0, 2.0, 1.0), rank(9.0, 2.0, 1.0, 4.0, sent=7, loss=3.5)]
    found = bench.attention_train.result(records, 3)
    assert found == {"tokens/s": 50.0, "bytes": 14, "loss": 3.5}


def test_report_of_training(bench, tmp_path):
    train, args = bench.attention_train, options(bench, "--output", str(tmp_path))
    jobs = [train.Job("gpt", True, shape) for shape in args.shapes]
    speeds = {jobs[0]: (100.0, 50.0), jobs[1]: (150.0, 100.0)}
    found = {
        job: [{"tokens/s": speed, "bytes": 2**20, "loss": 1.5} for speed in values]
        for job, values in speeds.items()
    }
    train.write(args, [train.row(job, found) for job in jobs])
    text = (tmp_path / "results.md").read_text()
    assert "| pretrain_gpt.py | full | C=4 K=1 | 125.0 | 100.0 to 150.0 | 1.75 | 1.50 to 2.00 | 1.0 |" in text
    assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == 2
