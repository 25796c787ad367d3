"""Where Megatron's checkpoint code meets PaRO's. Imports nothing heavy."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron_ext.hooks import bound
from megatron_ext.patching import Patch

_WHERE = "megatron.training.checkpointing"


def checkpoint_patches() -> list[Patch]:
    """State dicts of split parameters, and what a checkpoint says of itself."""
    current = _Current()
    wrapped = "state dicts within know the wrapped model"
    shares = "split parameters are gathered one unit at a time, for the rank that writes them"
    says = "a checkpoint says which strategy wrote it"
    wraps: list[tuple[str, Callable, str, str]] = [
        ("save_checkpoint", functools.partial(current.remember, "model"), wrapped, "model"),
        ("load_checkpoint", functools.partial(current.remember, "ddp_model"), wrapped, "ddp_model"),
        ("generate_state_dict", current.share, shares, "optim_sd_kwargs"),
        ("_build_sharded_state_dict_metadata", current.sign, says, "args"),
    ]
    return [
        Patch(f"{_WHERE}:{name}", make, "wrap", why, "paro", needs=(needed,))
        for name, make, why, needed in wraps
    ]


class _Current:
    """The model whose checkpoint is written or read: what Megatron passes on is no longer wrapped."""

    def __init__(self) -> None:
        self.chunks: Sequence[Any] = ()

    def remember(self, argument: str, original: Callable) -> Callable:
        """Wrap of what writes or reads a checkpoint; updates of parameters are complete inside."""

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.chunks = [
                chunk for chunk in bound(original, args, kwargs)[argument] if hasattr(chunk, "units")
            ]
            try:
                for chunk in self.chunks:
                    chunk.wait_for_updates()
                return original(*args, **kwargs)
            finally:
                self.chunks = ()

        return wrapper

    def share(self, original: Callable) -> Callable:
        """Wrap of what makes the state dict, after which entries of split parameters are replaced."""

        @functools.wraps(original)
        def generate_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
            from megatron_ext.paro.checkpoint_weights import share_weights

            loading = (bound(original, args, kwargs)["optim_sd_kwargs"] or {}).get("is_loading", False)
            state = original(*args, **kwargs)
            for number, chunk in enumerate(self.chunks):
                key = "model" if len(self.chunks) == 1 else f"model{number}"
                share_weights(chunk, state[key], loading=loading)
            return state

        return generate_state_dict

    def sign(self, original: Callable) -> Callable:
        """Wrap of what describes the checkpoint that is written."""

        @functools.wraps(original)
        def _build_sharded_state_dict_metadata(*args: Any, **kwargs: Any) -> dict[str, Any]:
            from megatron_ext.paro.checkpoint import content_metadata

            metadata = original(*args, **kwargs)
            reshardable = bound(original, args, kwargs)["args"].dist_ckpt_optim_fully_reshardable
            if self.chunks:
                metadata.update(content_metadata(self.chunks, reshardable=reshardable))
            return metadata

        return _build_sharded_state_dict_metadata
