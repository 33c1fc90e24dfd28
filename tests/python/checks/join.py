"""Ranks that run out of data join; the others go on, and all train together afterwards."""

from __future__ import annotations

import copy
from typing import Any

import torch
from driver import raised, run_checks
from operations import values
from training import Batch, build, loss_of, sgd

import bagua_ext.torch as hvd

FLOAT = torch.float32


def total(ranks: list[int], shape: tuple[int, ...], dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return sum(values(rank, shape, dtype) for rank in ranks)


def left_after(turn: int) -> list[int]:
    """Rank r works in turns 0 to r, then it joins."""
    return list(range(turn, hvd.size()))


def everything_is_in_step() -> None:
    everyone = list(range(hvd.size()))
    for name in (None, "known", "new"):
        got = hvd.allreduce(values(hvd.rank(), (5,), FLOAT), name=name, op=hvd.Sum)
        assert torch.equal(got, total(everyone, (5,)))
    assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == everyone
    assert hvd.broadcast_object(hvd.rank(), hvd.size() - 1) == hvd.size() - 1
    hvd.barrier()


# ---- Operations ---------------------------------------------------------------------------------


def check_sums_and_averages_go_on_with_zeros() -> None:
    for _ in range(3):
        for turn in range(hvd.rank() + 1):
            ranks, size = left_after(turn), hvd.size()
            for shape in ((4,), (70001,)):
                x = values(hvd.rank(), shape, FLOAT)
                torch.testing.assert_close(hvd.allreduce(x), total(ranks, shape) / size)
                assert torch.equal(hvd.allreduce(x, op=hvd.Sum, name="known"), total(ranks, shape))
                whole = hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=4.0)
                torch.testing.assert_close(whole, total(ranks, shape) * 8)
            small = values(hvd.rank(), (9,), torch.int32)
            assert torch.equal(
                hvd.synchronize(hvd.allreduce_async_(small, op=hvd.Sum, name=f"turn {turn}")),
                total(ranks, (9,), torch.int32),
            )
            parts = [values(hvd.rank(), (n,), d) for n, d in ((3, FLOAT), (50, torch.int64))]
            first, second = hvd.grouped_allreduce(parts, op=hvd.Sum)
            assert torch.equal(first, total(ranks, (3,)))
            assert torch.equal(second, total(ranks, (50,), torch.int64))
            y = values(hvd.rank(), (6,), FLOAT).requires_grad_()
            hvd.allreduce(y).sum().backward()
            torch.testing.assert_close(y.grad, torch.full((6,), len(ranks) / size))
        assert hvd.join() == hvd.size() - 1
        everything_is_in_step()


def check_operations_in_flight_end() -> None:
    x = values(hvd.rank(), (1000,), FLOAT)
    handle = hvd.allreduce_async(x, op=hvd.Sum, name="flying")
    assert 0 <= hvd.join() < hvd.size()
    assert torch.equal(hvd.synchronize(handle), total(list(range(hvd.size())), (1000,)))


def check_everything_else_names_the_joined_ranks() -> None:
    if hvd.size() < 2:
        return
    x = torch.ones(2 * hvd.size())
    calls = {
        "allgather": lambda: hvd.allgather(x),
        "broadcast": lambda: hvd.broadcast(x, 0),
        "reducescatter": lambda: hvd.reducescatter(x),
        "alltoall": lambda: hvd.alltoall(x),
        "barrier": hvd.barrier,
        "allreduce": lambda: hvd.allreduce(x, op=hvd.Max),
        "allreduce 'least'": lambda: hvd.allreduce(x, op=hvd.Min, name="least"),
        "add_process_set": lambda: hvd.add_process_set([1]),
    }
    for _ in range(2):
        if hvd.rank() != 0:
            # Served, so that rank 0 has joined.
            hvd.allreduce(x, name="probe")
            for name, call in calls.items():
                raised(hvd.MismatchError, call, name, "rank 0 has joined")
            hvd.allreduce(x, name="probe")
        hvd.join(device=0)
        everything_is_in_step()


# ---- Optimizers ---------------------------------------------------------------------------------


