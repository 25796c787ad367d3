"""Extension of stock Megatron-LM: features by flags, no fork."""

__version__ = "0.1.0"
