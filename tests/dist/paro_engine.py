"""For tests of PaRO's engine without a training script: a tiny GPT, its wrapper and its optimizer."""

import functools
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron_ext import cpu, patching
from megatron_ext.paro.blocks import Grid
from megatron_ext.paro.strategy import Level, Strategy
from tests.dist.paro_groups import hybrid_groups

VOCAB, LENGTH, SAMPLES = 48, 8, 12  # samples of a step, over all ranks
STATES = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


@contextmanager
def megatron():
    """Process group and Megatron's parallel state, with the patches of --cpu."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    patching.apply(cpu.catalogue(), contract=None, log=lambda line: None)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    yield
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@functools.cache
def _groups(k: int, m: int):
    alone = [dist.new_group([r]) for r in range(k * m)][dist.get_rank()]
    return hybrid_groups(k, m), hybrid_groups(k, m, "-grads"), alone


class Engine:
    """One model, wrapped by a strategy, with `members` ranks a group."""

    def __init__(
        self,
        strategy: str,
        members: int,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        tied: bool = True,
        optimizer: str = "adam",
        inter_dtype: str = "native",
        frozen: tuple[str, ...] = (),
        comm: str = "two-phase",
        overlap: bool = False,
        reshard: bool = True,
    ):
        from megatron_ext.paro.data_parallel import ParoDataParallel, Setup
        from megatron_ext.paro.volume import Wire
        from megatron_ext.schedules.lane import make_lane

        self.optimizer_name, self.dtype = optimizer, dtype
        model = _model(seed, dtype, tied)
        for name, param in model.named_parameters():
            param.requires_grad = not any(part in name for part in frozen)
        n, levels = dist.get_world_size(), Strategy.parse(strategy)
        k = n // members
        groups, for_grads, alone = _groups(k, members)
        exact = _collectives(groups, "native", comm)
        setup = Setup(
            strategy=levels,
            grid=Grid.of(dist.get_rank(), k, members),
            params=_collectives(groups, inter_dtype, comm),
            grads=_collectives(for_grads, inter_dtype, comm),
            exact=exact,
            make_lane=lambda name, overlap: make_lane(name, overlap=overlap, on_gpu=False),
            wire=Wire(k, members, comm, inter_dtype, "gloo"),
            reshard=reshard,
        )
        self.chunk = ParoDataParallel(model.config, _ddp_config(overlap), model, setup=setup)
        self.stats = {Level.N: alone, Level.I: groups.members, Level.G: groups.flat}[levels.optimizer]
        self.optimizer = self._make_optimizer()

    def _make_optimizer(self):
        from megatron.core import optimizer as stock
        from megatron.core.optimizer.optimizer_config import OptimizerConfig

        from megatron_ext.paro.install import _our_optimizer

        config = OptimizerConfig(
            optimizer=self.optimizer_name,
            lr=0.01,
            weight_decay=0.01,
            clip_grad=1.0,
            bf16=self.dtype is torch.bfloat16,
            params_dtype=self.dtype,
        )
        groups = stock._get_param_groups([self.chunk], config, stock.get_standard_config_overrides(config))
        make = _our_optimizer(
            SimpleNamespace(groups={"paro-stats": self.stats}),
            stock._get_megatron_optimizer_based_on_param_groups,
        )
        return make(config, [self.chunk], groups)

    def step(self, data: int, microbatches: int = 1, *, wait: bool = True) -> tuple[float, float]:
        """One step on the samples of seed `data`, which the ranks share out; returns loss and grad norm.

        Without `wait`, updates of parameters may still be on their way.
        """
        n, rank = dist.get_world_size(), dist.get_rank()
        own = samples(data)[rank * SAMPLES // n : (rank + 1) * SAMPLES // n]
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for number, part in enumerate(own.chunk(microbatches)):
            with self.chunk.no_sync() if number + 1 < microbatches else nullcontext():
                loss = loss_of(self.chunk, part) / microbatches
                loss.backward()
            total += loss.detach() / n
        self.chunk.finish_grad_sync()
        success, norm, _ = self.optimizer.step()
        assert success
        if wait:
            self.chunk.wait_for_updates()
        dist.all_reduce(total)
        return total.item(), norm

    def state_dict(self, *, loading: bool = False, metadata: dict | None = None) -> dict:
        """As Megatron's `generate_state_dict` makes it with our patches."""
        from megatron.core.utils import unwrap_model

        from megatron_ext.paro.checkpoint_weights import share_weights

        state = {"model": unwrap_model(self.chunk).sharded_state_dict(metadata=_megatrons(metadata))}
        state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
        share_weights(self.chunk, state["model"], loading=loading)
        return state

    def save(self, folder, *, reshardable: bool = False) -> None:
        from megatron.core import dist_checkpointing

        from megatron_ext.paro.checkpoint import content_metadata

        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        metadata = content_metadata([self.chunk], reshardable=reshardable)
        dist_checkpointing.save(
            self.state_dict(metadata=metadata),
            str(folder),
            content_metadata=metadata,
            async_strategy="mcore",
        )

    def load(self, folder) -> None:
        from megatron.core import dist_checkpointing

        metadata = dist_checkpointing.load_content_metadata(str(folder))
        loaded = dist_checkpointing.load(self.state_dict(loading=True, metadata=metadata), str(folder))
        self.chunk.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])

    @torch.no_grad()
    def spoil(self) -> None:
        """Make everything that a checkpoint should replace useless."""
        for unit in self.chunk.units:
            unit.rest.fill_(float("nan"))
        for shard in self.optimizer.shards:
            shard.main.fill_(float("nan"))
            for value in self.optimizer.optimizer.state.get(shard.main, {}).values():
                value.fill_(float("nan"))

    def snapshot(self) -> dict[str, dict[str, torch.Tensor]]:
        """Weights, master weights and optimizer states of every parameter, whole, on every rank."""
        parts = []
        for shard in self.optimizer.shards:
            state = self.optimizer.optimizer.state[shard.main]
            kept = {name: state[name] for name in STATES[self.optimizer_name]}
            kept["master"] = shard.main.detach()
            name = shard.unit.names[shard.index]
            parts.append((name, shard.range, {key: value.clone() for key, value in kept.items()}))
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, parts)
        with self.chunk.whole():
            whole = {
                name: {"weight": unit.view(unit.full, index).clone()}
                for unit in self.chunk.units
                for index, name in enumerate(unit.names)
            }
        for found in everyone:
            for name, (first, last), kept in found:
                for key, value in kept.items():
                    shape = whole[name]["weight"].shape
                    flat = whole[name].setdefault(key, torch.full(shape, float("nan"))).view(-1)
                    there = flat[first:last]
                    assert (there.isnan() | (there == value)).all(), f"copies of {name} {key} differ"
                    flat[first:last] = value
        return whole


def _model(seed: int, dtype: torch.dtype, tied: bool):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        add_bias_linear=False,  # biases of keys have no gradient but rounding errors
        gated_linear_unit=True,  # stored as two tensors, by a factory
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=tied,
    )
    return Float16Module(config, model) if dtype is torch.bfloat16 else model


def samples(data: int) -> torch.Tensor:
    """All samples of a step, by seed."""
    generator = torch.Generator().manual_seed(data)
    return torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=generator)


def loss_of(model, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of some samples."""
    positions = torch.arange(LENGTH).expand(len(tokens), LENGTH)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()


def plain(steps: int) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """What torch alone makes of the model of seed 0 on this rank: (loss, grad norm) by step, and weights."""
    model = _model(0, torch.float32, tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    seen = []
    for data in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, samples(data))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    return seen, {name: param.detach() for name, param in model.named_parameters()}


def _ddp_config(overlap: bool):
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, overlap_param_gather=overlap
    )


def _collectives(groups, inter_dtype: str, comm: str):
    from megatron_ext.paro.collectives import make_collectives

    return make_collectives(comm, groups, inter_dtype=inter_dtype)


def _megatrons(metadata: dict | None) -> dict:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {**(metadata or {}), "dp_cp_group": group}
