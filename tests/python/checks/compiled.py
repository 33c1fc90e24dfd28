"""torch.compile: the operations in one graph, and compiled modules under DistributedOptimizer."""

from __future__ import annotations

import torch
from driver import run_checks
from torch import nn
from training import Pair, adam, batches, build, plain_step

import bagua_ext.torch as hvd


def check_compiled_operations_fit_one_graph() -> None:
    rank, size = hvd.rank(), hvd.size()
    calls = [
        (lambda x: hvd.allreduce(x, op=hvd.Sum, name="c"), float(size)),
        (lambda x: hvd.broadcast(x, 0, name="c"), float(size) if rank == 0 else 0.0),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum, name="c"), 1.0),
        (lambda x: hvd.allgather(x, name="c"), float(size)),
        (lambda x: hvd.alltoall(x, name="c"), 1.0),
    ]
    for call, slope in calls:
        eager = torch.arange(6.0 * size).reshape(2 * size, 3) + rank
        compiled = torch.compile(
            lambda x, call=call: call(x) * 2, fullgraph=True, backend="aot_eager"
        )
        x = eager.clone().requires_grad_()
        got = compiled(x)
        torch.testing.assert_close(got, call(eager) * 2)
        got.sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, 2 * slope))


def check_compiled_modules() -> None:
    """Whole, cut in two graphs, compiled in place, and compiled before the optimizer is made."""
    for way in ("whole", "cut", "in place", "before"):
        pair = Pair(adam)
        module: nn.Module | object = pair.shared
        if way == "cut":

            def module(x: torch.Tensor, model: nn.Module = pair.shared) -> torch.Tensor:
                x = model[:2](x)
                torch._dynamo.graph_break()
                return model[2:](x)

            module = torch.compile(module, backend="aot_eager")
        elif way == "in place":
            pair.shared.compile(backend="aot_eager")
        elif way == "before":
            module = torch.compile(build(), backend="aot_eager")
            pair.shared = module._orig_mod
            pair.distributed = hvd.DistributedOptimizer(
                adam(module.parameters()), module.named_parameters()
            )
        else:
            module = torch.compile(module, backend="aot_eager")
        for joined, own in batches(4):
            plain_step(pair.alone, pair.plain, joined)
            loss = nn.functional.mse_loss(module(own[0]), own[1])
            pair.distributed.zero_grad()
            loss.backward()
            pair.distributed.step()
        pair.check()


def check_a_compiled_training_step() -> None:
    """Forward, loss and allreduced metric in one graph; backward outside of it."""
    pair = Pair()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss_and_metric(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = nn.functional.mse_loss(pair.shared(x), y)
        return loss, hvd.allreduce(loss.detach(), name="metric")

    for joined, own in batches(3):
        expected = nn.functional.mse_loss(pair.alone(joined[0]), joined[1])
        plain_step(pair.alone, pair.plain, joined)
        pair.distributed.zero_grad()
        loss, metric = loss_and_metric(*own)
        torch.testing.assert_close(metric, expected.detach())
        loss.backward()
        pair.distributed.step()
    pair.check()


def check_what_no_graph_can_hold_runs_between_graphs() -> None:
    rank, size = hvd.rank(), hvd.size()
    mean = (size + 1) / 2
    calls = [
        (lambda x: hvd.synchronize(hvd.allreduce_async(x, name="a")), [mean] * 3),
        (lambda x: hvd.synchronize(hvd.allreduce_async_(x, name="a")), [mean] * 3),
        (lambda x: hvd.allreduce_(x, name="a"), [mean] * 3),
        (lambda x: hvd.broadcast_(x, size - 1, name="a"), [float(size)] * 3),
        (lambda x: hvd.synchronize(hvd.allgather_async(x[:1], name="a")), range(1, size + 1)),
        (lambda x: x * hvd.rank() + hvd.size(), [(rank + 1.0) * rank + size] * 3),
        (lambda x: x + hvd.broadcast_object({"a": 1}, 0)["a"], [rank + 2.0] * 3),
        (lambda x: [hvd.barrier(), x][1], [rank + 1.0] * 3),
    ]
    for call, want in calls:
        compiled = torch.compile(lambda x, call=call: call(x * 1) * 2, backend="aot_eager")
        for _ in range(2):
            got = compiled(torch.full((3,), rank + 1.0))
            torch.testing.assert_close(got, torch.tensor([2.0 * value for value in want]))


def check_a_whole_step_in_a_compiled_function() -> None:
    pair = Pair(adam)
    step = torch.compile(plain_step, backend="aot_eager")
    for joined, own in batches(4):
        plain_step(pair.alone, pair.plain, joined)
        step(pair.shared, pair.distributed, own)
    pair.check()


if __name__ == "__main__":
    run_checks(globals())
