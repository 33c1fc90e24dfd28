"""Reduces the canonical gradients of a Keras model on torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua_ext import basics
from bagua_ext._core import lib
from bagua_ext.buckets import Piece, lay_out
from bagua_ext.interop.wire import Wire
from bagua_ext.process_sets import group_of
from bagua_ext.torch._compile import keep_out
from bagua_ext.torch._plan import Plan


class TorchExchange:
    """Reduces tensors, given by the names of ``wire``, in one registered plan."""

    def __init__(self, plan_name: str, wire: Wire, arguments: Any, agreed: str) -> None:
        self._plan_name, self._wire, self._arguments = plan_name, wire, arguments
        self._agreed = agreed
        self._plan: Plan | None = None
        self._places: list[int] = []

    @keep_out
    def run(self, sent: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns the results; those on the CPU are views that the next call overwrites."""
        if self._plan is None or self._plan.generation != basics.generation():
            self._register()
        plan = self._plan
        for place, tensor in zip(self._places, sent, strict=True):
            if tensor is not None:
                plan.views[place].copy_(tensor.detach())
                basics.check(lib.bagua_plan_ready(plan.number, place))
        plan.finish()
        used = plan.used()
        device = next((tensor.device for tensor in sent if tensor is not None), None)
        views = [plan.views[place] if used[place] else None for place in self._places]
        return [view if view is None or device is None else view.to(device) for view in views]

    def _register(self) -> None:
        wire, arguments = self._wire, self._arguments
        described = zip(wire.shapes, wire.dtypes, strict=True)
        tensors = [torch.empty(s, dtype=getattr(torch, d), device="meta") for s, d in described]
        pieces = [Piece(tensor.dtype, tensor.nbytes) for tensor in tensors]
        order, bucket_of = lay_out(pieces, range(len(tensors)), arguments.bucket_bytes)
        self._plan = Plan(
            self._plan_name,
            [wire.names[i] for i in order],
            [tensors[i] for i in order],
            arguments.reduction,
            arguments.bucket_bytes,
            bucket_of,
            agreed=self._agreed,
            group=group_of(arguments.process_set),
        )
        self._places = [order.index(i) for i in range(len(order))]
