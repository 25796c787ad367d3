"""The time model of collectives and of steps, with and without overlap; links from measurements and files."""

import json
from math import inf

import pytest

from megatron_ext.paro.cost import Compute, call_seconds, ho_ring_gather, ho_ring_reduce, step_seconds
from megatron_ext.paro.network import ACTIONS, SCOPES, Link, Network, Sample, fit
from megatron_ext.paro.passes import Call, UnitSize
from megatron_ext.paro.strategy import NAMES, Level, Strategy
from megatron_ext.paro.volume import COMMS, Wire

GATHER = Call("gather", "params", "forward", Level.G, Level.N, 1)
REDUCE = Call("sync", "grads", "boundary", Level.N, Level.G, 1)
ALL = Call("sync", "grads", "boundary", Level.N, Level.N, 1)


def network(inside=8e9, between=1e9, flat=1e9, latency=0.0):
    rates = {"members": inside, "groups": between, "flat": flat}
    return Network({(s, a): Link(latency, rates[s]) for s in SCOPES for a in ACTIONS})


def seconds(call, comm, k, m, net, padded=1 << 20):
    return call_seconds(UnitSize(padded, 4, 4), call, Wire(k, m, comm), net)


# --- collectives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [GATHER, REDUCE])
def test_flat_and_two_phase_by_their_bytes(call):
    size = 4 << 20
    net = network()
    assert seconds(call, "flat", 2, 4, net) == pytest.approx(7 / 8 * size / 1e9)
    assert seconds(call, "two-phase", 2, 4, net) == pytest.approx(size / 8 / 1e9 + 3 / 4 * size / 8e9)
    slow = network(latency=1e-3)
    assert seconds(call, "flat", 2, 4, slow) - seconds(call, "flat", 2, 4, net) == pytest.approx(7e-3)
    assert seconds(call, "two-phase", 2, 4, slow) - seconds(call, "two-phase", 2, 4, net) == pytest.approx(
        4e-3
    )


def simulated(k, t, e, reduce):
    """HO-Ring round by round: two resources, and what each round waits for."""
    inner, outer, done = 0.0, 0.0, 0.0
    for r in range(k):
        if reduce:
            inner += t  # sums of the members
            if r < k - 1:
                outer = max(outer, inner) + e  # waits for them and for the partial sum of the round before
            done = max(inner, outer)
        else:
            inner = max(inner, outer) + t  # spreads what has arrived
            outer += e if r < k - 1 else 0.0
            done = inner
    return done


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("t", "e"), [(1, 1), (1, 3), (3, 1), (0, 2), (2, 0), (1, 1.5)])
def test_ho_ring_by_rounds(k, t, e):
    gather, reduce = ho_ring_gather(k, t, e), ho_ring_reduce(k, t, e)
    assert gather == pytest.approx(simulated(k, t, e, reduce=False))
    assert reduce == pytest.approx(simulated(k, t, e, reduce=True))
    # The closed forms: one way is behind the slower link, the other hidden but for one round.
    bound = (k - 1) * e + t if e >= t else k * t
    assert gather == pytest.approx(bound)
    assert reduce == pytest.approx(bound if k > 1 else t)
    assert max((k - 1) * e, k * t) <= gather <= (k - 1) * e + k * t


@pytest.mark.parametrize("call", [GATHER, REDUCE, ALL])
@pytest.mark.parametrize(("k", "m"), [(2, 2), (4, 2), (2, 4), (3, 3)])
@pytest.mark.parametrize("inside", [1e9, 3e9, 1e11])
def test_ho_ring_is_between_its_bound_and_two_phase(call, k, m, inside):
    net = network(inside=inside)
    ring, phases = (seconds(call, comm, k, m, net, padded=k * m * 1000) for comm in ("ho-ring", "two-phase"))
    between = 2 if call is ALL else 1
    hops = between * (k - 1) * 4000 / 1e9
    assert hops < ring < phases


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("call", [GATHER, REDUCE, ALL])
def test_one_group_needs_no_links_between_groups(comm, call):
    links = {key: link for key, link in network().links.items() if key[0] != "groups"}
    time = seconds(call, comm, 1, 4, Network(links))
    assert time > 0
    links = {key: link for key, link in network().links.items() if key[0] != "members"}
    assert seconds(call, comm, 4, 1, Network(links)) > 0
    assert seconds(call, comm, 1, 1, Network({})) == 0


