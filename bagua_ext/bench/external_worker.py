"""Run as text by ``external.py`` on another interpreter: sums float32 and prints its samples.

Arguments: mpi|horovod, bytes, rounds, warm-up rounds, operations a round, then cores to bind the
ranks to in turn, if any. It imports nothing of bagua_ext.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np

Operation = Callable[[], object]


class Mpi:
    """MPI_Allreduce in place on a numpy array."""

    def __init__(self, count: int) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size
        self.data = np.empty(count, np.float32)
        self.meet: Operation = self._world.Barrier

    def run(self) -> None:
        self._world.Allreduce(self._mpi.IN_PLACE, self.data, self._mpi.SUM)

    def gather(self, value: list[float]) -> list[list[float]]:
        return self._world.allgather(value)


class Horovod:
    """Horovod's allreduce in place on a torch tensor, whose memory ``data`` shows."""

    def __init__(self, count: int) -> None:
        import horovod.torch as hvd
        import torch

        torch.set_num_threads(1)
        hvd.init()
        self._hvd, self._tensor, self._token = hvd, torch.empty(count), torch.zeros(1)
        self.rank, self.size = hvd.rank(), hvd.size()
        self.data = self._tensor.numpy()

    def run(self) -> None:
        self._hvd.allreduce_(self._tensor, name="bench", op=self._hvd.Sum)

    def meet(self) -> None:
        self._hvd.allreduce_(self._token, name="meet", op=self._hvd.Sum)

    def gather(self, value: list[float]) -> list[list[float]]:
        return self._hvd.allgather_object(value)


def main() -> None:
    library, (size, rounds, warmup, repeats, *cores) = sys.argv[1], map(int, sys.argv[2:])
    way: Mpi | Horovod = {"mpi": Mpi, "horovod": Horovod}[library](size // 4)
    for thread in os.listdir("/proc/self/task") if cores else ():
        os.sched_setaffinity(int(thread), {cores[way.rank % len(cores)]})
    base = (np.arange(size // 4) % 8191 + 1).astype(np.float32)
    total = base * np.float32(way.size * (way.size + 1) / 2 * float(way.size) ** (repeats - 1))
    seconds = []
    for index in range(warmup + rounds):
        way.data[:] = base * (way.rank + 1)
        way.meet()
        for _ in range(repeats):
            start = time.perf_counter()
            way.run()
            if index >= warmup:
                seconds.append(time.perf_counter() - start)
        if not np.allclose(way.data, total, rtol=1e-5, atol=0):
            sys.exit(f"{library}: wrong sum, {way.data[:4]} instead of {total[:4]}")
    slowest = [max(each) for each in zip(*way.gather(seconds))]  # noqa: B905
    if way.rank == 0:
        print(json.dumps({"seconds": slowest}), flush=True)


if __name__ == "__main__":
    main()
