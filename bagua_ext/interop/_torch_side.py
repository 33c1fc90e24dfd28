"""What this package does with a torch model. ``_keras_side`` has the same names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from bagua_ext.interop import optimizers
from bagua_ext.interop._torch_layers import list_layers
from bagua_ext.interop.listing import Entry, Listing, Names, number_layers
from bagua_ext.torch.optimizer import DistributedOptimizer

Optimizer = torch.optim.Optimizer


def framework() -> str:
    """Names the framework for the other ranks."""
    return "torch"


def list_model(model: nn.Module, optimizer: Optimizer | None, names: Names | None) -> Listing:
    """Returns the model's tensors; trained ones are those that ``optimizer`` changes.

    Raises:
        ValueError: the optimizer changes a tensor that is not listed, is none of torch, or is
            distributed already.
    """
    plain = isinstance(optimizer, Optimizer) and not isinstance(optimizer, DistributedOptimizer)
    if optimizer is not None and not plain:
        raise ValueError(f"expected a plain torch optimizer, got {type(optimizer).__name__}")
    listing = number_layers(list_layers(model), names)
    changed = None if optimizer is None else {id(p) for p in _parameters(optimizer)}
    entries = [_completed(entry, changed) for entry in listing.entries]
    if optimizer is not None:
        listed = {id(t) for entry in entries for t in (entry.holder, entry.folded)}
        own = {id(p): name for name, p in model.named_parameters()}
        for parameter in _parameters(optimizer):
            if parameter.requires_grad and id(parameter) not in listed:
                what = own.get(id(parameter), f"of shape {tuple(parameter.shape)}")
                raise ValueError(
                    f"the optimizer trains parameter {what}, which is not among the tensors that "
                    "the ranks share: only what is not trained can be left out"
                )
    return replace(listing, entries=entries)


def _completed(entry: Entry, changed: set[int] | None) -> Entry:
    tensor = entry.holder
    trainable = tensor.requires_grad and (changed is None or id(tensor) in changed)
    return replace(entry, dtype=str(tensor.dtype).removeprefix("torch."), trainable=trainable)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_settings(optimizer: Optimizer, listing: Listing) -> dict[str, Any]:
    """Returns the optimizer's settings by canonical name."""
    kind = type(optimizer).__name__
    of_parameter = {
        id(parameter): optimizers.of_torch(kind, group)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    trained = [entry for entry in listing.entries if entry.trainable]
    return optimizers.summary({e.name: of_parameter[id(e.holder)] for e in trained})


def read(entry: Entry) -> np.ndarray:
    """Returns a copy in the model's own layout; bfloat16 as float32."""
    value = entry.holder.detach()
    if entry.folded is not None:
        value = value + entry.folded.detach()
    if value.dtype == torch.bfloat16:
        value = value.float()
    return np.array(value.cpu().numpy())


@torch.no_grad()
def write(entry: Entry, own: np.ndarray) -> None:
    """Sets the tensor to ``own``, which is in the model's own layout."""
    entry.holder.copy_(torch.from_numpy(np.ascontiguousarray(own)))
    if entry.folded is not None:
        entry.folded.zero_()


def wrap(
    optimizer: Optimizer, listing: Listing, torchs: bool, plan_name: str, options: dict[str, Any]
) -> DistributedOptimizer:
    """Returns the DistributedOptimizer whose gradients lie in canonical order.

    An LSTM's second bias is no longer trained: its gradient is the first one's.
    """
    named = [(entry.name, entry.holder) for entry in listing.entries]
    for entry in listing.entries:
        if entry.folded is not None:
            entry.folded.requires_grad_(False)
            named.append((f"{entry.name}.folded", entry.folded))
    known = {id(parameter) for _, parameter in named}
    rest = [p for p in _parameters(optimizer) if id(p) not in known]
    named += [(f"left_out.{place}", parameter) for place, parameter in enumerate(rest)]
    distributed = DistributedOptimizer(optimizer, named, **options)
    distributed._lay_out_by_name(plan_name)
    return distributed