def test_int8_is_faster_between_groups():
    unit, net = UnitSize(1 << 20, 4, 4), network()
    native, coded = (
        call_seconds(unit, REDUCE, Wire(2, 4, inter_dtype=dtype), net) for dtype in ("native", "int8")
    )
    saved = (1 << 20) / 8 * (4 - (1 + 4 / 256)) / 1e9
    assert native - coded == pytest.approx(saved)


# --- steps --------------------------------------------------------------------------------------------------


def step(name, units=None, comm="two-phase", k=2, m=4, net=None, s=4, compute=Compute(), **how):  # noqa: B008
    units = units or [UnitSize(8000, 4, 4, layer=str(layer)) for layer in range(10)]
    return step_seconds(Strategy.parse(name), units, Wire(k, m, comm), net or network(), s, compute, **how)


COMPUTE = Compute(1.0, 2.0, 0.4)
SERIAL = {"overlap_params": False, "overlap_grads": False}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("comm", COMMS)
def test_without_overlap_everything_adds_up(name, comm):
    found = step(name, comm=comm, compute=COMPUTE, **SERIAL)
    parts = {"N": 1, "I": 4, "G": 8}[name[2]]
    assert found.compute == pytest.approx(4 * 3.0 + 0.4 / parts)
    assert found.total == pytest.approx(found.compute + found.params + found.grads)
    assert found.exposed == pytest.approx(found.params + found.grads)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("rate", [1e6, 1e4, 1e3])
def test_overlap_is_between_the_longest_part_and_the_sum(name, comm, rate):
    net = network(inside=8 * rate, between=rate, flat=rate)
    how = {"comm": comm, "net": net, "compute": COMPUTE}
    beside, serial = step(name, **how), step(name, **how, **SERIAL)
    assert beside.compute == serial.compute
    assert max(beside.compute, beside.params, beside.grads) <= beside.total <= serial.total * (1 + 1e-9)
    one = step(name, units=[UnitSize(80000, 4, 4)], **how)
    assert one.total == pytest.approx(step(name, units=[UnitSize(80000, 4, 4)], **how, **SERIAL).total)


def test_one_layer_of_what_is_hidden_stays_visible():
    # NNG: only the last of 4 backward passes reduces, and the next forward pass waits for the update.
    found = step("NNG", compute=COMPUTE, net=network(inside=1e6, between=1e6))
    assert found.params < 1.0
    assert found.grads < 2.0
    hidden = (found.params + found.grads) / 10
    assert found.total == pytest.approx(found.compute + hidden)


def test_communication_that_is_slower_than_compute_hides_it():
    found = step("NNG", compute=COMPUTE, net=network(inside=1e4, between=1e4))
    assert found.params > 1.0
    assert found.grads > 2.0
    visible = 3 * 3.0 + found.params + 1.0 / 10 + found.grads + 2.0 / 10 + 0.4 / 8
    assert found.total == pytest.approx(visible)


def test_both_lanes_share_the_links():
    # Gathers and reductions of GGG run at once in a backward pass, over the same links.
    net = network(inside=inf, between=1e5)
    found = step("GGG", net=net, s=1)
    assert found.total >= 0.999 * (found.params + found.grads)
    # IIG's gathers stay inside while its only reduction between groups crosses.
    net = network(inside=1e5, between=1e5)
    found = step("IIG", net=net, s=1)
    assert found.total < found.params + found.grads


def test_each_direction_overlaps_by_itself():
    how = {"compute": COMPUTE, "net": network(inside=1e5, between=1e5)}
    both, neither = step("IIG", **how), step("IIG", **how, **SERIAL)
    params, grads = step("IIG", **how, overlap_grads=False), step("IIG", **how, overlap_params=False)
    assert both.total < params.total < neither.total
    assert both.total < grads.total < neither.total


def test_accumulation_adds_passes():
    times = [step("III", compute=Compute(1.0, 2.0), net=network(inside=1e3), s=s).total for s in (1, 2, 3)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])


def test_kept_parameters_are_gathered_once():
    with_, without = step("III"), step("III", reshard_after_forward=False)
    assert without.params == pytest.approx(with_.params / 2)
    assert without.grads == with_.grads


# --- networks -----------------------------------------------------------------------------------------------


