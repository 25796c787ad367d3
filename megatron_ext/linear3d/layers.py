"""Modules on the grid, built where stock's layer specs name its linears and norms."""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.linear3d.chain import Chain
from megatron_ext.linear3d.comm import GridComm
from megatron_ext.linear3d.functional import grid_linear
from megatron_ext.linear3d.layouts import RESIDUAL, VECTOR, Layout, Site
from megatron_ext.linear3d.norm import grid_norm
from megatron_ext.linear3d.parameters import extra_state, new_parameter, sharded
from megatron_ext.linear3d.sizes import Save


class GridLinear(torch.nn.Module):
    """A linear layer of one site; stock's ColumnParallelLinear and RowParallelLinear in one.

    Takes and returns what these do: (output, bias that the caller adds or None). `gated` weights, which stock
    makes with stride 2, hold this rank's gate rows and then its up rows.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        site: Site,
        chain: Chain,
        save: Save,
        config: Any,
        init_method: Any,
        bias: bool = True,
        skip_bias_add: bool = False,
        stride: int = 1,
        skip_weight_param_allocation: bool = False,
        **stock: Any,
    ):
        """`stock`: other arguments of stock's linears, which say nothing on a grid (groups, buffer names)."""
        super().__init__()
        assert not stock.get("is_expert"), "experts are refused by a rule"
        assert stride in (1, 2), f"rows in {stride} parts"
        self.config, self.site, self.chain, self.save = config, site, chain, save
        self.input_size, self.output_size = input_size, output_size
        self.gated = stride == 2
        self.layer = 0
        """Set when the chain is linked."""
        self.keeps_gathered = False
        """The gathered weight stays from forward to backward, whatever the save policy."""
        self.skip_bias_add = skip_bias_add
        self.tp_group = stock.get("tp_group")
        self.sequence_parallel = False
        comm, shape = chain.comm, (output_size, input_size)
        self.output_size_per_partition = output_size // comm.grid.size(site.result.cuts[-1])
        self.weight = None
        if not skip_weight_param_allocation:
            self.weight = new_parameter(comm, site.weight, shape, config, init_method, gated=self.gated)
        self.bias = None
        if bias:
            self.bias = new_parameter(comm, site.bias, (output_size,), config, torch.nn.init.zeros_)
        # Stock's checkpoints may lack the extra state.
        self._register_load_state_dict_pre_hook(
            lambda state, prefix, *args, **kwargs: state.setdefault(f"{prefix}_extra_state")
        )

    @property
    def gathers_in_backward(self) -> bool:
        """Whether the backward pass has to gather the weight again."""
        return self.save != "gathered" and not self.keeps_gathered

    def forward(
        self, x: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(y without a skipped bias, the bias to add or None).

        Raises:
            ValueError: a given (tied) weight of another shape; whole outputs are asked for.
        """
        if runtime_gather_output:
            raise ValueError("--linear-3d does not put logits together: call the model with labels")
        used = self.weight if weight is None else weight
        expected = self.site.weight.local_shape(self.chain.comm.grid, (self.output_size, self.input_size))
        if used is None or tuple(used.shape) != expected:
            found = None if used is None else tuple(used.shape)
            raise ValueError(f"{self.site.name}: this rank's weight has the shape {expected}, got {found}")
        tags = self.chain.comm.tags
        if tags is not None:
            tags.expect(x, self.site.given, self.input_size, self.site.name)
        y = grid_linear(x, used, self, self.chain, self.save)
        if tags is not None:
            tags.mark(y, self.site.result)
        if self.bias is None or self.skip_bias_add:
            return y, self.bias
        return y + self.bias, None

    def backward_dw(self) -> None:
        """Weight gradients are part of the backward pass."""

    def get_extra_state(self) -> None:
        """As in stock's linears: none."""

    def set_extra_state(self, state: Any) -> None:
        """As in stock's linears: ignored."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Parts of stock's tensors under stock's names."""
        comm, rank = self.chain.comm, metadata["dp_cp_group"].rank()
        vocab = self.site.name == "head"
        found = {f"{prefix}_extra_state": extra_state(comm, f"{prefix}_extra_state", sharded_offsets, rank)}
        parts = {"weight": (self.weight, self.site.weight), "bias": (self.bias, self.site.bias)}
        for name, (param, layout) in parts.items():
            if param is not None:
                key = prefix + name
                found[key] = sharded(
                    param, key, comm, layout, sharded_offsets, rank, gated=self.gated, vocab=vocab
                )
        return found

    def extra_repr(self) -> str:
        return f"{self.site.name}, {self.input_size} to {self.output_size}, {self.site.weight}"


class GridNorm(torch.nn.Module):
    """LayerNorm or RMSNorm of the residual stream."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, *, comm: GridComm, **stock: Any):
        super().__init__()
        self.config, self.comm, self.eps, self.hidden_size = config, comm, eps, hidden_size
        self.centred = config.layernorm_zero_centered_gamma
        start = torch.nn.init.zeros_ if self.centred else torch.nn.init.ones_
        self.weight = new_parameter(comm, VECTOR, (hidden_size,), config, start)
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = new_parameter(comm, VECTOR, (hidden_size,), config, torch.nn.init.zeros_)

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[s/Gj, b/Gi, h/Gl]`."""
        tags = self.comm.tags
        if tags is not None:
            tags.expect(x, RESIDUAL, self.hidden_size, "norm")
        y = grid_norm(x, self.weight, self.bias, self.comm, self.eps, self.centred)
        return y if tags is None else tags.mark(y, RESIDUAL)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Parts of stock's vectors."""
        rank = metadata["dp_cp_group"].rank()
        named = {"weight": self.weight, "bias": self.bias}
        return {
            prefix + name: sharded(param, prefix + name, self.comm, VECTOR, sharded_offsets, rank)
            for name, param in named.items()
            if param is not None
        }


def layout_of(param: Tensor) -> Layout | None:
    """Layout of a parameter on the grid, None for one that is not."""
    return getattr(param, "grid_layout", None)
