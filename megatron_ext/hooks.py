"""Small helpers for wraps around stock training functions."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def bound(original: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments of a call by name, for wraps that read some of them."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


def whole_parameters(chunk: Any) -> AbstractContextManager[None]:
    """Context in which all parameters of a wrapped chunk are whole, also if it splits them; collective."""
    return chunk.whole() if hasattr(chunk, "whole") else nullcontext()


def wait_for_updates(chunk: Any) -> None:
    """Until updates of parameters that a wrapped chunk has started by itself are done."""
    if hasattr(chunk, "wait_for_updates"):
        chunk.wait_for_updates()


class before_optimizer_step:
    """Context in which `optimizer.step` first calls `action`; an instance attribute shadows the method."""

    def __init__(self, optimizer: Any, action: Callable[[], None]):
        self._optimizer = optimizer
        self._action = action

    def __enter__(self) -> None:
        self._outer = self._optimizer.__dict__.get("step")
        stock_step = self._optimizer.step

        def act_then_step(*args, **kwargs):
            self._action()
            return stock_step(*args, **kwargs)

        self._optimizer.step = act_then_step

    def __exit__(self, *exc) -> None:
        if self._outer is None:
            del self._optimizer.step
        else:
            self._optimizer.step = self._outer
