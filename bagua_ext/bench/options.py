"""What the command line asks for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Arguments of one run; picklable, since the measuring processes get them.

    ``rounds`` None leaves the number to the case. ``compare`` holds names of the libraries that
    ``FRAMEWORKS`` lists for the framework.
    """

    case: str
    framework: str = "torch"
    np: int = 2
    compare: tuple[str, ...] = ()
    rounds: int | None = None
    warmup: int = 3
    bind: bool = False  # rank r runs on core r, counted round
    sizes: tuple[int, ...] = ()  # bytes
    tensors: int = 500
    numel: int = 1000
    parameters: int = 16 << 20
    batches: tuple[int, ...] = (1,)
    seconds: float = 3.0
    mpi_python: str = ""  # interpreter that has mpi4py; "" is this one
    horovod_python: str = ""
