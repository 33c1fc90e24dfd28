"""Reduces the gradients of an optimizer's parameters while backward runs.

A hook on each parameter hands its gradient to a registered plan as soon as autograd has accumulated
it; a callback at the end of backward waits for the plan. In between the core exchanges buckets.

The first backward only records the order in which gradients get ready: the first rank's order is
what the plan is laid out in, and the plan is made at the end of that backward. The same happens
when the set of parameters changes, with the old order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bagua_ext import basics
from bagua_ext._core import lib
from bagua_ext.buckets import Piece, lay_out, ready_order
from bagua_ext.exceptions import MismatchError
from bagua_ext.process_sets import ProcessSet, global_process_set, group_of
from bagua_ext.reduce_ops import Average
from bagua_ext.reductions import Reduction
from bagua_ext.torch import _submit
from bagua_ext.torch._compile import keep_out
from bagua_ext.torch._plan import Plan
from bagua_ext.torch.operations import broadcast_

Parameter = torch.Tensor

_graph_task = torch._C._current_graph_task_id
_autograd_node = torch._C._current_autograd_node
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback
_plan_ready = lib.bagua_plan_ready


# Who reduces a parameter's gradient, by the parameter's id. Wrapping a model's optimizer again must
# not leave two at work until the old one is collected, which happens at another time on each rank.
_reducers: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Settings:
    """How an optimizer's gradients are reduced; equal on all ranks."""

    name: str
    reduction: Reduction
    bucket_bytes: int
    flatten: bool
    sparse_as_dense: bool
    by_name: bool = False  # gradients lie in the order of their names, the last one first
    process_set: ProcessSet = global_process_set

    @property
    def repeatable(self) -> bool:
        """True if reducing a reduced gradient again, with more added, gives the right result."""
        return self.reduction.op == Average and self.reduction.codec == "none"


