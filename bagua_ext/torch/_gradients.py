"""Gradients of the operations, for eager mode (autograd.Function) and for torch.compile.

The formulas are written once, on a table of operations: the eager ones raise bagua_ext's errors and
answer signals, torch.ops.bagua_ext's can be put into a compiled graph.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from bagua_ext import basics
from bagua_ext._core import lib
from bagua_ext.exceptions import BaguaError
from bagua_ext.process_sets import ProcessSet, group_of
from bagua_ext.reduce_ops import NAMES, Average, Max, Min, Sum
from bagua_ext.torch import _submit

Tensor = torch.Tensor


def _eager(process_set: ProcessSet) -> SimpleNamespace:
    from bagua_ext.torch import exchanges
    from bagua_ext.torch import operations as ops

    return SimpleNamespace(
        rank=process_set.rank,
        size=process_set.size,
        allreduce=lambda t, name, op, pre, post: ops.allreduce(
            t,
            None,
            name,
            op=op,
            prescale_factor=pre,
            postscale_factor=post,
            process_set=process_set,
        ),
        allgather=lambda t, name: exchanges.allgather(t, name, process_set),
        alltoall=lambda t, splits, name: exchanges.alltoall(t, splits, name, process_set)[0],
    )


def _compiled(group: int) -> SimpleNamespace:
    ops = torch.ops.bagua_ext
    return SimpleNamespace(
        rank=lambda: lib.bagua_group_rank(group),
        size=lambda: lib.bagua_group_size(group),
        allreduce=lambda t, name, op, pre, post: ops.allreduce(t, name or "", op, pre, post, group),
        allgather=lambda t, name: ops.allgather(t, name or "", group),
        alltoall=lambda t, splits, name: ops.alltoall(t, splits, name or "", group)[0],
    )


def _back(name: str | None) -> str | None:
    return f"{name}.gradient" if name else None


# ---- Formulas -----------------------------------------------------------------------------------


def _allreduce_gradient(
    ops: Any, grad: Tensor, saved: tuple[Tensor, ...], name: Any, op: int, pre: float, post: float
) -> Tensor:
    if op in (Average, Sum):
        return ops.allreduce(grad, _back(name), op, pre, post)
    if op not in (Min, Max):
        raise BaguaError(
            f"allreduce has no gradient for op={NAMES[op]}; use Sum, Average, Min or Max"
        )
    tensor, output = saved
    # Ranks that hold the extreme share the gradient evenly.
    holds = _is_extreme(tensor, output, pre * post).to(grad.dtype)
    holders = ops.allreduce(holds, _back(name and f"{name}.holders"), Sum, 1.0, 1.0)
    return ops.allreduce(grad, _back(name), Sum, pre, post) * holds / holders.clamp(min=1.0)


def _is_extreme(tensor: Tensor, extreme: Tensor, factor: float) -> Tensor:
    if factor == 1.0:
        return tensor == extreme
    # The core scales before and after, and rounds each time.
    slack = 4 * torch.finfo(tensor.dtype).eps
    return (tensor * factor - extreme).abs() <= slack * extreme.abs()


def _require_linear(op: int) -> None:
    if op not in (Average, Sum):
        raise BaguaError(
            f"grouped_allreduce has no gradient for op={NAMES[op]}; use Average or Sum"
        )


def _broadcast_gradient(ops: Any, grad: Tensor, name: Any, root: int) -> Tensor:
    total = ops.allreduce(grad, _back(name), Sum, 1.0, 1.0)
    return total if basics.rank() == root else torch.zeros_like(total)


def _allgather_gradient(ops: Any, grad: Tensor, rows: Tensor, name: Any, own: int) -> Tensor:
    total = ops.allreduce(grad, _back(name), Sum, 1.0, 1.0)
    begin = int(rows[: ops.rank()].sum())
    return total.narrow(0, begin, own)


def _reducescatter_gradient(
    ops: Any, grad: Tensor, name: Any, op: int, pre: float, post: float
) -> Tensor:
    if op not in (Average, Sum):
        raise BaguaError(f"reducescatter has no gradient for op={NAMES[op]}; use Average or Sum")
    factor = pre * post / (ops.size() if op == Average else 1)
    return ops.allgather(grad.contiguous() * factor, _back(name))


# ---- Eager --------------------------------------------------------------------------------------


class Allreduce(torch.autograd.Function):
    """allreduce(tensor, name, op, prescale, postscale, process_set)."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        name: Any,
        op: int,
        pre: float,
        post: float,
        process_set: ProcessSet,
    ) -> Tensor:
        """Returns the reduction."""
        values = _submit.dense(tensor)
        output = torch.empty_like(values, requires_grad=False)
        group = group_of(process_set)
        _submit.run(lib.BAGUA_ALLREDUCE, values, output, name, op, 0, pre, post, group)
        ctx.process_set, ctx.arguments = process_set, (name, op, pre, post)
        ctx.save_for_backward(*((tensor, output) if op in (Min, Max) else ()))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Returns the gradient of the tensor."""
        ops = _eager(ctx.process_set)
        grad = _allreduce_gradient(ops, grad, ctx.saved_tensors, *ctx.arguments)
        return grad, None, None, None, None, None


class GroupedAllreduce(torch.autograd.Function):
    """grouped_allreduce(name, op, prescale, postscale, process_set, *tensors)."""

    @staticmethod
    def forward(
        ctx: Any,
        name: Any,
        op: int,
        pre: float,
        post: float,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Returns the reductions."""
        from bagua_ext.torch.operations import grouped_allreduce_async

        ctx.process_set, ctx.arguments = process_set, (name, op, pre, post)
        handle = grouped_allreduce_async(tensors, None, name, op, pre, post, process_set)
        return tuple(handle.wait())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Returns the gradients of the tensors."""
        from bagua_ext.torch.operations import grouped_allreduce

        name, op, pre, post = ctx.arguments
        _require_linear(op)
        results = grouped_allreduce(
            grads,
            None,
            _back(name),
            op=op,
            prescale_factor=pre,
            postscale_factor=post,
            process_set=ctx.process_set,
        )
        return None, None, None, None, None, *results


class Broadcast(torch.autograd.Function):
    """broadcast(tensor, name, root, process_set)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: Any, root: int, process_set: ProcessSet) -> Tensor:
        """Returns the root's tensor."""
        from bagua_ext.torch.operations import broadcast_async

        ctx.process_set, ctx.arguments = process_set, (name, root)
        return broadcast_async(tensor, root, name, process_set).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Returns the gradient of the tensor."""
        grad = _broadcast_gradient(_eager(ctx.process_set), grad, *ctx.arguments)
        return grad, None, None, None


class Allgather(torch.autograd.Function):
    """allgather(tensor, name, process_set)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: Any, process_set: ProcessSet) -> Tensor:
        """Returns the joined tensors."""
        from bagua_ext.torch.exchanges import allgather_async

        ctx.process_set, ctx.name, ctx.own = process_set, name, tensor.shape[0]
        return allgather_async(tensor, name, process_set).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Returns the gradient of the tensor."""
        ops = _eager(ctx.process_set)
        rows = ops.allgather(torch.tensor([ctx.own]), _back(ctx.name and f"{ctx.name}.rows"))
        return _allgather_gradient(ops, grad, rows, ctx.name, ctx.own), None, None


class Reducescatter(torch.autograd.Function):
    """reducescatter(tensor, name, op, prescale, postscale, process_set)."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        name: Any,
        op: int,
        pre: float,
        post: float,
        process_set: ProcessSet,
    ) -> Tensor:
        """Returns this rank's rows of the reduction."""
        from bagua_ext.torch.exchanges import reducescatter_async

        ctx.process_set, ctx.arguments = process_set, (name, op, pre, post)
        return reducescatter_async(tensor, name, op, process_set, pre, post).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Returns the gradient of the tensor."""
        grad = _reducescatter_gradient(_eager(ctx.process_set), grad, *ctx.arguments)
        return grad, None, None, None, None, None


class Alltoall(torch.autograd.Function):
    """alltoall(tensor, splits, name, process_set); splits int64, empty for even ones."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Tensor, name: Any, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        """Returns the rows received and how many came from each rank."""
        from bagua_ext.torch.exchanges import alltoall_async

        handle = alltoall_async(tensor, splits, name, process_set)
        output, received = handle.wait()
        ctx.process_set, ctx.name = process_set, name
        ctx.save_for_backward(received)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _received: Any) -> tuple[Any, ...]:
        """Returns the gradient of the tensor."""
        (received,) = ctx.saved_tensors
        grad = _eager(ctx.process_set).alltoall(grad, received, _back(ctx.name))
        return grad, None, None, None


# ---- torch.compile ------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensor, *ctx.arguments, ctx.group = inputs
    ctx.rows = tensor.shape[0] if tensor.dim() else 1


def _save_allreduce(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _save(ctx, inputs, output)
    ctx.save_for_backward(*((inputs[0], output) if inputs[2] in (Min, Max) else ()))


def _save_alltoall(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *_, ctx.name, ctx.group = inputs
    ctx.save_for_backward(output[1])


def _compiled_allreduce(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grad = _allreduce_gradient(_compiled(ctx.group), grad, ctx.saved_tensors, *ctx.arguments)
    return grad, None, None, None, None, None


def _compiled_broadcast(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _broadcast_gradient(_compiled(ctx.group), grad, *ctx.arguments), None, None, None


def _compiled_allgather(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # The position of this rank's rows depends on data; a reducescatter by even parts would not fit
    # uneven ones, so every rank's gradient rows travel to their owner.
    ops, (name,) = _compiled(ctx.group), ctx.arguments
    rows = ops.allgather(grad.new_full((1,), ctx.rows, dtype=torch.int64), _back(f"{name}.rows"))
    total = ops.allreduce(grad, _back(name), Sum, 1.0, 1.0)
    index = rows[: ops.rank()].sum() + torch.arange(ctx.rows, device=grad.device)
    return total.index_select(0, index), None, None


def _compiled_reducescatter(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grad = _reducescatter_gradient(_compiled(ctx.group), grad, *ctx.arguments)
    return grad.narrow(0, 0, ctx.rows), None, None, None, None, None


def _compiled_alltoall(ctx: Any, grad: Tensor, _received: Any) -> tuple[Any, ...]:
    (received,) = ctx.saved_tensors
    return _compiled(ctx.group).alltoall(grad, received, _back(ctx.name)), None, None, None


def _save_group(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.arguments = inputs[1:]


def _compiled_group(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    name, op, pre, post, group = ctx.arguments
    _require_linear(op)
    results = torch.ops.bagua_ext.grouped_allreduce(grads, _back(name) or "", op, pre, post, group)
    return results, None, None, None, None, None


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _unknown_rows(tensor: Tensor) -> Tensor:
    rows = torch.library.get_ctx().new_dynamic_size()
    return tensor.new_empty((rows, *tensor.shape[1:]))


def _own_rows(tensor: Tensor, group: int) -> Tensor:
    whole, rest = divmod(tensor.shape[0], lib.bagua_group_size(group))
    own = whole + (1 if lib.bagua_group_rank(group) < rest else 0)
    return tensor.new_empty((own, *tensor.shape[1:]))


def register_for_compile() -> None:
    """Tells torch.compile the shapes and gradients of torch.ops.bagua_ext."""
    fakes = {
        "allreduce": lambda t, name, op, pre, post, group: _like(t),
        "grouped_allreduce": lambda ts, name, op, pre, post, group: [_like(t) for t in ts],
        "broadcast": lambda t, name, root, group: _like(t),
        "allgather": lambda t, name, group: _unknown_rows(t),
        "reducescatter": lambda t, name, op, pre, post, group: _own_rows(t, group),
        "alltoall": lambda t, splits, name, group: (
            _unknown_rows(t),
            torch.empty(lib.bagua_group_size(group), dtype=torch.int64),
        ),
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"bagua_ext::{name}", fake)
    gradients = {
        "allreduce": (_compiled_allreduce, _save_allreduce),
        "broadcast": (_compiled_broadcast, _save),
        "allgather": (_compiled_allgather, _save),
        "reducescatter": (_compiled_reducescatter, _save),
        "alltoall": (_compiled_alltoall, _save_alltoall),
    }
    gradients["grouped_allreduce"] = (_compiled_group, _save_group)
    for name, (backward, save) in gradients.items():
        torch.library.register_autograd(f"bagua_ext::{name}", backward, setup_context=save)
