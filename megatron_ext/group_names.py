"""Short names of process groups for the run record and traffic: "tp", "dp-cp", "world", or a name of ours."""

import functools
import re

import torch.distributed as dist
from torch.distributed import ProcessGroup

# Megatron's `group_desc` -> the name that its ProcessGroupCollection has for the group, with dashes.
MEGATRON_NAMES = {
    "default_pg": "world",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "MODEL_PARALLEL_GROUP": "mp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
    "DATA_PARALLEL_GROUP_WITH_CP_AG": "dp-cp-ag",
    "DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp-gtp-remat",
    "DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp-cp-gtp-remat",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra-dp-cp",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra-dist-opt",
    "EMBEDDING_GROUP": "embd",
    "POSITION_EMBEDDING_GROUP": "pos-embd",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp-cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp-dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp-dp-cp",
    "GTP_WEIGHT_REMAT_GROUP": "gtp-remat",
    "EXPERT_GTP_WEIGHT_REMAT_GROUP": "expt-gtp-remat",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "expt-tp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp-ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp-ep-pp",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "tp-ep-pp-egtp",
    "EXPERT_DATA_PARALLEL_GROUP": "expt-dp",
    "EXPERT_DATA_PARALLEL_GROUP_AG": "expt-dp-ag",
    "EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "expt-dp-gtp-remat",
    # The two levels that --num-distributed-optimizer-instances makes of the expert data-parallel group.
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0": "intra-expt-dp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1": "inter-dist-opt",
}


def name_of(group: ProcessGroup | None) -> str:
    """Ours, Megatron's ("tp", "dp-cp", "dp-gloo" ...) or "world" (also for None, torch's default group).

    A group that was made without a description is named after its ranks.
    """
    if group is None:
        return "world"
    description = group.group_desc
    if description == "undefined":
        return f"ranks-{'-'.join(map(str, dist.get_process_group_ranks(group)))}"
    return short_name(description)


@functools.cache
def short_name(description: str) -> str:
    """Short name for a `group_desc`; one that is not Megatron's stays as it is."""
    base = description.replace("_GLOO", "")
    gloo = "-gloo" if base != description else ""
    if base in MEGATRON_NAMES:
        return MEGATRON_NAMES[base] + gloo
    if level := re.fullmatch(r"HIERARCHICAL_(\w+)_L(\d+)", base):
        return f"{short_name(level[1])}-l{level[2]}{gloo}"
    if re.fullmatch(r"[A-Z0-9_]+", description):  # Megatron's style, but not in the table
        return description.replace("_PARALLEL", "").replace("_GROUP", "").replace("_", "-").lower()
    return description


def existing_groups() -> list[ProcessGroup]:
    """Groups of torch's that this rank is in, oldest first."""
    known = dist.distributed_c10d._world.pg_map
    return [group for group in known if isinstance(group, ProcessGroup)]


def ranks_by_name() -> dict[str, list[int]]:
    """Ranks of every existing group but the world, by short name; a second group of one name is "name#2"."""
    found: dict[str, list[int]] = {}
    uses: dict[str, int] = {}
    for group in existing_groups():
        name = name_of(group)
        if name == "world":
            continue
        uses[name] = uses.get(name, 0) + 1
        key = name if uses[name] == 1 else f"{name}#{uses[name]}"
        found[key] = dist.get_process_group_ranks(group)
    return found
