"""Memory of the output passes: every tensor that they allocate is watched and compared with the formulas."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.vocab import functional as ops
from tests.unit.vocab_functional_cases import ALGORITHMS, PLAIN, Case, make_case

N, HIDDEN, VOCAB, LO, HI = 256, 64, 2500, 500, 2003
ROWS = HI - LO
SAVINGS = [
    ops.Saving("softmax"),
    ops.Saving("logits", 300),
    ops.Saving("logits", 10**6),
    ops.Saving("none", 300),
    ops.Saving("none", 10**6),
]
EVERY = [
    pytest.param(
        dtype, algorithm, saving, id=f"{str(dtype)[6:]}-{algorithm}-{saving.mode}-{saving.chunk_rows}"
    )
    for dtype in (torch.float32, torch.bfloat16)
    for algorithm in ALGORITHMS
    for saving in SAVINGS
]


class Watch(TorchDispatchMode):
    """Counts bytes of live storages that operators return, and remembers the most elements of one."""

    def __init__(self, *before: torch.Tensor):
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known = weakref.WeakKeyDictionary()
        for tensor in before:
            self._known[tensor.untyped_storage()] = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known[storage] = True
        size = storage.nbytes()
        weakref.finalize(storage, self._remove, size)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, size // tensor.element_size())

    def _remove(self, size: int) -> None:
        self.live -= size


def test_the_watch_sees_memory_come_and_go():
    known = torch.zeros(7)
    with Watch(known) as watch:
        first = torch.zeros(1000)
        view = first[10:].view(-1)
        known.add_(1)
        del first
        assert watch.live == 4000
        del view
        second = torch.zeros(10, dtype=torch.float64)
        assert watch.live == second.nbytes
    assert (watch.peak, watch.largest) == (4000, 1000)


def passes(
    case: Case, algorithm: str, saving: ops.Saving, terms: ops.LossTerms, main_grad: torch.Tensor
) -> Watch:
    """Run one shard's passes, with itself as the whole vocabulary's statistics; check what it keeps."""
    weight, in_s = case.weight[LO:HI], algorithm == "vocab-2"
    expected = ops.kept_bytes(
        N, ROWS, HIDDEN, case.x.itemsize, saving, algorithm, num_statistics=terms.num_statistics
    )
    with Watch(case.x, case.weight, case.labels, case.g, main_grad) as watch:
        if algorithm == "naive":
            state = ops.output_max(case.x, weight, case.labels, LO, HI, saving=saving, terms=terms)
            ops.output_sums(state, weight, state.stats[0].clone())
        else:
            state = ops.output_pass(
                case.x, weight, case.labels, LO, HI, saving=saving, with_input_gradient=in_s, terms=terms
            )
        assert state.nbytes() == expected
        assert watch.live == expected - case.x.nbytes - case.labels.nbytes
        stats = ops.merge_statistics(state.stats.unsqueeze(0), VOCAB, terms)
        if in_s:
            ops.input_gradient_part(state, weight, stats, terms)
        ops.output_gradients(
            state,
            weight,
            stats,
            case.g,
            terms,
            lambda *parts: ops.accumulate_weight_gradient(main_grad, *parts, fused=False),
            with_input_gradient=not in_s,
        )
    return watch


@pytest.mark.parametrize("terms", [PLAIN, ops.LossTerms(0.1, 1e-4)], ids=["plain", "terms"])
@pytest.mark.parametrize(("dtype", "algorithm", "saving"), EVERY)
def test_kept_and_peak_bytes_are_as_the_formulas_say(dtype, algorithm, saving, terms):
    case = make_case(dtype, N, HIDDEN, VOCAB)
    for grad_dtype in {dtype, torch.float32}:
        main_grad = torch.zeros(ROWS, HIDDEN, dtype=grad_dtype)
        watch = passes(case, algorithm, saving, terms, main_grad)
        formula = ops.peak_bytes(
            N,
            ROWS,
            HIDDEN,
            case.x.itemsize,
            saving,
            algorithm,
            num_statistics=terms.num_statistics,
            weight_product=grad_dtype != dtype,
        )
        measured = watch.peak + case.x.nbytes + case.labels.nbytes
        vectors = 30 * 8 * N
        assert formula <= measured <= formula + vectors, (measured, formula)


@pytest.mark.parametrize(("dtype", "algorithm", "saving"), [case for case in EVERY if "none" in case.id])
def test_saving_none_allocates_nothing_as_large_as_the_shards_logits(dtype, algorithm, saving):
    case = make_case(dtype, N, HIDDEN, VOCAB)
    watch = passes(case, algorithm, saving, PLAIN, torch.zeros(ROWS, HIDDEN))
    chunk = min(saving.chunk_rows, (ROWS + 1) // 2)
    assert watch.largest == N * chunk < N * ROWS


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_published_size_of_the_saved_softmax(algorithm):
    """s = 4096, V = 256000, p = 8: at most 500 MiB."""
    n, rows = 4096, 256000 // 8
    nothing = ops.kept_bytes(n, rows, 3072, 2, ops.Saving("none"), algorithm)
    kept = ops.kept_bytes(n, rows, 3072, 2, ops.Saving("softmax"), algorithm) - nothing
    assert kept == 500 * 2**20
    assert ops.kept_bytes(n, rows, 3072, 2, ops.Saving("logits"), algorithm) - nothing == 250 * 2**20
