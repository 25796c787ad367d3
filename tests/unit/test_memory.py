"""The memory tracker, against bytes counted by hand; numbers are fp32, 4 bytes each."""

import threading

import pytest
import torch
from torch import nn

from megatron_ext.memory import CATEGORIES, MemoryTracker, category
from tests.ranks import ranks

NOTHING = dict.fromkeys(CATEGORIES, 0)


def live(tracker: MemoryTracker) -> dict[str, int]:
    """Bytes that are alive now, by category, without the empty ones."""
    tracker._settle()  # else the next operation does it
    return {name: size for name, size in tracker._now.items() if size}


def test_forward_of_a_small_mlp():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    x = torch.ones(4, 8)
    tracker = MemoryTracker("cpu")
    tracker.hold("weights", model.parameters())
    tracker.hold("other", [x])
    with tracker:
        loss = model(x).sum()
        # The second linear layer saved ReLU's output [4, 16]; the layer outputs [4, 16] and [4, 2] are gone.
        assert live(tracker) == {"weights": 4 * 178, "other": 128, "activations": 256 + 4}
        del loss
        assert live(tracker) == {"weights": 4 * 178, "other": 128}
    report = tracker.report()
    assert report["activations"] == 512  # ReLU's input and output
    assert report["peak"] == 4 * 178 + 128 + 512
    assert report["category_peaks"] == NOTHING | {"weights": 4 * 178, "other": 128, "activations": 512}


@ranks(1)
def test_backward():
    """y = exp(x), z = sin(y), loss = sum(z): backward of sin makes cos(y), of exp reuses y."""
    x = torch.ones(1000, requires_grad=True)
    tracker = MemoryTracker("cpu")
    tracker.hold("weights", [x])
    with tracker:
        loss = x.exp().sin().sum()
        assert live(tracker) == {"weights": 4000, "activations": 4000 + 4}  # y is saved, z is not
        assert tracker.report()["activations"] == 8000 + 4  # y, z and the loss
        loss.backward()
        assert live(tracker) == {"weights": 4000, "activations": 4000 + 4}  # x's gradient; y is freed
    # y, the gradient of y and cos(y) (then: of x); the loss and its gradient.
    assert tracker.report()["activations"] == 3 * 4000 + 2 * 4
    assert tracker.report()["peak"] == 4000 + 12008


@ranks(1)
def test_backward_counts_under_the_block_that_calls_it():
    x = torch.ones(1000, requires_grad=True)
    with MemoryTracker("cpu") as tracker:
        loss = x.exp().sum()
        with category("vocabulary"):
            loss.backward()
    assert tracker.report()["category_peaks"]["vocabulary"] == 4 + 4000  # gradients of the loss and of x


def test_views_aliases_and_operations_in_place_count_nothing():
    with MemoryTracker("cpu") as tracker:
        a = torch.zeros(100)
        b, c = a.view(10, 10)[2:].t(), a.detach()
        a.add_(1).clamp_(max=2)
        torch.mul(c, 2, out=a)
        assert live(tracker) == {"activations": 400}
        del a, c
        assert live(tracker) == {"activations": 400}  # the view keeps the storage
        del b
        assert live(tracker) == {}
    assert tracker.report()["peak"] == 400


def test_sizes_that_change():
    with MemoryTracker("cpu") as tracker:
        a = torch.empty(0)
        torch.mul(torch.ones(100), 2, out=a)
        assert live(tracker) == {"activations": 400}
        a.resize_(300)
        assert live(tracker) == {"activations": 1200}
        a.untyped_storage().resize_(0)
        assert live(tracker) == {}
        a.untyped_storage().resize_(1200)
        assert live(tracker) == {"activations": 1200}
        a.set_(torch.ones(2))
        assert live(tracker) == {"activations": 8}
    assert "resize_" not in vars(torch.UntypedStorage)


def test_data_that_is_swapped_out():
    """What Megatron's `deallocate_output_tensor` does to a stage's output."""
    with MemoryTracker("cpu") as tracker:
        output = torch.ones(1000)
        output.data = torch.empty((1,))
        assert live(tracker) == {"activations": 4}


def test_addresses_that_are_used_again():
    with MemoryTracker("cpu") as tracker:
        for size in (100, 100, 50, 100):
            for _ in range(50):
                torch.empty(size).add(1)
        assert live(tracker) == {}
    assert tracker.report()["peak"] == 800


def test_what_exists_before_counts_once_and_where_it_was_first_put():
    weight, mask = torch.ones(10), torch.ones(20)
    unused = torch.ones(5)
    buffer = torch.ones(100)
    tracker = MemoryTracker("cpu")
    tracker.hold("weights", [weight, weight.view(5, 2)])
    tracker.hold("gradients", [buffer[:30], buffer[30:], weight[:2]])
    tracker.hold_rest()
    held = tracker.report()
    assert (held["weights"], held["gradients"]) == (40, 400)
    assert held["other"] >= mask.nbytes + unused.nbytes
    with tracker:
        mask.add_(1)
        weight.view(2, 5).mul_(2)
        assert live(tracker)["other"] <= held["other"]
        assert "activations" not in live(tracker)


