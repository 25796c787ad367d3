"""The split input layer: a shard looks up the tokens that it owns, and adds their gradients to its rows."""

import torch
from torch import Tensor

from megatron_ext.vocab.functional_rows import owned


@torch.no_grad()
def lookup(tokens: Tensor, weight: Tensor, lo: int, hi: int) -> Tensor:
    """Embeddings [..., h] of `tokens` [...] in [lo, hi), zeros for others: the sum over shards is stock's.

    `weight` [hi - lo, h] holds the shard's rows.
    """
    own, index = owned(tokens, lo, hi)
    return torch.nn.functional.embedding(index, weight).masked_fill_(~own.unsqueeze(-1), 0.0)


@torch.no_grad()
def lookup_gradient(gradient: Tensor, tokens: Tensor, main_grad: Tensor, lo: int, hi: int) -> None:
    """Add `gradient` [..., h] of the tokens [...] in [lo, hi) to their rows of `main_grad` [hi - lo, h].

    Same order of additions for same tokens on CPU, so same bits. On CUDA index_add_ is deterministic under
    torch.use_deterministic_algorithms.
    """
    tokens = tokens.reshape(-1)
    own, index = owned(tokens, lo, hi)
    # Picking out the owned tokens would need their number on the host, and stop a GPU's queue. Others add
    # zeros, and to different rows: to one row they would wait for each other.
    index = torch.where(own, index, tokens.remainder(hi - lo))
    values = gradient.reshape(-1, gradient.shape[-1]).masked_fill(~own.unsqueeze(-1), 0.0)
    if main_grad.dtype in (torch.float16, torch.bfloat16):
        # A frequent token has thousands of addends: in 16 bits most of them would be rounded away.
        total = torch.zeros_like(main_grad, dtype=torch.float32)
        main_grad.add_(total.index_add_(0, index, values.to(total.dtype)))
    else:
        main_grad.index_add_(0, index, values.to(main_grad.dtype))
