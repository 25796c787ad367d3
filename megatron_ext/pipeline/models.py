"""What a call of stock's schedule holds, and what there is to know of its models."""

from typing import Any

import torch
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model


def as_list(value: Any) -> list[Any]:
    """Stock passes one model, iterator or function as it is, or in a list."""
    return value if isinstance(value, list) else [value]


def iterators_of(call: dict[str, Any], chunks: int) -> list[Any]:
    """Data iterators by chunk; stages without data have None."""
    found = call["data_iterator"]
    return found if isinstance(found, list) else [found] * chunks


def half_module(model: Any) -> Any:
    """The wrapper that makes the model run in 16 bits, None without one."""
    while hasattr(model, "module"):
        if isinstance(model, Float16Module):
            return model
        model = model.module
    return None


def device_of_model(models: list[Any]) -> torch.device:
    """Where the model's parameters are."""
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cpu")


def weights_of_b(models: list[Any]) -> set[int]:
    """Ids of weights whose gradients are made in B.

    Those of the embedding, since autograd adds up what embedding and output layer give where they share it.
    And the output layer's: what it would leave for W is the gradient of a microbatch's whole logits.
    """
    found = set()
    for model in models:
        inner = unwrap_model(model)
        embedding = getattr(getattr(inner, "embedding", None), "word_embeddings", None)
        for layer in (embedding, getattr(inner, "output_layer", None)):
            weight = getattr(layer, "weight", None)
            if weight is not None:
                found.add(id(weight))
    return found
