"""What this package needs of PyTorch. ``_tensorflow`` has the same names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

import bagua_ext.torch as hvd
from bagua_ext import basics
from bagua_ext._core import lib
from bagua_ext.buckets import Piece, lay_out
from bagua_ext.process_sets import ProcessSet, group_of
from bagua_ext.reductions import Reduction
from bagua_ext.torch._compile import keep_out as not_compiled
from bagua_ext.torch._plan import Plan

F = TypeVar("F", bound=Callable[..., Any])


class GradientReducer:
    """Reduces lists of gradients; each list of variables has a registered plan of its own."""

    def __init__(
        self,
        name: str,
        reduction: Reduction,
        bucket_bytes: int,
        process_set: ProcessSet,
        groups: Sequence[Sequence[Any]] | int | None,
        agreed: str,
    ) -> None:
        self._name, self._reduction, self._bucket_bytes = name, reduction, bucket_bytes
        self._process_set, self._groups, self._agreed = process_set, groups, agreed
        self._plans: dict[Any, tuple[Plan, list[int]]] = {}

    def __del__(self) -> None:
        for plan, _ in self._plans.values():
            plan.drop()

    @not_compiled
    def reduce(
        self, gradients: Sequence[torch.Tensor | None], variables: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Returns the reduced gradients; None for a variable that no rank has a gradient of.

        The results are views that the next call overwrites. Collective, as the first call for a
        list of variables registers its plan.
        """
        if self._process_set.size() == 1:
            return list(gradients)
        plan, place = self._plan_of(variables)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                plan.views[place[index]].copy_(gradient.detach())
                basics.check(lib.bagua_plan_ready(plan.number, place[index]))
        plan.finish()
        used = plan.used()
        return [
            plan.views[place[index]].to(variable.value.device) if used[place[index]] else None
            for index, variable in enumerate(variables)
        ]

    def _plan_of(self, variables: Sequence[Any]) -> tuple[Plan, list[int]]:
        """Returns the plan and each variable's place in it."""
        # An identity may come back after its variable is gone, with another shape.
        key = tuple((id(one), tuple(one.shape), one.dtype) for one in variables)
        if key in self._plans and self._plans[key][0].generation == basics.generation():
            return self._plans[key]
        tensors = [variable.value for variable in variables]
        group = _group_numbers(self._groups, variables)
        pieces = [
            Piece(tensor.dtype, tensor.numel() * tensor.element_size(), group[i])
            for i, tensor in enumerate(tensors)
        ]
        order, bucket_of = lay_out(pieces, range(len(tensors)), self._bucket_bytes)
        # A list keeps its number when it is registered anew.
        number = list(self._plans).index(key) if key in self._plans else len(self._plans)
        plan = Plan(
            f"{self._name}.{number}",
            [_name_of(i, variables[i]) for i in order],
            [tensors[i] for i in order],
            self._reduction,
            self._bucket_bytes,
            bucket_of,
            agreed=self._agreed,
            group=group_of(self._process_set),
        )
        self._plans[key] = plan, [order.index(i) for i in range(len(order))]
        return self._plans[key]


def _name_of(index: int, variable: Any) -> str:
    """Names a gradient by its place: Keras numbers layers by how many the process has made."""
    return f"{index}.{variable.path.split('/')[-1]}"


def _group_numbers(
    groups: Sequence[Sequence[Any]] | int | None, variables: Sequence[Any]
) -> list[int | None]:
    if isinstance(groups, int):
        count = min(groups, len(variables))
        return [i * count // len(variables) if count else None for i in range(len(variables))]
    number = {id(v): i for i, group in enumerate(groups or ()) for v in group}
    return [number.get(id(variable)) for variable in variables]


def make_reducer(
    name: str,
    reduction: Reduction,
    bucket_bytes: int,
    sparse_as_dense: bool,
    process_set: ProcessSet,
    groups: Sequence[Sequence[Any]] | int | None,
    agreed: str,
) -> GradientReducer:
    """Returns an object whose ``reduce(gradients, variables)`` returns the reduced gradients.

    Keras makes no sparse gradients on PyTorch, so ``sparse_as_dense`` changes nothing.
    """
    return GradientReducer(name, reduction, bucket_bytes, process_set, groups, agreed)


def add_to(total: Any, gradient: torch.Tensor) -> None:
    """Adds a gradient to the Keras variable ``total``."""
    total.value.add_(gradient.detach())


def scaled(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns ``gradient * factor``."""
    return gradient * factor


def keep_out(function: F) -> F:
    """Returns ``function``: only TensorFlow would rewrite it."""
    return function


def value_of(variable: Any) -> torch.Tensor:
    """Returns a tensor with the value that a Keras variable has here and now."""
    return variable.value


def choose(condition: Any, if_true: Callable[[], None], if_false: Callable[[], None]) -> None:
    """Calls one of two functions."""
    (if_true if bool(condition) else if_false)()


__all__ = ["add_to", "choose", "hvd", "keep_out", "make_reducer", "scaled", "value_of"]