def batch_of(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


class Reference:
    """One process that makes the steps of all ranks: missing ranks' gradients count as zeros."""

    def __init__(self) -> None:
        self.model = build()
        self.optimizer = sgd(self.model.parameters())

    def step(self, ranks: list[int], step: int, passes: int = 1) -> None:
        self.optimizer.zero_grad()
        for rank in ranks:
            for i in range(passes):
                loss = loss_of(self.model, batch_of(rank, 10 * step + i))
                (loss / hvd.size()).backward()
        self.optimizer.step()


def train(options: dict[str, Any], tolerance: float | None = None) -> None:
    passes = options.get("backward_passes_per_step", 1)
    model, reference = build(), Reference()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), bucket_bytes=256, **options
    )
    step = 0
    for epoch in range(3):
        # The first step is everyone's.
        turns = [
            list(range(hvd.size())),
            *(left_after(max(t, 0)) for t in range(-epoch, hvd.size())),
        ]
        for ranks in turns:
            step += 1
            reference.step(ranks, step, passes)
            if hvd.rank() not in ranks:
                continue
            optimizer.zero_grad()
            for i in range(passes):
                loss_of(model, batch_of(hvd.rank(), 10 * step + i)).backward()
            optimizer.step()
        assert hvd.join() == hvd.size() - 1
        # Who joined early missed steps.
        hvd.broadcast_parameters(model.state_dict(), hvd.size() - 1)
        hvd.broadcast_optimizer_state(optimizer, hvd.size() - 1)
        for ours, theirs in zip(model.parameters(), reference.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def check_uneven_steps() -> None:
    train({})


def check_uneven_steps_with_options() -> None:
    train({"flatten": False})
    train({"backward_passes_per_step": 2})
    train({"gradient_predivide_factor": 2.0})
    train({"compression": hvd.Compression.bf16}, tolerance=0.05)


def check_five_steps_against_three() -> None:
    if hvd.size() != 2:
        return
    steps = 5 if hvd.rank() == 0 else 3
    model, reference = build(), Reference()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    for step in range(5):
        reference.step([0, 1] if step < 3 else [0], step)
        if step < steps:
            optimizer.zero_grad()
            loss_of(model, batch_of(hvd.rank(), 10 * step)).backward()
            optimizer.step()
    assert hvd.join() == 0
    hvd.broadcast_parameters(model.state_dict(), 0)
    for ours, theirs in zip(model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def check_an_optimizer_that_is_gone() -> None:
    """A rank may throw its optimizer away before it joins; two optimizers, used by turns."""

    def steps(seed: int) -> None:
        models = [build(), build()]
        optimizers = [hvd.DistributedOptimizer(sgd(m.parameters())) for m in models]
        references = [Reference(), Reference()]
        for turn in range(hvd.rank() + 2):
            ranks = left_after(max(0, turn - 1))
            for model, optimizer, reference in zip(models, optimizers, references, strict=True):
                optimizer.zero_grad()
                loss_of(model, batch_of(hvd.rank(), seed + 10 * turn)).backward()
                optimizer.step()
                reference.step(ranks, seed // 10 + turn)
                want = reference.model.parameters()
                for ours, theirs in zip(model.parameters(), want, strict=True):
                    torch.testing.assert_close(ours, theirs)

    for epoch in range(3):
        steps(1000 * epoch)
        assert hvd.join() == hvd.size() - 1
        everything_is_in_step()


def check_a_first_step_without_all_ranks() -> None:
    if hvd.size() < 2:
        return
    model = build()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    if hvd.rank() != 0:
        hvd.allreduce(torch.ones(1), name="probe")
        backward = loss_of(model, batch_of(hvd.rank(), 0)).backward
        raised(hvd.MismatchError, backward, "DistributedOptimizer", "rank 0 has joined")
        optimizer.zero_grad()
    hvd.join()
    reference = Reference()
    reference.step(list(range(hvd.size())), 1)
    loss_of(model, batch_of(hvd.rank(), 10)).backward()
    optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def check_joining_in_the_midst_of_a_step() -> None:
    model = build()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), bucket_bytes=256)
    loss_of(model, batch_of(hvd.rank(), 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    weight = model[0].weight

    def fail(_gradient: torch.Tensor) -> None:
        raise KeyError("a bug of the user's")

    hook = weight.register_hook(fail)
    raised(KeyError, loss_of(model, batch_of(hvd.rank(), 1)).backward)
    hook.remove()
    raised(ValueError, hvd.join, "DistributedOptimizer", "midst of step 2")
    optimizer.synchronize()
    hvd.join()
    optimizer.zero_grad()
    want = copy.deepcopy(model)
    for rank in range(hvd.size()):
        (loss_of(want, batch_of(rank, 2)) / hvd.size()).backward()
    loss_of(model, batch_of(hvd.rank(), 2)).backward()
    torch.testing.assert_close(weight.grad, want[0].weight.grad)


def check_join_after_a_new_init() -> None:
    for _ in range(2):
        hvd.shutdown()
        raised(hvd.NotInitializedError, hvd.join, "init()")
        hvd.init()
        assert 0 <= hvd.join() < hvd.size()
        everything_is_in_step()


if __name__ == "__main__":
    run_checks(globals())
