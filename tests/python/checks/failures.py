"""One rank fails in a named place; the others say what they got. Arguments: PLACE [HOW].

The doomed rank is the last. It ends in the middle of PLACE by SIGKILL, by exit, by an exception or
by leaving the job. Every other rank prints "RESULT <class>: <text> after <seconds>", counted from
the moment that the doomed rank wrote into the file BAGUA_TEST_MOMENT just before its end, checks
that the error is lasting, and ends well.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable

import torch
from moment import MOMENT, end, end_soon, note_the_moment, wait_for_the_moment
from torch import nn

import bagua_ext.torch as hvd

BIG = 6 << 20  # elements, so that a collective takes some milliseconds
ROUNDS = 10_000_000


def collective(name: str) -> Callable[[], object]:
    x = torch.ones(BIG // 6, 6)
    share = x[: len(x) // hvd.size()]
    divisible = x[: len(share) * hvd.size()]
    calls: dict[str, Callable[[], object]] = {
        "allreduce": lambda: hvd.allreduce_(x, name="big"),
        "small": lambda: hvd.allreduce_(x[:10], name="small"),
        "grouped": lambda: hvd.grouped_allreduce_([x[:1000], x[1000:2000]], name="group"),
        "allgather": lambda: hvd.allgather(share, name="gathered"),
        "broadcast": lambda: hvd.broadcast_(x, 0, name="sent"),
        "reducescatter": lambda: hvd.reducescatter(x, name="scattered"),
        "alltoall": lambda: hvd.alltoall(divisible, name="exchanged"),
        "barrier": hvd.barrier,
        "async": lambda: all_at_once(x),
    }
    return calls[name]


def all_at_once(x: torch.Tensor) -> None:
    """Several operations in flight: every handle must fail, none may hang."""
    handles = [hvd.allreduce_async_(x[1000 * i : 1000 * i + 1000], name=f"t{i}") for i in range(8)]
    handles.append(hvd.allgather_async(x[:10], name="g"))
    errors = []
    for handle in handles:
        try:
            hvd.synchronize(handle)
        except hvd.PeerLostError as error:
            errors.append(error)
    if errors:
        assert hvd.poll(handles[0])
        raise errors[-1]


def train(doomed: bool, how: str, place: str) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), bucket_bytes=1 << 20
    )
    last = 0 if place == "register" else 3
    for step in range(ROUNDS):
        if doomed and step == last and place == "backward":
            # The hook runs in the middle of backward, with buckets in flight.
            model[3].weight.register_hook(lambda grad: end(how))
        elif doomed and step == last:
            end(how)
        optimizer.zero_grad()
        loss = model(torch.randn(64, 512)).square().mean()
        try:
            loss.backward()
        except hvd.PeerLostError:
            # Views of a bucket stay memory that can be read and written.
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(torch.isfinite(grad.mul_(2.0)).all() for grad in grads)
            raise
        optimizer.step()


def idle(doomed: bool) -> None:
    """The doomed rank takes no part in the third step, nor does it end."""
    model = nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
    )
    for step in range(3):
        if doomed and step == 2:
            wait_for_the_moment()
            return
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def change_alone(doomed: bool) -> None:
    """The doomed rank adds parameters, which registers a new plan; the others use the old one."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        second(first(torch.ones(2, 3))).sum().backward()
        optimizer.step()
        if doomed:
            optimizer.add_param_group({"params": list(second.parameters())})
    raise AssertionError("the ranks did not notice that their plans differ")


def join(doomed: bool, how: str) -> None:
    """The others have joined and serve the doomed rank's steps."""
    model = nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(5 if doomed else 1):
        if step == 4:
            end(how)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if step > 0:
            hvd.allreduce(torch.ones(3), name="served")
    hvd.join()


