"""A microbatch's loss, divided by the number of its tokens on all context-parallel ranks.

Without --calculate-per-token-loss stock divides each rank's sum by the tokens of that rank alone, which is
another loss than that of one rank wherever loss masks leave ranks different numbers of tokens.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_ext import traffic
from megatron_ext.hooks import bound

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

FEATURE = "wallfacer:tokens"
"""What the sums of token counts are counted as."""


def over_all_tokens(group: Callable[[], "ProcessGroup"], original: Callable) -> Callable:
    """Wrap of `forward_step_calc_loss`."""

    @functools.wraps(original)
    def forward_step_calc_loss(*args: Any, **kwargs: Any) -> Any:
        call = bound(original, args, kwargs)
        loss_func, per_token = call["loss_func"], call["config"].calculate_per_token_loss
        if loss_func is not None and not call["collect_non_loss_data"] and not per_token:
            call["loss_func"] = functools.partial(_weighted, loss_func, group())
        return original(**call)

    return forward_step_calc_loss


def _weighted(loss_func: Callable, group: "ProcessGroup", output: "Tensor") -> tuple:
    """What `loss_func` returns, the loss times this rank's tokens over their mean over the ranks.

    Stock then divides by this rank's tokens, and data parallelism takes the mean over the ranks.
    """
    results = loss_func(output)
    if len(results) != 3:
        return results  # the script has divided by itself
    loss, tokens, reported = results
    return loss * _share(tokens, group), tokens, reported


def _share(tokens: "Tensor", group: "ProcessGroup") -> "Tensor":
    """Tokens of this rank over their mean. At least 1 each, as stock has it where all are masked."""
    total = tokens.detach().clone()
    traffic.all_reduce(total, group=group, feature=FEATURE)
    return tokens.clamp(min=1) * group.size() / total.clamp(min=1)
