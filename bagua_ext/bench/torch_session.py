"""A rank that measures PyTorch's binding: one thread, and Gloo's process group if compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

import bagua_ext.torch as bagua
from bagua_ext.bench import gloo
from bagua_ext.bench.options import Options


@contextlib.contextmanager
def opened(options: Options) -> Iterator[None]:
    """Meets the other ranks; the process group is there until the end of the block."""
    torch.set_num_threads(1)
    bagua.init()
    with gloo.process_group() if "gloo" in options.compare else contextlib.nullcontext():
        yield