def work_in_sets(doomed: bool, how: str) -> None:
    """The doomed rank shares a set with its neighbour; the first rank works by itself."""
    last = hvd.size() - 1
    pair, rest = hvd.add_process_set([last - 1, last]), hvd.add_process_set(range(last))
    x = torch.ones(BIG // 100)
    for step in range(ROUNDS):
        if doomed and step == 5:
            end(how)
        if pair.included():
            hvd.allreduce_(x, name="pair", process_set=pair)
        if rest.included():
            hvd.allreduce_(x, name="rest", process_set=rest)


def load_with_workers(doomed: bool, how: str) -> None:
    """The rank dies while its forked data-loader workers live: they must not hold its place."""
    data = torch.utils.data.TensorDataset(torch.arange(1 << 20, dtype=torch.float32))
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    for step, (batch,) in enumerate(loader):
        if doomed and step == 5:
            end(how)
        hvd.allreduce_(batch, name="batch")


def leave_slowly(doomed: bool) -> None:
    """The doomed rank leaves first and ends last; the others end without a word of why."""
    others = [pid for pid in hvd.allgather_object(os.getpid()) if pid != os.getpid()]
    if not doomed:
        try:
            hvd.allreduce(torch.ones(2), name="waits")
        except hvd.PeerLostError:
            sys.exit(1)
    waiter = select.poll()
    for pid in others:
        waiter.register(os.pidfd_open(pid), select.POLLIN)
    hvd.shutdown()
    for _ in others:
        descriptor = waiter.poll()[0][0]
        waiter.unregister(descriptor)
    sys.exit(5)


def start(place: str, how: str) -> None:
    """The doomed rank ends before init, or while it waits in init for rank 0."""
    doomed = int(os.environ["BAGUA_RANK"]) == int(os.environ["BAGUA_SIZE"]) - 1
    if doomed and place == "init":
        end(how)
    if doomed:
        end_soon(how)
    elif os.environ["BAGUA_RANK"] == "0":
        wait_for_the_moment()
    hvd.init()


def run(place: str, how: str) -> None:
    if place in ("init", "joining"):
        start(place, how)
        return
    hvd.init()
    doomed = hvd.rank() == hvd.size() - 1
    hvd.barrier()
    if place in ("register", "backward", "finish"):
        train(doomed, how, place)
    elif place == "workers":
        load_with_workers(doomed, how)
    elif place == "slowly":
        leave_slowly(doomed)
    elif place == "alone":
        if doomed:
            end(how)
        hvd.allreduce(torch.ones(3), name="waits")
    elif place == "joined":
        join(doomed, how)
    elif place == "set":
        work_in_sets(doomed, how)
    elif place == "never":
        if doomed:
            hvd.allgather(torch.ones(2), name="something else")
        hvd.allreduce(torch.ones(3), name="lonely")
    elif place == "idle":
        idle(doomed)
    elif place == "change":
        change_alone(doomed)
    else:
        call = collective(place)
        if doomed:
            end_soon(how)
        for _ in range(ROUNDS):
            call()


def is_lasting() -> None:
    """After a rank was lost every operation fails at once, and shutdown works."""
    for call in (hvd.barrier, lambda: hvd.allreduce(torch.ones(2), name="after")):
        try:
            call()
        except hvd.PeerLostError:
            continue
        raise AssertionError("an operation succeeded without the lost rank")
    hvd.shutdown()
    assert not hvd.is_initialized()


def main() -> None:
    place, how = sys.argv[1], (sys.argv[2:] or ["kill"])[0]
    begin = time.monotonic()
    try:
        run(place, how)
    except hvd.BaguaError as error:
        now = time.monotonic()
        moment = float(MOMENT.read_text()) if MOMENT.exists() else begin
        kind = type(error).__name__
        print(f"RESULT {kind}: {error} after {now - moment:.2f}", flush=True)
        if place == "idle":
            note_the_moment()
        elif hvd.is_initialized() and isinstance(error, hvd.PeerLostError):
            is_lasting()


if __name__ == "__main__":
    main()
