"""Says what importing bagua_ext.torch and init cost this rank after torch, in processor time."""

from __future__ import annotations

import time

import torch

assert torch is not None
begin, wall = time.process_time(), time.perf_counter()

import bagua_ext.torch as hvd  # noqa: E402

hvd.init()
print(
    f"added {time.process_time() - begin:.3f} s, {time.perf_counter() - wall:.3f} s of wall clock"
)
