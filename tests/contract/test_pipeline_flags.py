"""The stock options that the rules of pipeline schedules read are Megatron's; ours name every family."""

from typing import get_args

import pytest

from megatron_ext.pipeline import rules
from megatron_ext.pipeline.config import SCHEDULES, PipelineConfig
from megatron_ext.schedules.families import FAMILIES


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        *((name, flag) for name, (flag, _) in rules._REFUSED.items()),
        ("delay_wgrad_compute", "--delay-wgrad-compute"),
        ("defer_embedding_wgrad_compute", "--defer-embedding-wgrad-compute"),
        ("transformer_impl", "--transformer-impl"),
        ("num_virtual_stages_per_pipeline_rank", "--num-virtual-stages-per-pipeline-rank"),
    ],
)
def test_options_exist(actions, name, flag):
    assert flag in actions[name].option_strings
    assert name == "transformer_impl" or not actions[name].default


def test_the_flag_offers_every_family():
    choices = get_args(PipelineConfig.__annotations__["pipeline_schedule"])
    assert choices == SCHEDULES == ("stock", *FAMILIES, "auto")
