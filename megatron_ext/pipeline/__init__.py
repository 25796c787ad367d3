"""Pipeline schedules of ours at run time: chunks of the model, split backward passes, Megatron's step."""
