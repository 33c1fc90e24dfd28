"""Memory that the ranks of one host share, and a barrier that spins on it.

The barrier costs well below a microsecond of waiting, so that ranks enter a measured operation
together; it is no part of the library measured. It relies on stores becoming visible in the order
in which they are made, as on x86.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from bagua_ext import basics, objects

_LINE = 64  # bytes; one counter a cache line
_SPINS = 2000  # about 100 us, then the processor is offered to others


def meet_asleep() -> None:
    """Returns when every rank called it; uses no processor meanwhile, and Ctrl-C ends the wait."""
    objects.allgather_object(None, "bench.meet")


class SharedMemory:
    """Anonymous memory of ``bytes``, mapped by every rank. Made and closed by all ranks together.

    Raises:
        ValueError: if the ranks are on several hosts.
    """

    def __init__(self, bytes: int) -> None:
        if basics.local_size() != basics.size():
            raise ValueError(
                f"{basics.size()} ranks are on several hosts, {basics.local_size()} of them here; "
                "this bench needs them on one"
            )
        owned = os.memfd_create("bagua-bench") if basics.rank() == 0 else -1
        if owned >= 0:
            os.ftruncate(owned, bytes)
        path = objects.broadcast_object(f"/proc/{os.getpid()}/fd/{owned}", root_rank=0)
        descriptor = os.open(path, os.O_RDWR)
        self.map = mmap.mmap(descriptor, bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(descriptor)
        meet_asleep()  # nobody opens the path any more
        if owned >= 0:
            os.close(owned)

    def floats(self, offset: int, count: int) -> np.ndarray:
        """A view of ``count`` float32 from byte ``offset``; it keeps the memory mapped."""
        return np.frombuffer(self.map, np.float32, count, offset)


class SpinBarrier:
    """Meets all ranks as often as it is called. Made by all ranks together."""

    def __init__(self) -> None:
        self._rank, self._size, self._generation = basics.rank(), basics.size(), 0
        memory = SharedMemory(_LINE * self._size)
        self._counters = memoryview(memory.map).cast("q")

    def __call__(self) -> None:
        self._generation += 1
        stride = _LINE // 8
        counters, generation = self._counters, self._generation
        counters[self._rank * stride] = generation
        for rank in range(self._size):
            spins = 0
            while counters[rank * stride] < generation:
                spins += 1
                if spins > _SPINS:
                    os.sched_yield()
