"""Random output layers, the algorithms run over simulated shards, and dense references for both."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.vocab import functional as ops

ALGORITHMS = ("naive", "vocab-1", "vocab-2")
SAVINGS = (ops.Saving("softmax"), ops.Saving("logits", 300), ops.Saving("none", 117))
EVEN = [512, 512, 512, 512]
UNEVEN = [600, 500, 500, 448]
PLAIN = ops.LossTerms()


@dataclass
class Case:
    """Inputs of an output layer: x [n, h], weight [V, h], labels [n], g [n]."""

    x: Tensor
    weight: Tensor
    labels: Tensor
    g: Tensor

    def to(self, dtype: torch.dtype) -> "Case":
        """The same numbers in another type; g in that of statistics."""
        g = self.g.to(torch.float64 if dtype == torch.float64 else torch.float32)
        return dataclasses.replace(self, x=self.x.to(dtype), weight=self.weight.to(dtype), g=g)


@dataclass
class Result:
    """Per-token losses and gradients; dw is what arrived in main_grad."""

    loss: Tensor
    dx: Tensor
    dw: Tensor

    def __iter__(self):
        return iter((self.loss, self.dx, self.dw))


def make_case(dtype: torch.dtype, n: int = 256, h: int = 128, vocab: int = 2048, seed: int = 1) -> Case:
    """Logits of standard deviation 1, every seventh label -100, and every fifth weight 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(0, vocab, (n,), generator=generator)
    labels[::7] = -100
    g = torch.rand(n, generator=generator, dtype=torch.float64)
    g[::5] = 0.0
    return Case(normal(n, h), normal(vocab, h) / h**0.5, labels, g).to(dtype)


def run(
    case: Case,
    sizes: Sequence[int],
    algorithm: str,
    saving: ops.Saving = SAVINGS[0],
    terms: ops.LossTerms = PLAIN,
    grad_dtype: torch.dtype | None = None,
) -> Result:
    """All passes in the schedule's order, over shards of these `sizes`; sums over shards are the barriers."""
    vocab = case.weight.shape[0]
    assert sum(sizes) == vocab
    starts = [sum(sizes[:r]) for r in range(len(sizes))]
    shards = [(case.weight[lo : lo + size], lo, lo + size) for lo, size in zip(starts, sizes, strict=True)]
    if algorithm == "naive":
        states = [
            ops.output_max(case.x, w, case.labels, lo, hi, saving=saving, terms=terms) for w, lo, hi in shards
        ]
        maximum = torch.stack([state.stats[0] for state in states]).amax(dim=0)
        for state, (w, _, _) in zip(states, shards, strict=True):
            ops.output_sums(state, w, maximum)
    else:
        states = [
            ops.output_pass(
                case.x,
                w,
                case.labels,
                lo,
                hi,
                saving=saving,
                with_input_gradient=algorithm == "vocab-2",
                terms=terms,
            )
            for w, lo, hi in shards
        ]
    stats = ops.merge_statistics(torch.stack([state.stats for state in states]), vocab, terms)
    pairs = list(zip(states, shards, strict=True))
    if algorithm == "vocab-2":
        parts = [ops.input_gradient_part(state, w, stats, terms) for state, (w, _, _) in pairs]
        dx = torch.stack(parts).sum(dim=0) * case.g.unsqueeze(1)
    main_grad = torch.zeros(case.weight.shape, dtype=grad_dtype or case.g.dtype)
    parts = []
    for state, (w, lo, hi) in pairs:
        own = main_grad[lo:hi]

        def accumulate(gradient: Tensor, x: Tensor, rows: slice, own: Tensor = own) -> None:
            ops.accumulate_weight_gradient(own, gradient, x, rows, fused=False)

        in_t = algorithm != "vocab-2"
        part = ops.output_gradients(state, w, stats, case.g, terms, accumulate, with_input_gradient=in_t)
        parts.append(part)
        assert state.saved is None
        assert (part is not None) == in_t
    if algorithm != "vocab-2":
        dx = torch.stack(parts).sum(dim=0)
    return Result(stats.loss, dx.to(case.x.dtype), main_grad)


def dense(case: Case, terms: ops.LossTerms = PLAIN) -> Result:
    """The whole layer by autograd in fp64. A label that nobody owns counts as one with the largest logit."""
    x, weight = (tensor.double().requires_grad_() for tensor in (case.x, case.weight))
    logits = x @ weight.t()
    known = (case.labels >= 0) & (case.labels < weight.shape[0])
    # The target term is relative to the maximum, which has no gradient of its own.
    target = logits.gather(1, torch.where(known, case.labels, 0).unsqueeze(1)).squeeze(1)
    maximum = logits.detach().amax(dim=1)
    target = torch.where(known, target, maximum)
    log_sum_exp = torch.logsumexp(logits, dim=1)
    s = terms.label_smoothing * weight.shape[0] / (weight.shape[0] - 1)
    loss = (1 - s) * (log_sum_exp - target) + s * (log_sum_exp - logits.mean(dim=1))
    loss = loss + terms.z_loss * log_sum_exp**2
    (loss * case.g.double()).sum().backward()
    return Result(loss.detach(), x.grad, weight.grad)


def closed_form(case: Case) -> Result:
    """Stock's operations one by one, without autograd, in the type of statistics: the same bits."""
    n = case.x.shape[0]
    logits = (case.x @ case.weight.t()).to(case.g.dtype)
    logits -= logits.amax(dim=1, keepdim=True)
    known = (case.labels >= 0) & (case.labels < case.weight.shape[0])
    index = torch.where(known, case.labels, 0)
    target = torch.where(known, logits[torch.arange(n), index], 0.0)
    softmax = logits.exp()
    total = softmax.sum(dim=1)
    softmax /= total.unsqueeze(1)
    softmax[torch.arange(n), index] -= known.to(softmax.dtype)
    gradient = (softmax * case.g.unsqueeze(1)).to(case.x.dtype)
    return Result(total.log() - target, gradient @ case.weight, (gradient.t() @ case.x).to(case.g.dtype))


def stock(case: Case, label_smoothing: float = 0.0) -> Result:
    """Megatron's own cross entropy with a group of one rank; needs torch.distributed."""
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    x, weight = (tensor.clone().requires_grad_() for tensor in (case.x, case.weight))
    logits = torch.matmul(x, weight.t())
    loss = vocab_parallel_cross_entropy(logits, case.labels, label_smoothing, torch.distributed.group.WORLD)
    loss.backward(case.g)
    return Result(loss.detach(), x.grad, weight.grad)


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative Frobenius distance, in fp64."""
    found, expected = found.double(), expected.double()
    return ((found - expected).norm() / expected.norm()).item()