def test_other_devices_and_layouts_do_not_count():
    meta, dense = torch.ones(1000, device="meta"), torch.ones(1)
    with MemoryTracker("cpu") as tracker:
        meta = meta.add(1)
        assert dense.to_sparse().layout is torch.sparse_coo
        assert tracker.report()["peak"] < 100
    with MemoryTracker("cuda") as tracker:
        torch.ones(10).add(1)
    assert tracker.report()["peak"] == 0


def test_what_no_operation_made_counts_when_one_touches_it():
    numpy = pytest.importorskip("numpy")
    with MemoryTracker("cpu") as tracker:
        outside = torch.from_numpy(numpy.ones(100, dtype=numpy.float32))
        outside.add_(1)
        assert live(tracker) == {"activations": 400}


def test_categories_nest_and_the_rest_has_a_default():
    with MemoryTracker("cpu") as tracker:
        a = torch.ones(1)
        with category("vocabulary"):
            b = torch.ones(10)
            with category("communication"):
                c = torch.ones(100)
            d = a + b
        tracker.default("other")
        e = torch.ones(1000)
        assert live(tracker) == {
            "activations": 4,
            "vocabulary": 80,
            "communication": 400,
            "other": 4000,
        }
    assert len([a, b, c, d, e]) == 5
    with category("vocabulary"):  # no tracker: nothing happens, and nothing is refused
        pass


def test_an_error_in_a_block_ends_the_block():
    with MemoryTracker("cpu") as tracker:
        with pytest.raises(KeyError), category("vocabulary"):
            raise KeyError
        kept = torch.ones(1)
        assert live(tracker) == {"activations": kept.nbytes}


def test_unknown_category():
    with MemoryTracker("cpu"), pytest.raises(AssertionError, match="nonsense"), category("nonsense"):
        pass


def test_breakdown_is_that_of_the_highest_total():
    with MemoryTracker("cpu") as tracker:
        with category("vocabulary"):
            early = torch.ones(50)
        del early
        late = torch.ones(100)
        with category("vocabulary"):
            small = torch.ones(10)
        del late, small
    report = tracker.report()
    assert (report["activations"], report["vocabulary"], report["peak"]) == (400, 40, 440)
    assert report["category_peaks"]["vocabulary"] == 200


def in_thread(work) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return thread


def test_thread_counts_inside_a_block_and_on_its_own():
    kept = []

    def work():
        kept.append(torch.ones(1000))  # not seen: the thread is in no block
        with category("communication"):
            kept.append(torch.ones(100))
            with category("other"):
                kept.append(torch.ones(10))
            kept.append(torch.ones(100))

    with MemoryTracker("cpu") as tracker, category("vocabulary"):
        in_thread(work)
        mine = torch.ones(1)
        assert live(tracker) == {"communication": 800, "other": 40, "vocabulary": mine.nbytes}
        kept.clear()
        assert live(tracker) == {"vocabulary": 4}


@pytest.fixture
def straggler():
    """Starts a thread that stays in a block until the test has ended."""
    entered, leave = threading.Event(), threading.Event()

    def work():
        with category("communication"):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=work)

    def start():
        thread.start()
        entered.wait()

    yield start
    leave.set()
    thread.join()


def test_thread_that_is_left_in_a_block(straggler):
    tracker = MemoryTracker("cpu").start()
    straggler()
    with pytest.raises(RuntimeError, match="another thread was inside a category block"):
        tracker.stop()
    assert MemoryTracker._active is None


def test_an_error_shows_before_that_of_a_thread_that_is_left(straggler):
    def step():
        with MemoryTracker("cpu"):
            straggler()
            raise KeyError

    with pytest.raises(KeyError):
        step()


def test_threads_at_once():
    """Every storage that threads make and free at the same time is taken off again."""

    def work():
        with category("communication"):
            for _ in range(300):
                torch.ones(100).add(1)

    with MemoryTracker("cpu") as tracker:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(300):
            torch.ones(100).add(1)
        for thread in threads:
            thread.join()
        assert live(tracker) == {}
    highest = tracker.report()["category_peaks"]
    assert highest["activations"] == 800
    assert 800 <= highest["communication"] <= 4 * 800


def test_one_tracker_at_a_time_and_nothing_stays():
    kept = torch.ones(10)
    with MemoryTracker("cpu") as first:
        kept.add_(1)
        with pytest.raises(RuntimeError, match="stop that tracker first"):
            MemoryTracker("cpu").start()
    assert MemoryTracker._active is None
    assert first._live == {}
    torch.ones(100)
    assert first.report()["peak"] == 40
    with MemoryTracker("cpu") as second:
        pass
    assert second.report()["peak"] == 0
