"""SIGINT while a rank waits in the core: KeyboardInterrupt at once, and nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import torch
from driver import raised, run_checks
from torch import nn

import bagua_ext.torch as hvd


def interrupt_soon() -> None:
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()


def interrupted_on_rank_0(wait: Callable[[], object]) -> None:
    """Rank 0 waits for the others, which come only after it was interrupted."""
    if hvd.rank() == 0:
        begin = time.monotonic()
        interrupt_soon()
        raised(KeyboardInterrupt, wait)
        assert time.monotonic() - begin < 5.0
    hvd.broadcast_(torch.ones(1), 0, name="rank 0 was interrupted")


def sum_of_ones(name: str) -> None:
    got = hvd.allreduce(torch.ones(3), name=name, op=hvd.Sum)
    assert torch.equal(got, torch.full((3,), float(hvd.size())))


def check_a_blocking_operation() -> None:
    interrupted_on_rank_0(lambda: sum_of_ones("blocking"))
    if hvd.rank() != 0:
        sum_of_ones("blocking")
    sum_of_ones("after")


def check_a_handle_can_be_waited_for_again() -> None:
    handle = hvd.allreduce_async_(torch.ones(3), name="h", op=hvd.Sum) if hvd.rank() == 0 else None
    interrupted_on_rank_0(lambda: hvd.synchronize(handle))
    handle = handle or hvd.allreduce_async_(torch.ones(3), name="h", op=hvd.Sum)
    assert torch.equal(hvd.synchronize(handle), torch.full((3,), float(hvd.size())))


def check_a_gather_can_be_waited_for_again() -> None:
    handle = hvd.allgather_async(torch.ones(1), name="g") if hvd.rank() == 0 else None
    interrupted_on_rank_0(lambda: hvd.synchronize(handle))
    handle = handle or hvd.allgather_async(torch.ones(1), name="g")
    assert torch.equal(hvd.synchronize(handle), torch.ones(hvd.size()))


def check_a_join_can_be_waited_for_again() -> None:
    told = {signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, told)
    pids = hvd.allgather_object(os.getpid())
    if hvd.rank() == 0:
        raised(KeyboardInterrupt, hvd.join)
        os.kill(pids[1], signal.SIGUSR1)
    else:
        # Served by rank 0, which therefore has joined and stays joined.
        got = hvd.allreduce(torch.ones(2), name="rank 0 has joined", op=hvd.Sum)
        assert torch.equal(got, torch.full((2,), hvd.size() - 1.0))
    if hvd.rank() == 1:
        os.kill(pids[0], signal.SIGINT)
        assert signal.sigtimedwait(told, 10.0) is not None
    assert 0 <= hvd.join() < hvd.size()
    sum_of_ones("after")


def check_a_process_set_can_be_waited_for_again() -> None:
    for _ in range(2):
        interrupted_on_rank_0(lambda: hvd.add_process_set([1]))
        one = hvd.add_process_set([1])
        assert one.included() == (hvd.rank() == 1)
        interrupted_on_rank_0(lambda one=one: hvd.remove_process_set(one))
        assert hvd.remove_process_set(one)
        assert hvd.process_set_ids() == [0]
    sum_of_ones("after")


def check_the_end_of_backward() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def backward() -> None:
        optimizer.zero_grad()
        (model(torch.ones(1, 3)).sum() * (hvd.rank() + 1)).backward()

    backward()
    optimizer.step()
    interrupted_on_rank_0(backward)
    if hvd.rank() == 0:
        optimizer.synchronize()
    else:
        backward()
    mean = sum(range(1, hvd.size() + 1)) / hvd.size()
    torch.testing.assert_close(model.weight.grad, torch.full((2, 3), mean))
    optimizer.step()
    backward()
    torch.testing.assert_close(model.weight.grad, torch.full((2, 3), mean))


if __name__ == "__main__":
    run_checks(globals())