def test_rates_of_a_shared_nic():
    net = Network.given(Link(1e-6, 2e11), Link(5e-6, 1e10), members=8, ranks_per_nic=8)
    assert net.link("groups", "gather") == Link(5e-6, 1e10 / 8)
    assert net.link("members", "reduce") == Link(1e-6, 2e11)
    assert net.link("flat", "gather") == Link(5e-6, 1e10)  # one member's link carries it, alone
    rails = Network.given(Link(0, 2e11), Link(0, 1e10), members=8, ranks_per_nic=1, rails=True)
    assert rails.link("groups", "gather").bytes_per_s == 1e10
    assert rails.link("flat", "gather").bytes_per_s == 8e10
    slow_inside = Network.given(Link(0, 1e9), Link(0, 1e10), members=2, ranks_per_nic=2)
    assert slow_inside.link("flat", "gather").bytes_per_s == 1e9


def test_flat_and_hierarchical_by_the_paper_s_example():
    # 1 GB over groups of 8, 80 Gbit/s between and 2000 inside: ms of flat and of HO-Ring.
    net = Network.given(Link(0, 250e9), Link(0, 10e9), members=8, ranks_per_nic=8)
    for k, flat, ring in ((2, 93.8, 51.8), (4, 96.9, 75.9), (8, 98.4, 87.9), (16, 99.2, 94.0)):
        unit = UnitSize(250_000_000, 4, 4)
        times = [call_seconds(unit, GATHER, Wire(k, 8, comm), net) for comm in ("flat", "ho-ring")]
        assert times == pytest.approx([flat * 1e-3, ring * 1e-3], abs=6e-5)


def test_fit_finds_latency_and_bandwidth():
    samples = [Sample(part, 3, 3 * (2e-4 + part / 5e8)) for part in (1 << 16, 1 << 20, 1 << 22)]
    link = fit(samples)
    assert link.latency_s == pytest.approx(2e-4)
    assert link.bytes_per_s == pytest.approx(5e8)


@pytest.mark.parametrize("seconds", [(0.001, 0.1), (0.02, 0.01)])
def test_fit_without_a_sensible_latency_takes_the_largest(seconds):
    # The small message was swallowed by a buffer, or took longer than the large one.
    link = fit([Sample(1000, 1, seconds[0]), Sample(10000, 1, seconds[1])])
    assert link == Link(0.0, 10000 / seconds[1])


def test_fit_needs_two_sizes():
    with pytest.raises(ValueError, match="messages of one size: measure two"):
        fit([Sample(8, 1, 1.0), Sample(8, 1, 2.0)])


def test_networks_survive_their_file(tmp_path):
    samples = {
        (scope, action): [Sample(1000, 3, 0.01), Sample(50000, 3, 0.02)]
        for scope in SCOPES
        for action in ACTIONS
    }
    measured = Network.measured(samples, 2, 4, "gloo")
    path = tmp_path / "bandwidths.json"
    path.write_text(measured.to_json())
    found = Network.read(path)
    assert found.links == measured.links
    assert (found.groups, found.members, found.backend) == (2, 4, "gloo")
    assert json.loads(path.read_text())["links"]["flat"]["reduce"]["samples"][1]["part"] == 50000
    assert found.covers("groups")
    assert not Network({}).covers("groups")


GOOD = json.loads(network().to_json())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: "{", "this is no JSON"),
        (lambda data: "[]", "not a bandwidth file of schema 1"),
        (lambda data: json.dumps(data | {"schema": 2}), "not a bandwidth file of schema 1"),
        (lambda data: json.dumps({"schema": 1}), "it lacks entries"),
        (lambda data: json.dumps(data | {"links": {"flat": {}}}), "it lacks entries"),
        (
            lambda data: json.dumps(
                data | {"links": {"flat": {a: {"latency_s": -1, "bytes_per_s": 1} for a in ACTIONS}}}
            ),
            "gather over flat has -1 where a number of 0 or more is expected",
        ),
        (
            lambda data: json.dumps(
                data | {"links": {"flat": {a: {"latency_s": 0, "bytes_per_s": 0} for a in ACTIONS}}}
            ),
            "gather over flat has a bandwidth of 0",
        ),
    ],
)
def test_files_that_are_none(change, message):
    with pytest.raises(ValueError, match=message):
        Network.from_json(change(GOOD))
