"""Gets tokens, labels and loss functions of all microbatches out of the user's own `forward_step`.

Tokens are needed on every stage before the first one runs its forward pass, and labels before the last one
knows its loss. So at the start of a step `forward_step` is called once per microbatch with a stand-in for the
model, which records what the model is called with and returns a placeholder. The forward passes then call the
real model with the recorded arguments, wherever the schedule puts them, and the loss function that
`forward_step` returned gets the per-token losses. Tokens and labels go to all stages in one broadcast each.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.schedules.placement import Placement
from megatron_ext.vocab.comm import VocabComm


@dataclass
class Call:
    """One recorded call of the model, and the loss function for its output."""

    args: tuple
    kwargs: dict[str, Any]
    loss_func: Callable | None
    tokens: Tensor | None
    labels: Tensor | None


class _StandIn:
    """Records its call; every attribute is the real model's, wrapped or not."""

    def __init__(self, model: Any, forward: Callable):
        self._model = model
        self._signature = inspect.signature(forward)
        self.placeholder = torch.zeros(())
        self.calls: list[tuple[tuple, dict[str, Any]]] = []
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        # Megatron looks through wrappers with `get_attr_wrapped_model`; here the chain is hidden, so follow
        # it.
        model = self.__dict__["_model"]
        while not hasattr(model, name) and hasattr(model, "module"):
            model = model.module
        return getattr(model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.closed:
            raise RuntimeError(
                "the loss function calls the model. With --vocab-parallel only forward_step can: its passes "
                "have places in the pipeline schedule."
            )
        self.calls.append((args, kwargs))
        return self.placeholder

    def named(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a call by name."""
        return self._signature.bind(*args, **kwargs).arguments


def record(
    forward_step: Callable, data_iterator: Any, model: Any, forward: Callable, count: int, *, last_stage: bool
) -> list[Call]:
    """Call `forward_step` once for each of `count` microbatches; `forward` is the unwrapped model's method.

    Raises:
        RuntimeError: `forward_step` does not call the model exactly once, changes its output before it
        returns
            it, or the model gets no labels on the last stage.
    """
    calls: list[Call] = []
    for index in range(count):
        stand_in = _StandIn(model, forward)
        output, loss_func = forward_step(data_iterator, stand_in)
        if len(stand_in.calls) != 1 or output is not stand_in.placeholder:
            raise RuntimeError(
                f"forward_step called the model {len(stand_in.calls)} times for microbatch {index}"
                + ("" if output is stand_in.placeholder else " and changed its output before returning it")
                + ". With --vocab-parallel the model's output exists only after several pipeline passes: "
                "call the model once, return what it returns, and do the rest in the loss function."
            )
        args, kwargs = stand_in.calls[0]
        named = stand_in.named(args, kwargs)
        if last_stage and named.get("labels") is None:
            raise RuntimeError(
                "forward_step gave the model no labels. With --vocab-parallel logits are never put together, "
                "so only losses can be had: pass labels=..., or drop the flag for this job."
            )
        stand_in.closed = True
        loss_func = _with_real_model(loss_func, stand_in, model)
        call = Call(args, kwargs, loss_func, named.get("input_ids"), named.get("labels"))
        if calls:
            _share_mask(call, named, calls[-1])
        calls.append(call)
    return calls


def _with_real_model(loss_func: Callable | None, stand_in: _StandIn, model: Any) -> Callable | None:
    """Upstream's `partial(loss_func, mask, model=model)` gets the model that it expects."""
    if not isinstance(loss_func, functools.partial):
        return loss_func
    args = [model if value is stand_in else value for value in loss_func.args]
    named = {name: model if value is stand_in else value for name, value in loss_func.keywords.items()}
    return functools.partial(loss_func.func, *args, **named)


def _share_mask(call: Call, named: dict[str, Any], before: Call) -> None:
    """Keep one attention mask for all microbatches where they are equal, as causal masks are.

    A mask is `[b, 1, s, s]` and all microbatches of a step are held, so this is what bounds their memory.
    """
    mask = named.get("attention_mask")
    for earlier in (*before.args, *before.kwargs.values()):
        if _same_mask(mask, earlier):
            call.args = tuple(earlier if value is mask else value for value in call.args)
            call.kwargs = {name: earlier if value is mask else value for name, value in call.kwargs.items()}
            return


def _same_mask(mask: Any, other: Any) -> bool:
    if not isinstance(mask, Tensor) or not isinstance(other, Tensor) or mask.dim() < 3:
        return False
    if mask.data_ptr() == other.data_ptr():
        return True
    return mask.shape == other.shape and mask.dtype == other.dtype and torch.equal(mask, other)


def share(
    comm: VocabComm, calls: list[list[Call]], shape: tuple[int, int], device: torch.device, place: Placement
) -> tuple[Tensor, Tensor]:
    """Tokens and labels of all microbatches, int32 `[m, b, s]`, on every stage; `shape` is (b, s), and
    `calls` are those of each chunk.

    Raises RuntimeError when the first or last stage has others of another shape.
    """
    rank, first, last = comm.groups.pipe.rank(), place.first, place.last
    tokens = _stacked([c.tokens for c in calls[first.chunk]], "tokens", shape, device, rank == first.rank)
    labels = _stacked([c.labels for c in calls[last.chunk]], "labels", shape, device, rank == last.rank)
    for call in (call for chunk in calls for call in chunk):
        call.tokens = call.labels = None
    return comm.broadcast(tokens, root=first.rank), comm.broadcast(labels, root=last.rank)


def _stacked(
    found: list[Tensor | None], what: str, shape: tuple[int, int], device: torch.device, owner: bool
) -> Tensor:
    if not owner:
        return torch.empty((len(found), *shape), dtype=torch.int32, device=device)
    for tensor in found:
        if tensor is None or tuple(tensor.shape) != shape:
            got = "none" if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
            raise RuntimeError(
                f"forward_step gave the model {got} for {what}, but a microbatch is [micro-batch-size, "
                f"seq-length] = {list(shape)}: --vocab-parallel needs microbatches of one fixed shape."
            )
    return torch.stack([tensor.to(torch.int32) for tensor in found])
