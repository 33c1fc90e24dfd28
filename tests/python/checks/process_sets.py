"""Process sets: every operation on them, against values computed from the members' inputs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from driver import raised, run_checks
from operations import DTYPES, OPS, close, reduced, values
from torch import nn
from training import build, loss_of

import bagua_ext.torch as hvd
from bagua_ext import basics
from bagua_ext._core import ffi, lib

FLOAT = torch.float32


def lists() -> list[list[int]]:
    """Ranks of sets that overlap, are nested, hold one rank, and split the job in two."""
    size = hvd.size()
    wanted = [
        [0],
        [size - 1],
        list(range(0, size, 2)),
        list(range(1, size, 2)),
        list(range(1, size)),
        list(range(size - 1)),
    ]
    kept: list[list[int]] = []
    for ranks in wanted:
        if ranks and len(ranks) < size and ranks not in kept:
            kept.append(ranks)
    return kept


@contextmanager
def added(*ranks: list[int]) -> Iterator[list[Any]]:
    """Sets of the given ranks, removed at the end."""
    sets = [hvd.add_process_set(one) for one in ranks]
    yield sets
    assert all(hvd.remove_process_set(one) for one in sets)


def inputs_of(ranks: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [values(rank, shape, dtype) for rank in ranks]


# ---- The sets themselves ------------------------------------------------------------------------


def check_a_set_that_is_not_added() -> None:
    own = hvd.ProcessSet([0])
    assert own.ranks == [0] and own.process_set_id is None
    for call in (
        own.rank,
        own.size,
        own.included,
        lambda: hvd.allreduce(torch.ones(1), process_set=own),
    ):
        raised(ValueError, call, "ProcessSet([0])", "add_process_set")
    assert hvd.remove_process_set(own) is False
    for wrong in (3, "all", [0, "1"], [0.5], None):
        raised(ValueError, lambda wrong=wrong: hvd.ProcessSet(wrong), "ranks")
    everyone = list(range(hvd.size()))
    raised(ValueError, lambda: hvd.add_process_set(everyone), "global_process_set", "same ranks")
    raised(ValueError, lambda: hvd.add_process_set([]), "at least one rank")
    raised(ValueError, lambda: hvd.add_process_set([0, 0]), "rank 0 is given twice")
    raised(ValueError, lambda: hvd.add_process_set([hvd.size()]), f"no rank {hvd.size()}")
    raised(ValueError, lambda: hvd.remove_process_set(hvd.global_process_set), "cannot be removed")


def check_numbers_and_places() -> None:
    before = hvd.process_set_ids()
    assert before == [0]
    with added(*lists()) as sets:
        numbers = [one.process_set_id for one in sets]
        assert hvd.allgather_object(numbers) == [numbers] * hvd.size()
        assert len({0, *numbers}) == len(numbers) + 1
        known = {0: list(range(hvd.size())), **dict(zip(numbers, lists(), strict=True))}
        assert hvd.get_process_set_ids_and_ranks() == known
        assert hvd.process_set_ids() == sorted(known)
        for one, ranks in zip(sets, lists(), strict=True):
            assert one.ranks == ranks and one.size() == len(ranks)
            assert one.included() == (hvd.rank() in ranks)
            if one.included():
                assert ranks[one.rank()] == hvd.rank()
            else:
                raised(ValueError, one.rank, f"rank {hvd.rank()} is no member", str(ranks))
            twin = hvd.ProcessSet(reversed(ranks))
            raised(ValueError, lambda twin=twin: hvd.add_process_set(twin), "same ranks")
            raised(ValueError, lambda one=one: hvd.add_process_set(one), "same ranks")
            assert pickle.loads(pickle.dumps(one)) is one
    assert pickle.loads(pickle.dumps(hvd.global_process_set)) is hvd.global_process_set
    assert hvd.process_set_ids() == before


def check_lists_that_differ() -> None:
    if hvd.size() < 2:
        return
    odd = hvd.rank() == hvd.size() - 1
    for _ in range(2):
        call = lambda: hvd.add_process_set([1] if odd else [0])  # noqa: E731
        words = (f"rank {hvd.size() - 1} sent rank 1", "rank 0 sent rank 0")
        raised(hvd.MismatchError, call, "add_process_set", *words)
    with added([0], [1]) as (first, second):
        call = lambda: hvd.remove_process_set(second if odd else first)  # noqa: E731
        raised(hvd.MismatchError, call, "remove_process_set", "(rank 0)", "(rank 1)")


def check_members_alone_may_use_a_set() -> None:
    x = torch.ones(2, 2)
    calls = [
        lambda s: hvd.allreduce(x, process_set=s),
        lambda s: hvd.allreduce_(x, process_set=s),
        lambda s: hvd.allreduce_async(x, process_set=s),
        lambda s: hvd.allreduce_async_(x, process_set=s),
        lambda s: hvd.grouped_allreduce([x], process_set=s),
        lambda s: hvd.allgather(x, process_set=s),
        lambda s: hvd.broadcast(x, 0, process_set=s),
        lambda s: hvd.reducescatter(x, process_set=s),
        lambda s: hvd.alltoall(x, process_set=s),
        lambda s: hvd.barrier(process_set=s),
        lambda s: hvd.broadcast_object(x, 0, process_set=s),
        lambda s: hvd.allgather_object(x, process_set=s),
        lambda s: hvd.broadcast_parameters({"x": x}, 0, process_set=s),
        lambda s: hvd.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), process_set=s),
    ]
    with added(*lists()) as sets:
        for one in sets:
            if one.included():
                continue
            for call in calls:
                words = (f"rank {hvd.rank()} is no member", repr(one))
                raised(ValueError, lambda call=call, one=one: call(one), *words)
        for one in sets:
            outside = next(rank for rank in range(hvd.size()) if rank not in one.ranks)
            if one.included():
                call = lambda: hvd.broadcast(x, outside, process_set=one)  # noqa: B023, E731
                raised(ValueError, call, f"root_rank {outside}", "process set")


def check_a_set_in_use_stays() -> None:
    if hvd.size() < 3:
        return
    with added([0, 1]) as (pair,):
        last = hvd.rank() == 1
        handle = hvd.allreduce_async(torch.ones(1), name="mine", process_set=pair) if last else None
        call = lambda: hvd.remove_process_set(pair)  # noqa: E731
        words = ("process set", "allreduce 'mine' on rank 1")
        raised(hvd.MismatchError, call, "remove_process_set", *words)
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(torch.ones(1), name="mine", process_set=pair)
        if handle is not None:
            assert hvd.synchronize(handle).item() == 1.0


# ---- Operations ---------------------------------------------------------------------------------


def check_allreduce() -> None:
    with added(*lists()) as sets:
        for one in sets:
            if not one.included():
                continue
            for dtype in DTYPES:
                for name, op in OPS.items():
                    if dtype is torch.bool and name == "Average":
                        continue
                    for shape in ((5,), (1000,)):
                        got = hvd.allreduce(
                            values(hvd.rank(), shape, dtype), op=op, process_set=one
                        )
                        close(got, reduced(inputs_of(one.ranks, shape, dtype), name))


def check_every_form_of_allreduce() -> None:
    with added(*lists()) as sets:
        for one in sets:
            if not one.included():
                continue
            want = reduced(inputs_of(one.ranks, (70,), FLOAT), "Average")
            x, y = (values(hvd.rank(), (70,), FLOAT) for _ in range(2))
            close(hvd.synchronize(hvd.allreduce_async(x, process_set=one)), want)
            hvd.allreduce_(x, process_set=one)
            close(x, want)
            hvd.synchronize(hvd.allreduce_async_(y, process_set=one))
            close(y, want)
            group = [values(hvd.rank(), (n,), FLOAT) for n in (3, 70)]
            for got in (
                hvd.grouped_allreduce(group, process_set=one),
                hvd.synchronize(hvd.grouped_allreduce_async(group, process_set=one)),
                hvd.grouped_allreduce_(group, process_set=one),
            ):
                close(got[0], reduced(inputs_of(one.ranks, (3,), FLOAT), "Average"))
                close(got[1], want)


def check_exchanges() -> None:
    with added(*lists()) as sets:
        for one in sets:
            if not one.included():
                continue
            rank, ranks, place, size = hvd.rank(), one.ranks, one.rank(), one.size()
            parts = inputs_of(ranks, (4, 3), FLOAT)
            uneven = [values(r, (r + 1, 2), FLOAT) for r in ranks]
            close(hvd.allgather(uneven[place], process_set=one), torch.cat(uneven))
            pair = hvd.grouped_allgather([uneven[place], parts[place]], process_set=one)
            close(pair[0], torch.cat(uneven))
            close(pair[1], torch.cat(parts))
            for root in ranks:
                close(
                    hvd.broadcast(parts[place], root, process_set=one), values(root, (4, 3), FLOAT)
                )
                x = values(rank, (9,), torch.int16)
                hvd.broadcast_(x, root, process_set=one)
                close(x, values(root, (9,), torch.int16))
            whole = inputs_of(ranks, (2 * size + 1, 3), FLOAT)
            rows = [3] + [2] * (size - 1)
            want = reduced(whole, "Average").split(rows)[place]
            close(hvd.reducescatter(whole[place], process_set=one), want)
            # Place p sends p + q rows to place q.
            splits = [[p + q for q in range(size)] for p in range(size)]
            sent = [values(r, (sum(splits[p]), 2), FLOAT) for p, r in enumerate(ranks)]
            got, received = hvd.alltoall(sent[place], splits[place], process_set=one)
            assert received.tolist() == [p + place for p in range(size)]
            close(got, torch.cat([sent[p].split(splits[p])[place] for p in range(size)]))
            even = [values(r, (2 * size,), FLOAT) for r in ranks]
            got = hvd.alltoall(even[place], process_set=one)
            close(got, torch.cat([e[2 * place : 2 * place + 2] for e in even]))
            hvd.barrier(process_set=one)


def check_overlapping_sets_in_an_order_of_each_ranks_own() -> None:
    with added(*lists()) as sets:
        for turn in range(6):
            own = [hvd.global_process_set] + [one for one in sets if one.included()]
            if hvd.rank() % 2:
                own.reverse()
            started = [
                (
                    one,
                    hvd.allreduce_async(
                        values(hvd.rank(), (n,), FLOAT), None, "x", hvd.Sum, process_set=one
                    ),
                )
                for one in own
                for n in [40 + turn]
            ]
            for one, handle in started:
                close(
                    hvd.synchronize(handle),
                    reduced(inputs_of(one.ranks, (40 + turn,), FLOAT), "Sum"),
                )


def check_gradients() -> None:
    """Against the gradients that one process finds, which applies the definition to all inputs."""

    def scatter(xs: list[torch.Tensor], place: int) -> torch.Tensor:
        return sum(xs).tensor_split(len(xs))[place] / len(xs)

    def exchange(xs: list[torch.Tensor], place: int) -> torch.Tensor:
        return torch.cat([x.tensor_split(len(xs))[place] for x in xs])

    forms = {
        "average": (lambda x, s: hvd.allreduce(x, process_set=s), lambda xs, p: sum(xs) / len(xs)),
        "grouped": (
            lambda x, s: hvd.grouped_allreduce([x], op=hvd.Sum, process_set=s)[0],
            lambda xs, p: sum(xs),
        ),
        "max": (
            lambda x, s: hvd.allreduce(x, op=hvd.Max, process_set=s),
            lambda xs, p: torch.stack(xs).amax(0),
        ),
        "broadcast": (
            lambda x, s: hvd.broadcast(x, s.ranks[-1], process_set=s),
            lambda xs, p: xs[-1],
        ),
        "allgather": (lambda x, s: hvd.allgather(x, process_set=s), lambda xs, p: torch.cat(xs)),
        "reducescatter": (lambda x, s: hvd.reducescatter(x, process_set=s), scatter),
        "alltoall": (lambda x, s: hvd.alltoall(x, process_set=s), exchange),
    }
    with added(*lists()) as sets:
        for one in sets:
            if not one.included():
                continue
            for name, (call, definition) in forms.items():
                shape = (2 * one.size(), 3)
                inputs = [x.clone().requires_grad_() for x in inputs_of(one.ranks, shape, FLOAT)]
                outputs = [definition(inputs, place) for place in range(one.size())]
                weights = [
                    torch.arange(1.0, o.numel() + 1).reshape(o.shape) + p
                    for p, o in enumerate(outputs)
                ]
                sum((o * w).sum() for o, w in zip(outputs, weights, strict=True)).backward()
                x = values(hvd.rank(), shape, FLOAT).requires_grad_()
                got = call(x, one)
                close(got, outputs[one.rank()])
                (got * weights[one.rank()]).sum().backward()
                # An input that no output depends on has no gradient; the operation's is zero.
                own = inputs[one.rank()].grad
                want = torch.zeros(shape) if own is None else own
                torch.testing.assert_close(x.grad, want, msg=lambda m, n=name: f"{n}: {m}")


def check_compiled_operations() -> None:
    calls = [
        lambda x, s: hvd.allreduce(x, name="c", process_set=s),
        lambda x, s: hvd.grouped_allreduce([x], name="c", process_set=s)[0],
        lambda x, s: hvd.broadcast(x, s.ranks[-1], name="c", process_set=s),
        lambda x, s: hvd.reducescatter(x, name="c", process_set=s),
        lambda x, s: hvd.allgather(x, name="c", process_set=s),
        lambda x, s: hvd.alltoall(x, name="c", process_set=s),
    ]
    if hvd.size() != 3:
        return  # compiling takes seconds
    with added([1, 2]) as (one,):
        if not one.included():
            return
        for call in calls:
            compiled = torch.compile(
                lambda x, call=call: call(x, one) * 2, fullgraph=True, backend="aot_eager"
            )
            x = values(hvd.rank(), (2 * one.size(), 3), FLOAT).requires_grad_()
            y = x.detach().clone().requires_grad_()
            got, want = compiled(x), call(y, one) * 2
            close(got, want)
            weights = torch.arange(1.0, got.numel() + 1).reshape(got.shape) + hvd.rank()
            (got * weights).sum().backward()
            (want * weights).sum().backward()
            close(x.grad, y.grad)


# ---- Models -------------------------------------------------------------------------------------


def check_broadcasts_of_models_and_objects() -> None:
    with added(*lists()) as sets:
        for one in sets:
            if not one.included():
                continue
            root = one.ranks[-1]
            model = nn.Linear(3, 2)
            with torch.no_grad():
                model.weight.fill_(hvd.rank())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + hvd.rank(), momentum=0.9)
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            hvd.broadcast_parameters(model.state_dict(), root, process_set=one)
            weights = hvd.allgather_object(model.weight.tolist(), process_set=one)
            assert len(weights) == one.size() and weights == [weights[-1]] * one.size()
            hvd.broadcast_optimizer_state(optimizer, root, process_set=one)
            assert optimizer.param_groups[0]["lr"] == 0.1 + root
            got = hvd.broadcast_object({"from": hvd.rank()}, root, process_set=one)
            assert got == {"from": root}
            if one.size() > 1:
                odd = torch.ones(3 if hvd.rank() == root else 2)
                call = lambda: hvd.broadcast_parameters({"w": odd}, root, process_set=one)  # noqa: B023, E731
                words = (f"rank {root} has float32[3]", f"rank {one.ranks[0]} has float32[2]")
                raised(hvd.MismatchError, call, *words)


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def check_optimizers_of_sets_train_on_their_members_batches() -> None:
    """Each rank trains a model with every set it is in, and one with all ranks, in turns."""
    with added(*lists()) as sets:
        trained = []
        for one in [hvd.global_process_set, *sets]:
            if not one.included():
                continue
            shared, alone = build(), build()
            kwargs: dict[str, Any] = {"bucket_bytes": 256, "process_set": one}
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(shared.parameters(), lr=0.1), shared.named_parameters(), **kwargs
            )
            trained.append((one, shared, optimizer, alone))
        for step in range(4):
            for one, shared, optimizer, alone in trained:
                optimizer.zero_grad()
                loss_of(shared, batch_of(hvd.rank(), step)).backward()
                optimizer.step()
                joined = [
                    torch.cat(part)
                    for part in zip(*(batch_of(r, step) for r in one.ranks), strict=True)
                ]
                alone.zero_grad()
                loss_of(alone, tuple(joined)).backward()
                with torch.no_grad():
                    for ours, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
                        theirs -= 0.1 * theirs.grad
                        torch.testing.assert_close(ours, theirs)
        for _, shared, optimizer, _ in trained[1:]:
            again = pickle.loads(pickle.dumps(optimizer))
            assert (
                again._arguments["settings"].process_set
                is optimizer._arguments["settings"].process_set
            )
            assert copy.deepcopy(shared) is not shared
        hvd.barrier()


def check_optimizers_end_with_their_set() -> None:
    model = build()
    one = hvd.add_process_set([0]) if hvd.size() > 1 else None
    if one is None:
        return
    optimizer = None
    if one.included():
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), process_set=one
        )
        loss_of(model, batch_of(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert hvd.remove_process_set(one)
    if optimizer is not None:
        call = lambda: loss_of(model, batch_of(0, 1)).backward()  # noqa: E731
        raised(ValueError, call, "process set", "removed")


# ---- Life ---------------------------------------------------------------------------------------


def check_the_core_gives_time_back_while_others_are_missing() -> None:
    """A call with no time goes on when it is repeated."""
    members, number = ffi.new("int32_t[]", [0]), ffi.new("int32_t *")
    late = hvd.rank() == hvd.size() - 1

    def until_done(call: Any) -> None:
        status = call(0.0)
        if not late:
            assert status == lib.BAGUA_IN_PROGRESS
        hvd.barrier()
        while status == lib.BAGUA_IN_PROGRESS:
            status = call(0.1)
        basics.check(status)

    if hvd.size() == 1:
        return
    if late:
        hvd.barrier()
        basics.check(lib.bagua_group_add(members, 1, -1.0, number))
        hvd.barrier()
        basics.check(lib.bagua_group_remove(number[0], -1.0))
    else:
        until_done(lambda seconds: lib.bagua_group_add(members, 1, seconds, number))
        until_done(lambda seconds: lib.bagua_group_remove(number[0], seconds))
    assert lib.bagua_group_size(number[0]) == -1 and lib.bagua_group_rank(number[0]) == -1


def check_sets_end_with_shutdown_and_begin_with_init() -> None:
    static = [hvd.ProcessSet(ranks) for ranks in lists()]
    for turn in range(3):
        hvd.shutdown()
        for one in static:
            assert one.process_set_id is None
            raised(hvd.NotInitializedError, one.size, "init()")
        raised(ValueError, lambda: hvd.init(process_sets="static"), "static")
        raised(ValueError, lambda: hvd.init(ranks=[0]), "ranks=[0]", "process_sets")
        assert not hvd.is_initialized()
        if turn == 1:
            hvd.init(process_sets="dynamic")
            assert hvd.process_set_ids() == [0]
            for one in static:
                raised(ValueError, one.size, "not added")
            continue
        hvd.init(process_sets=static)
        assert [one.process_set_id for one in static] == list(range(1, len(static) + 1))
        hvd.init(process_sets=static)
        for one in static:
            if one.included():
                got = hvd.allreduce(values(hvd.rank(), (3,), FLOAT), op=hvd.Sum, process_set=one)
                close(got, reduced(inputs_of(one.ranks, (3,), FLOAT), "Sum"))
    assert all(hvd.remove_process_set(one) for one in static)


if __name__ == "__main__":
    run_checks(globals())
