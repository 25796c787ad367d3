"""Stock's check of gradients before they are reduced (--check-for-nan-in-loss-and-grad), for units."""

import torch
from torch import Tensor

from megatron_ext.paro.unit import Unit


class ValueCheck:
    """Norms of whole gradients stay on their device until a backward pass has ended: the host waits once."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._norms: list[Tensor] = []

    def note(self, unit: Unit) -> None:
        """Before a unit's gradients are reduced."""
        self._names.append(unit.name)
        self._norms.append(unit.grad_full.norm(p=2))

    def report(self) -> None:
        """Judge what was noted. Raises as stock does, with the name of the first unit that is not finite."""
        if not self._norms:
            return
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        names, norms = self._names, torch.stack([norm.float() for norm in self._norms]).cpu()
        self._names, self._norms = [], []
        for name, norm in zip(names, norms, strict=True):
            where = f"in local grad norm of {name} in backward pass before its reduction"
            for reject, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
                get_rerun_state_machine().validate_result(
                    result=norm,
                    rejection_func=reject,
                    message=f"found {what} {where}",
                    tolerance=0.001,
                    fatal=True,
                )
