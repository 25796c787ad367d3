"""A diffusion transformer (AdaLN-Zero) on Megatron's layers: what `pretrain_dit.py` is made of."""
