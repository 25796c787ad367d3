"""Pretrain a GPT with stock Megatron-core: the script for users of the PyPI wheel, which ships none.

    torchrun --nproc-per-node 8 -m megatron_ext pretrain_gpt.py <Megatron flags>

It follows Megatron's own conventions (`forward_step` returns output and a partial loss function that reports
the summed loss and the token count), so anything that works with it works with upstream's script, too.

Imports stand in the functions: to save a checkpoint, Megatron spawns a process per rank that imports this
file anew, and would otherwise load all of torch and Megatron for nothing.
"""

from functools import partial

BATCH_KEYS = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")


def get_batch(data_iterator, vp_stage):
    """Next microbatch on this rank: tokens, position_ids, labels, loss_mask `[b, s]`, by name.

    Every tensor-parallel rank reads the same samples itself, so nothing is broadcast; stages in the middle of
    the pipeline read nothing.
    """
    from megatron.core import mpu
    from megatron.core.utils import get_batch_on_this_cp_rank
    from megatron.training.utils import is_first_or_last_pipeline_stage

    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    batch = next(data_iterator)
    batch = {key: batch[key].cuda(non_blocking=True) if key in batch else None for key in BATCH_KEYS}
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def loss_func(loss_mask, per_token_loss):
    """Summed loss of this microbatch, its token count, and both as what is logged."""
    import torch
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import get_args

    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(per_token_loss.reshape(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for rejected, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"found {what} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    # The schedule scales the loss in place: what is logged must be a copy.
    reported = torch.stack([loss.detach().clone(), num_tokens.to(loss.dtype)])
    return loss, num_tokens, {"lm loss": reported}


def forward_step(data_iterator, model):
    """One forward pass of a microbatch; returns the model's output and the loss function for it."""
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import get_timers

    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def datasets_provider(num_samples, vp_stage=None):
    """Train, validation and test datasets for `num_samples` = (train, valid, test)."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args, print_rank_0
    from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    built_here = partial(is_first_or_last_pipeline_stage, vp_stage)
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    datasets = BlendedMegatronDatasetBuilder(dataset, num_samples, built_here, config).build()
    print_rank_0("> finished creating GPT datasets ...")
    return datasets


def main():
    """Parse Megatron's arguments and train."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    datasets_provider.is_distributed = True
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
