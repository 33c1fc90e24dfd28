"""One rank fails in a named place; the others say what they got. Arguments: PLACE [HOW].

The doomed rank is the last. It ends in the middle of PLACE, by exit or by SIGKILL. Every other rank
prints "RESULT <class>: <text> after <seconds>" and ends well, so that the job's code is the doomed
one's alone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import nn

import bagua_ext.torch as hvd

BIG = 8 << 20  # elements, so that a collective takes some milliseconds
ROUNDS = 10_000


def end(how: str) -> None:
    if how == "exit":
        os._exit(5)
    os.kill(os.getpid(), signal.SIGKILL)


def end_soon(how: str) -> None:
    """Ends this process from another thread while the main one is inside a collective."""
    timer = threading.Timer(0.3, end, [how])
    timer.daemon = True
    timer.start()


def rounds(call: Callable[[], object]) -> None:
    for _ in range(ROUNDS):
        call()


def collective(name: str) -> Callable[[], object]:
    x = torch.ones(BIG // 4, 4)
    share = x[: len(x) // hvd.size()]
    calls: dict[str, Callable[[], object]] = {
        "allreduce": lambda: hvd.allreduce_(x, name="big"),
        "small": lambda: hvd.allreduce_(x[:10], name="small"),
        "grouped": lambda: hvd.grouped_allreduce_([x[:1000], x[1000:2000]], name="group"),
        "allgather": lambda: hvd.allgather(share, name="gathered"),
        "broadcast": lambda: hvd.broadcast_(x, 0, name="sent"),
        "reducescatter": lambda: hvd.reducescatter(x, name="scattered"),
        "alltoall": lambda: hvd.alltoall(x, name="exchanged"),
        "barrier": hvd.barrier,
    }
    return calls[name]


def train_until_killed(doomed: bool, how: str) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), bucket_bytes=1 << 20
    )
    for step in range(ROUNDS):
        if doomed and step == 3:
            # The hook runs in the middle of backward, with buckets in flight.
            model[3].weight.register_hook(lambda grad: end(how))
        optimizer.zero_grad()
        model(torch.randn(64, 512)).square().mean().backward()
        optimizer.step()


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


def run(place: str, how: str) -> None:
    if place == "init":
        if int(os.environ["BAGUA_RANK"]) == int(os.environ["BAGUA_SIZE"]) - 1:
            end(how)
        hvd.init()
        return
    hvd.init()
    doomed = hvd.rank() == hvd.size() - 1
    hvd.barrier()
    if place == "backward":
        train_until_killed(doomed, how)
    elif place == "workers":
        load_with_workers(doomed, how)
    elif place == "exception":
        if doomed:
            raise KeyError("a bug of the user's")
        hvd.allreduce(torch.ones(3), name="waits")
    elif place == "never":
        if doomed:
            hvd.allgather(torch.ones(2), name="something else")
        hvd.allreduce(torch.ones(3), name="lonely")
    else:
        call = collective(place)
        if doomed:
            end_soon(how)
        rounds(call)


def main() -> None:
    place, how = sys.argv[1], (sys.argv[2:] or ["kill"])[0]
    start = time.monotonic()
    try:
        run(place, how)
    except hvd.BaguaError as error:
        seconds = time.monotonic() - start
        print(f"RESULT {type(error).__name__}: {error} after {seconds:.2f}", flush=True)


if __name__ == "__main__":
    main()
