"""The stock options that PaRO's rules read are Megatron's."""

import pytest

from megatron_ext.paro import rules


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        *((name, flag) for name, (flag, _) in rules._REFUSED.items()),
        *rules._READ_BETWEEN.items(),
        ("async_save", "--async-save"),
        ("overlap_param_gather", "--overlap-param-gather"),
        ("tensor_parallel_num_weight_shards", "--tensor-parallel-num-weight-shards"),
        ("use_tp_pp_dp_mapping", "--use-tp-pp-dp-mapping"),
    ],
)
def test_options_exist_and_are_off(actions, name, flag):
    assert flag in actions[name].option_strings
    assert not actions[name].default


def test_formats_and_optimizers(actions):
    assert actions["ckpt_format"].default == "torch_dist"
    assert actions["optimizer"].default == "adam"
    assert "sgd" in actions["optimizer"].choices
