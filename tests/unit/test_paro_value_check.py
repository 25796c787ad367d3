"""PaRO's check of gradients: noted on their device, judged once."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ext.paro.value_check import ValueCheck


class Machine:
    """Takes stock's part: raises where a result is rejected."""

    def __init__(self):
        self.seen = []

    def validate_result(self, result, rejection_func, message, tolerance, fatal):
        assert fatal
        assert tolerance == 0.001
        assert result.device.type == "cpu"
        self.seen.append(float(result))
        if rejection_func(result):
            raise ValueError(message)


@pytest.fixture
def machine(monkeypatch):
    from megatron.core import rerun_state_machine

    machine = Machine()
    monkeypatch.setattr(rerun_state_machine, "get_rerun_state_machine", lambda: machine)
    return machine


def unit(name, *values):
    return SimpleNamespace(name=name, grad_full=torch.tensor(values))


def test_gradients_are_judged_once_at_the_end(machine):
    check = ValueCheck()
    check.note(unit("layer 1", 3.0, 4.0))
    check.note(unit("layer 0", 1.0))
    assert machine.seen == []
    check.report()
    assert machine.seen == [5.0, 5.0, 1.0, 1.0]
    check.report()
    assert len(machine.seen) == 4


@pytest.mark.parametrize(("value", "what"), [(float("nan"), "NaN"), (float("inf"), "Inf")])
def test_the_unit_is_named(machine, value, what):
    check = ValueCheck()
    check.note(unit("layer 1", 3.0))
    check.note(unit("layer 0", value, 1.0))
    with pytest.raises(ValueError, match=f"found {what} in local grad norm of layer 0 in backward pass"):
        check.report()
