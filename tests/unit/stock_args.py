"""Freshly parsed arguments of a small GPT job, without importing megatron.

`tests/contract/test_flags.py` holds `DEFAULTS` against Megatron's parser.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext import rules

DEFAULTS: dict[str, Any] = {
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "bf16": False,
    "attention_backend": "auto",
    "context_parallel_size": 1,
    "cp_comm_type": ["p2p"],
    "cpu_offloading_num_layers": 0,
    "cuda_graph_impl": "none",
    "data_args_path": None,
    "data_cache_path": None,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "data_path": None,
    "dataloader_type": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "decoder_seq_length": None,
    "decrease_batch_size_if_needed": False,
    "delay_wgrad_compute": False,
    "distributed_backend": "nccl",
    "enable_cuda_graph": False,
    "encoder_num_layers": None,
    "encoder_seq_length": None,
    "eval_global_batch_size": None,
    "eval_micro_batch_size": None,
    "external_cuda_graph": False,
    "ffn_hidden_size": None,
    "fine_grained_activation_offloading": False,
    "fp16": False,
    "fp4": None,
    "fp4_param_gather": False,
    "fp8": None,
    "fp8_param_gather": False,
    "global_batch_size": None,
    "group_query_attention": False,
    "heterogeneous_layers_config_encoded_json": None,
    "heterogeneous_layers_config_path": None,
    "hidden_size": None,
    "hybrid_context_parallel": False,
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "kv_channels": None,
    "layernorm_zero_centered_gamma": False,
    "lr": None,
    "lr_decay_iters": None,
    "lr_decay_samples": None,
    "lr_warmup_fraction": None,
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    "max_position_embeddings": None,
    "metadata_path": None,
    "micro_batch_size": None,
    "microbatch_group_size_per_vp_stage": None,
    "min_lr": 0.0,
    "mock_data": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_token_dispatcher_type": "allgather",
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "nccl_ub": False,
    "num_attention_heads": None,
    "num_distributed_optimizer_instances": 1,
    "num_experts": None,
    "num_layers": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_query_groups": 1,
    "num_virtual_stages_per_pipeline_rank": None,
    "optimizer_cuda_graph": False,
    "overlap_grad_reduce": False,
    "overlap_p2p_comm": True,
    "per_split_data_args_path": None,
    "perform_rl_step": False,
    "pipeline_model_parallel_layout": None,
    "pipeline_model_parallel_size": 1,
    "recompute_activations": False,
    "recompute_granularity": None,
    "save": None,
    "save_interval": None,
    "seq_length": None,
    "sequence_parallel": False,
    "sft": False,
    "skip_train": False,
    "spec": None,
    "step_batch_size_schedule": None,
    "swiglu": False,
    "te_precision_config_file": None,
    "tensor_model_parallel_size": 1,
    "tensor_parallel_num_weight_shards": None,
    "tensorboard_dir": None,
    "test_data_path": None,
    "tokenizer_model": None,
    "tokenizer_type": None,
    "tp_comm_overlap": False,
    "train_data_path": None,
    "train_iters": None,
    "train_samples": None,
    "transformer_impl": "transformer_engine",
    "use_checkpoint_args": False,
    "use_distributed_optimizer": False,
    "use_megatron_fsdp": False,
    "use_precision_aware_optimizer": False,
    "use_sharp": False,
    "use_torch_fsdp2": False,
    "valid_data_path": None,
    "vocab_size": None,
    "yaml_cfg": None,
}

GPT: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "train_iters": 10,
    "lr": 1e-3,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 256,
}


def nothing_given(**changes: Any) -> Namespace:
    """What the parser returns for an empty command line, on one process, with some entries changed."""
    unknown = set(changes) - set(DEFAULTS) - {"world_size"} - {n for n in changes if n.startswith("ext_")}
    assert not unknown, f"add {unknown} to DEFAULTS"
    return Namespace(**(DEFAULTS | {"world_size": 1} | changes))


def gpt(**changes: Any) -> Namespace:
    """A job that no rule objects to, with some entries changed."""
    return nothing_given(**(GPT | changes))


@dataclass(frozen=True)
class Job:
    """Jobs of one feature, to try its rules on."""

    rules: Sequence[rules.Rule]
    stock: Mapping[str, Any]
    """Entries of `GPT` and `DEFAULTS` that all its jobs change."""
    ours: Mapping[str, Any]
    """Its flags, and options that only its rules read."""

    def arguments(self, **changes: Any) -> Namespace:
        """The job, with some entries changed."""
        known = {name: value for name, value in changes.items() if name not in self.ours}
        args = gpt(**(self.stock | known))
        for name, value in (self.ours | changes).items():
            setattr(args, name, value)
        return args

    def problems(self, **changes: Any) -> list[str]:
        """What the rules say of it."""
        return rules.run(self.arguments(**changes), self.rules)

    def only(self, **changes: Any) -> str:
        """The one thing that they say."""
        found = self.problems(**changes)
        assert len(found) == 1, found
        return found[0]
