"""What happens when forward and backward passes reach a layer: its parameters are gathered before it runs and
released behind it, and its gradients are handed to their reduction.

Passes are seen through hooks: of modules in a forward pass, of the autograd nodes of their outputs and of
their inputs' gradients in a backward pass. Recomputation runs a layer's forward pass inside of a backward
pass, and its backward follows at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ext.paro.grad_flow import GradFlow
from megatron_ext.paro.param_flow import ParamFlow
from megatron_ext.paro.unit import Unit


class PassHooks:
    """Hooks of one model chunk.

    Args:
        units: all of the chunk, in the order of a forward pass.
        params, grads: what is called.
        reshard: whether split parameters are released between forward and backward.

    Attributes:
        reached: units that backward passes use: all but those of frozen layers below everything trained.
    """

    def __init__(self, units: list[Unit], params: ParamFlow, grads: GradFlow, *, reshard: bool):
        self.reached: set[Unit] = set()
        self._units, self._params, self._grads, self._reshard = units, params, grads, reshard
        self._compute = _ComputeStream()
        self._keep = False
        """Whether the forward pass that runs leaves its parameters gathered."""
        self._root = [unit for unit in units if unit.module is None]
        of_module: dict[Any, list[Unit]] = {}
        for unit in units:
            if unit.module is not None:
                of_module.setdefault(unit.module, []).append(unit)
        self._layers = list(of_module.values())
        for position, (module, layer) in enumerate(of_module.items()):
            module.register_forward_pre_hook(self._before_layer(position, layer), with_kwargs=True)
            module.register_forward_hook(self._after_layer(position, layer))
        self._accumulators = []
        for unit in units:
            for param in unit.params if unit.trainable else ():
                param.grad_added_to_main_grad = False
                node = torch.autograd.graph.get_gradient_edge(param).node
                node.register_hook(self._on_gradient(unit, param))
                self._accumulators.append(node)  # a hook lives as long as its node

    # --- forward --------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The chunk's forward pass is about to start."""
        self._compute.take()
        self._keep = torch.is_grad_enabled() and not self._reshard
        self._params.need(self._root)
        self._prefetch(0)

    def end_forward(self, output: Any) -> None:
        """The chunk's forward pass has ended."""
        if torch.is_grad_enabled():
            _on_backward(output, self._begin_backward)
        if not self._keep:
            self._params.release(self._root)

    def _before_layer(self, position: int, layer: list[Unit]) -> Callable:
        def hook(module: Any, args: tuple, kwargs: dict) -> None:
            self._params.need(layer)
            if not layer[0].split:
                return
            if _in_backward():
                self._prefetch_backward(position - 1)
            else:
                self._prefetch(position + 1)
            if torch.is_grad_enabled():
                for tensor in _tensors((args, kwargs)):
                    if tensor.requires_grad:  # its gradient is complete when the layer's backward has ended
                        tensor.register_hook(lambda grad: self._params.release(layer))

        return hook

    def _after_layer(self, position: int, layer: list[Unit]) -> Callable:
        def hook(module: Any, args: tuple, output: Any) -> None:
            if torch.is_grad_enabled():
                _on_backward(output, lambda: self._before_backward(position, layer))
            if not self._keep and not _in_backward():
                self._params.release(layer)

        return hook

    # --- backward -------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        self._params.need(self._root)
        self._prefetch_backward(len(self._layers) - 1)
        self._begin_gradients(self._root)
        _at_end(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._grads.end_of_backward()
        self._params.release(self._units)

    def _before_backward(self, position: int, layer: list[Unit]) -> None:
        self._params.need(layer)
        if layer[0].split:
            self._prefetch_backward(position - 1)
            _at_end(lambda: self._params.release(layer))
        self._begin_gradients(layer)

    def _begin_gradients(self, units: list[Unit]) -> None:
        # Fused kernels write to `main_grad` before any hook of a parameter runs.
        self.reached.update(units)
        for unit in units:
            if unit.transient:
                self._grads.begin(unit)

    def _on_gradient(self, unit: Unit, param: Parameter) -> Callable:
        def hook(*unused: Any) -> None:
            with self._compute.entered(param.grad):
                if not unit.late:
                    self._grads.begin(unit)
                # A fused kernel has added its part; a weight of two uses marks that autograd brings the
                # other.
                added = param.grad_added_to_main_grad and not getattr(param, "zero_out_wgrad", False)
                if param.grad is not None and not added:
                    param.main_grad.add_(param.grad)
                param.grad = None
                if not unit.late:
                    self._grads.ready(unit, param)

        return hook

    def _prefetch_backward(self, position: int) -> None:
        # Whether a backward pass comes as far as that is known from the first one.
        if 0 <= position < len(self._layers) and self._layers[position][0] in self.reached:
            self._prefetch(position)

    def _prefetch(self, position: int) -> None:
        if 0 <= position < len(self._layers):
            self._params.prefetch(self._layers[position])


class _ComputeStream:
    """The CUDA stream of forward passes, for hooks that autograd runs on another one; nothing on a CPU.

    A parameter's accumulation node belongs to the stream on which it was made, and Megatron wraps models on a
    side stream. Whole buffers are allocated and released on the stream of the passes. So what reads and frees
    them must be given to that stream, or their memory would go to others while a reduction still uses it.
    """

    def __init__(self) -> None:
        self._stream: Any = None

    def take(self) -> None:
        """Remember the current stream."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._stream = torch.cuda.current_stream()

    @contextmanager
    def entered(self, made: Tensor | None) -> Iterator[None]:
        """Inside, work goes to the stream of the passes, behind what the current one has made."""
        stream = self._stream
        if stream is None or stream == (current := torch.cuda.current_stream()):
            yield
            return
        stream.wait_stream(current)
        if made is not None:
            made.record_stream(stream)  # its memory may be the other stream's
        with torch.cuda.stream(stream):
            yield


def _on_backward(output: Any, action: Callable[[], None]) -> None:
    """Call `action` when a backward pass reaches `output`, once in it.

    A node's hooks run after those of the tensor that it made, so that the layer that reads the output is
    released before the one that made it is gathered.
    """
    done: list[int] = []

    def hook(grads: tuple) -> None:
        task = torch._C._current_graph_task_id()
        if task not in done:
            done.append(task)
            action()

    for tensor in _tensors(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(hook)


def _at_end(action: Callable[[], None]) -> None:
    """Call `action` when the backward pass that is running has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
