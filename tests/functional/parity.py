"""What it means that a run trains like stock, and the stock flags that such runs are made of."""

from megatron_ext.grads import assemble
from megatron_ext.tools.grads import judge
from tests.functional.runs import Run, assert_close

DISTOPT = ["--use-distributed-optimizer"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
PP, TP = "--pipeline-model-parallel-size", "--tensor-model-parallel-size"


def assert_parity(reference: Run, run: Run, *, grad_norms: float = 1e-4) -> None:
    """Losses and grad norms of ten steps and every gradient of step 1 are the reference's, in fp32."""
    assert len(run.losses()) == 10
    assert_close(reference.losses(), run.losses(), 1e-5)
    assert_close(reference.grad_norms(), run.grad_norms(), grad_norms)
    assert_gradients(reference, run)


def assert_gradients(reference: Run, run: Run, tolerance: float = 5e-6) -> None:
    """Every gradient of step 1 agrees, to a tolerance relative to its largest element."""
    verdict = judge(assemble(reference.folder), assemble(run.folder), tolerance)
    assert verdict.largest > 0
    assert verdict.within, str(verdict)