class Reducer:
    """Reduces the gradients of ``parameters()``, which may change between steps.

    ``name_of`` and ``group_of`` give a parameter's name and its group, if the user grouped any.
    Not safe for backwards of the same parameters on several threads at once.
    """

    def __init__(
        self,
        parameters: Callable[[], list[Parameter]],
        name_of: Callable[[Parameter], str],
        group_of: Callable[[Parameter], int | None],
        settings: Settings,
        passes: int,
    ) -> None:
        self.passes = passes  # backwards per reduction
        self._parameters, self._name_of, self._group_of = parameters, name_of, group_of
        self._settings = settings
        self._plan: Plan | None = None
        self._number = 0  # the plan's, for the hook
        self._tensors: list[Parameter] = []  # in the plan's order, as are the next three
        self._views: list[torch.Tensor] = []
        self._ready = bytearray()
        self._hooks: list[Any] = []
        self._ids: list[int] = []  # of `parameters()` when the hooks were made
        self._order: list[Parameter] = []  # as gradients got ready in a recorded backward
        self._passes_done = 0
        self._reduced = False  # since the last step or zero_grad
        self._open = False  # within an outermost backward
        self._recording = True  # gradients are not handed over before the end of backward
        self._nests = False  # a backward ran inside a backward: a gradient may come twice
        self._tasks: set[int] = set()  # graph tasks whose end is watched
        self._was_reduced = False  # when the running backward began
        self._agreed = 0  # generation in which the ranks agreed on an order
        self._agreed_passes = passes  # by the plan
        listed = parameters()
        self._install_hooks(listed, listed)

    def __del__(self) -> None:
        self._retire()

    def _retire(self) -> None:
        for hook in getattr(self, "_hooks", []):
            hook.remove()
        if getattr(self, "_plan", None) is not None:
            self._plan.drop()
            self._plan = None

    # ---- What the optimizer calls -------------------------------------------------------------

    def synchronize(self) -> None:
        """Reduces what was not reduced since the last step; all ranks do so in the same step.

        Afterwards each parameter that some rank used has the reduced gradient in ``grad``.
        """
        if not self._reduced:
            self._begin()
            self._finish()

    @property
    def accumulating(self) -> bool:
        """True if backwards ran whose gradients are not reduced yet."""
        return self._passes_done > 0

    def forget(self) -> None:
        """The gradients were used or thrown away: the next ones begin a new step."""
        self._reduced = self._open = False
        self._passes_done = 0
        self._tasks.clear()

    def overlap(self) -> tuple[int, int]:
        """Bytes exchanged while backward ran, and all bytes; (0, 0) before the first step."""
        return self._plan.overlap() if self._plan is not None else (0, 0)

    # ---- Hooks --------------------------------------------------------------------------------

    def _install_hooks(self, ordered: list[Parameter], listed: list[Parameter]) -> None:
        """Puts hooks on ``ordered``; ``listed`` are the same as the optimizer lists them."""
        for hook in self._hooks:
            hook.remove()
        own = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_make_hook(own, index))
            for index, parameter in enumerate(ordered)
        ]
        self._ids = [id(parameter) for parameter in listed]
        for parameter in listed:
            other = _reducers.get(id(parameter), self)
            if other is not self and any(parameter is own for own in other._parameters()):
                other._retire()
            _reducers[id(parameter)] = self

    def on_gradient(self, index: int, parameter: Parameter) -> None:
        """Autograd accumulated ``parameter.grad``; ``index`` is the parameter's in the plan."""
        if _graph_task() not in self._tasks:
            self._watch(parameter)
        if self._recording:
            self._order.append(parameter)
            return
        if parameter.grad is not self._views[index]:
            self._place(index, parameter)
        status = _plan_ready(self._number, index)
        if status:
            self._raise_twice(parameter, status)
        self._ready[index] = 1

    def _watch(self, parameter: Parameter | None) -> None:
        """Arranges for ``_on_task_end`` at the end of the running graph task."""
        if not self._open:
            self._begin()
            if self._was_reduced and not self._settings.repeatable:
                self._refuse_second_backward(parameter)
        self._tasks.add(_graph_task())
        _queue_callback(self._on_task_end)

    @keep_out
    def _on_task_end(self) -> None:
        node = _autograd_node()
        if node is None:
            self._end_backward()
            return
        # This task ran inside a node of another backward, which ends later. Once the node has run,
        # that backward is the current one and can be watched.
        self._nests = True
        node.register_hook(self._on_outer_node)

    @keep_out
    def _on_outer_node(self, *_gradients: Any) -> None:
        if _graph_task() not in self._tasks:
            self._watch(None)

    # ---- One step -----------------------------------------------------------------------------

    def _begin(self) -> None:
        self._open = True
        self._was_reduced, self._reduced = self._reduced, False
        if self._plan is not None and self._is_outdated():
            self._plan.drop()
            self._plan = None
        last = self._passes_done + 1 >= self.passes
        self._recording = self._plan is None or self._nests or not last
        self._order.clear()

    def _is_outdated(self) -> bool:
        if self._plan.generation != basics.generation() or self._agreed_passes != self.passes:
            return True
        return [id(parameter) for parameter in self._parameters()] != self._ids

    def _end_backward(self) -> None:
        self._open = False
        self._tasks.clear()
        self._passes_done += 1
        if self._passes_done >= self.passes:
            self._finish()

    def _finish(self) -> None:
        self._open = False
        self._tasks.clear()
        if self._plan is None:
            self._register()
        if self._plan is not None:
            if 0 in self._ready:
                self._hand_over_rest()
            self._plan.finish()
            complete = 0 not in self._ready
            self._ready = bytearray(len(self._tensors))
            if not complete or not self._settings.flatten:
                self._give_back()
        self._passes_done = 0
        self._reduced = True

    def _hand_over_rest(self) -> None:
        """Makes ready every gradient that is there but was not handed over by its hook."""
        for index, parameter in enumerate(self._tensors):
            if self._ready[index] or parameter.grad is None:
                continue
            self._place(index, parameter)
            basics.check(_plan_ready(self._number, index))
            self._ready[index] = 1

    def _place(self, index: int, parameter: Parameter) -> None:
        """Brings a gradient to its place in the bucket, where it stays if gradients are views."""
        grad, view = parameter.grad, self._views[index]
        if grad is view:
            return
        if grad.layout is not torch.strided:
            grad = self._densified(grad, parameter)
        view.copy_(grad.detach() if grad.requires_grad else grad)
        if self._settings.flatten:
            parameter.grad = view

    def _densified(self, grad: torch.Tensor, parameter: Parameter) -> torch.Tensor:
        if self._settings.sparse_as_dense:
            return grad.to_dense()
        raise ValueError(
            f"parameter '{self._name_of(parameter)}' has a sparse gradient. Pass "
            "sparse_as_dense=True to DistributedOptimizer, or build the layer with sparse=False."
        )

    def _give_back(self) -> None:
        """Sets the gradients that this rank did not have, and those that are no views."""
        used = self._plan.used()
        for index, parameter in enumerate(self._tensors):
            if not used[index]:
                continue
            if self._settings.flatten:
                if parameter.grad is None:
                    parameter.grad = self._views[index]
            elif parameter.grad is None:
                parameter.grad = self._views[index].clone()
            elif parameter.grad.layout is not torch.strided:
                parameter.grad = self._views[index].clone()
            else:
                with torch.no_grad():
                    parameter.grad.copy_(self._views[index])

    # ---- Registration -------------------------------------------------------------------------

    def _register(self) -> None:
        """Makes the plan; collective. The hooks then carry the parameters' numbers in it."""
        parameters = self._parameters()
        if not parameters:
            return
        _submit.check_tensors(parameters)
        number = {id(parameter): i for i, parameter in enumerate(parameters)}
        order = self._agreed_order(number)
        pieces = [
            Piece(p.dtype, p.numel() * p.element_size(), self._group_of(p)) for p in parameters
        ]
        settings = self._settings
        order, bucket_of = lay_out(pieces, order, settings.bucket_bytes)
        tensors = [parameters[i] for i in order]
        names = [self._name_of(parameter) for parameter in tensors]
        self._plan = Plan(
            settings.name,
            names,
            tensors,
            settings.reduction,
            settings.bucket_bytes,
            bucket_of,
            agreed=f"backward_passes_per_step={self.passes}",
            group=group_of(settings.process_set),
        )
        self._agreed_passes = self.passes
        self._number, self._tensors, self._views = self._plan.number, tensors, self._plan.views
        self._ready = bytearray(len(tensors))
        self._install_hooks(tensors, parameters)
        self._agreed = self._plan.generation

    def _agreed_order(self, number: dict[int, int]) -> list[int]:
        """Returns an order of the parameters that is the same on every rank."""
        if self._settings.by_name:
            names = [self._name_of(parameter) for parameter in self._parameters()]
            return sorted(number.values(), key=names.__getitem__, reverse=True)
        if self._agreed == basics.generation():
            # The parameters that stay keep their order, which all ranks know.
            known = [number[id(p)] for p in self._tensors if id(p) in number]
            return ready_order(known, len(number))
        ready = [number[id(p)] for p in self._order if id(p) in number]
        order = torch.tensor(ready_order(ready, len(number)))
        try:
            process_set = self._settings.process_set
            broadcast_(order, process_set.ranks[0], f"{self._settings.name}.order", process_set)
        except MismatchError:
            # The ranks have different parameters. Registering the plan says which.
            return ready_order([], len(number))
        return order.tolist()

    # ---- Errors -------------------------------------------------------------------------------

    def _refuse_second_backward(self, parameter: Parameter | None) -> None:
        if parameter is None or not self._views:
            return
        grad = parameter.grad
        if any(grad is view for view in self._views):
            self._open = False
            raise ValueError(
                f"a second backward before step() added to the reduced gradient of "
                f"'{self._name_of(parameter)}'. That is exact for op=Average without compression "
                "only. Pass backward_passes_per_step to DistributedOptimizer, or call zero_grad() "
                "before the second backward."
            )

    def _raise_twice(self, parameter: Parameter, status: int) -> None:
        removed = self._settings.process_set.process_set_id is None
        if status != lib.BAGUA_INVALID_ARGUMENT or removed:
            raise basics.error_of(status)
        raise ValueError(
            f"parameter '{self._name_of(parameter)}' got a second gradient within one backward, "
            "after the first was handed over. If an earlier backward raised, call "
            "optimizer.synchronize() on all ranks before the next; if checkpointing with "
            "use_reentrant=True began after the first step, use use_reentrant=False."
        )


def _make_hook(own: weakref.ref[Reducer], index: int) -> Callable[[Parameter], None]:
    @keep_out
    def hook(parameter: Parameter) -> None:
        reducer = own()
        if reducer is not None:
            reducer.on_gradient(index, parameter)

    return hook
