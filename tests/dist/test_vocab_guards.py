"""What pipeline ranks must agree on is compared before they could wait for each other, or train in part."""

from types import SimpleNamespace

import pytest

from megatron_ext.schedules.build import build
from megatron_ext.schedules.check import checked
from tests.ranks import ranks


def _schedule():
    import torch.distributed as dist

    from megatron_ext.vocab.comm import VocabComm, VocabGroups
    from megatron_ext.vocab.schedule import VocabSchedule

    world = dist.group.WORLD
    schedule = object.__new__(VocabSchedule)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    schedule._comm = VocabComm(VocabGroups(pipe=world, tensor=alone, shards=world))
    schedule._pipe = world
    return schedule


@ranks(2)
def test_ranks_with_one_program_go_on():
    _schedule()._agree(checked(build(2, 4, vocab="vocab-2")))


@ranks(2)
def test_ranks_with_different_programs_are_stopped():
    import torch.distributed as dist

    mode = ("vocab-1", "vocab-2")[dist.get_rank()]
    with pytest.raises(RuntimeError, match="have built different schedules"):
        _schedule()._agree(checked(build(2, 4, vocab=mode)))


def _model(embedding: bool, output: bool):
    return [SimpleNamespace(requires_grad=trained) for trained in (embedding, output)]


@ranks(2)
def test_frozen_on_all_stages_or_none():
    schedule = _schedule()
    schedule._frozen_alike(*_model(True, True))
    schedule._frozen_alike(*_model(False, True))


@ranks(2)
def test_frozen_on_one_stage_only():
    import torch.distributed as dist

    schedule = _schedule()
    with pytest.raises(RuntimeError, match="frozen on some pipeline stages only"):
        schedule._frozen_alike(*_model(dist.get_rank() == 0, True))
