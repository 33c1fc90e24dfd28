"""Starting and ending the engine, this process's place in the job, and waiting for the core.

The functions here are the same for every framework; ``bagua_ext.torch`` exports them.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from typing import Any

from bagua_ext import launch, rendezvous
from bagua_ext._core import ffi, lib
from bagua_ext.exceptions import (
    AbortedError,
    BaguaError,
    CollectiveTimeoutError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
)
from bagua_ext.secret import read_secret

# Longest time in the core between two looks at pending signals.
WAIT_SECONDS = 0.1

_ERRORS: dict[int, type[Exception]] = {
    lib.BAGUA_NOT_INITIALIZED: NotInitializedError,
    lib.BAGUA_INVALID_ARGUMENT: ValueError,
    lib.BAGUA_MISMATCH: MismatchError,
    lib.BAGUA_PEER_LOST: PeerLostError,
    lib.BAGUA_TIMEOUT: CollectiveTimeoutError,
    lib.BAGUA_ABORTED: AbortedError,
    lib.BAGUA_INTERNAL: BaguaError,
}


class _Life:
    """What is remembered over init/shutdown cycles of this process."""

    generation = 0  # counts successful inits; objects of the core belong to one generation
    owner = 0  # process that called init; a forked child must not say goodbye for its parent
    place: dict[str, int] = {}  # rank, size and so on: forked children, as data loaders, may ask
    exit_registered = False
    interruption: BaseException | None = None  # raised by a signal handler while init waited


# ---- Errors and waiting -------------------------------------------------------------------------


def last_error() -> str:
    """Returns the text of the calling thread's last failure in the core."""
    return ffi.string(lib.bagua_last_error()).decode(errors="replace")


def error_of(status: int) -> Exception:
    """Returns the exception that stands for ``status``, with the core's text."""
    if status == lib.BAGUA_NOT_INITIALIZED and _is_forked():
        return NotInitializedError(
            f"this process was forked from rank {_Life.place['rank']}: only the process that "
            "called init() can communicate"
        )
    return _ERRORS.get(status, BaguaError)(last_error())


def check(status: int) -> None:
    """Raises the error that ``status`` stands for unless it is BAGUA_OK."""
    if status:
        raise error_of(status)


def wait_until_done(call: Callable[[float], int]) -> None:
    """Repeats ``call(seconds)`` while it answers BAGUA_IN_PROGRESS; raises if it fails."""
    status = call(WAIT_SECONDS)
    while status == lib.BAGUA_IN_PROGRESS:
        status = call(WAIT_SECONDS)
    check(status)


def _remember_interruption(kind: Any, exception: BaseException, traceback: Any) -> None:
    _Life.interruption = exception


@ffi.def_extern(error=1, onerror=_remember_interruption)
def bagua_interrupted() -> int:
    """Answers a waiting core's question. Entering Python runs pending signal handlers."""
    return 0


def take_interruption() -> BaseException | None:
    """Returns, once, what a signal handler raised while the core asked ``bagua_interrupted``."""
    interruption, _Life.interruption = _Life.interruption, None
    return interruption


# ---- Life ---------------------------------------------------------------------------------------


def init(
    ranks: Sequence[int] | None = None, process_sets: Any = None, *, framework: str = "python"
) -> None:
    """Meets the other ranks of the job; does nothing if that is done already.

    Blocks until all ranks called it, at most BAGUA_START_TIMEOUT_SECONDS. Without a launcher's
    variables this process is rank 0 of 1.

    ``process_sets`` are added in their order, as ``add_process_set`` does, if they are not there
    yet: every rank gives the same ones. "dynamic" is accepted for Horovod's sake; sets can be added
    at any time.

    Raises:
        ValueError: ``ranks`` is given, which is not supported, ``process_sets`` cannot be added, or
            the launcher's variables are incomplete.
        MismatchError: the ranks' ``process_sets`` differ.
        PeerLostError: a rank ended before it was there.
        CollectiveTimeoutError: a rank did not come in time.
    """
    from bagua_ext import process_sets as sets  # which imports this module

    if ranks is not None:
        raise ValueError(
            f"init(ranks={ranks!r}) is not supported: all ranks of the job initialize. Call init() "
            "without it, and pass process_sets=[ProcessSet(...)] to use some of the ranks"
        )
    static = sets.checked_static(process_sets)
    if is_initialized():
        sets.add_static(static)
        return
    _meet(framework)
    try:
        sets.add_static(static)
    except BaseException:
        shutdown()
        raise


def _meet(framework: str) -> None:
    info = launch.detect(os.environ)
    secret = read_secret(info) if info.size > 1 else b""
    _register_exit()
    _start(info, secret, rendezvous.meeting_address(info, secret), framework)
    _Life.generation += 1
    _Life.owner = os.getpid()
    _Life.place = {name: getattr(lib, f"bagua_{name}")() for name in _PLACE}


def _start(info: launch.LaunchInfo, secret: bytes, address: str, framework: str) -> None:
    options = ffi.new("bagua_init_options_t *")
    texts = [
        ffi.new("char[]", text.encode())
        for text in (address, os.environ.get("BAGUA_HOST_ID", ""), framework)
    ]
    key = ffi.from_buffer("uint8_t[]", secret)
    options.rank, options.size = info.rank, info.size
    options.rendezvous, options.framework = texts[0], texts[2]
    options.host_id = texts[1] if os.environ.get("BAGUA_HOST_ID") else ffi.NULL
    options.secret, options.secret_bytes = key, len(secret)
    _Life.interruption = None
    status = lib.bagua_init(options, lib.bagua_interrupted)
    interruption = take_interruption()
    if interruption is not None:
        lib.bagua_shutdown()
        raise interruption
    check(status)


def shutdown() -> None:
    """Says goodbye to the other ranks and ends the engine; does nothing if there is none.

    Operations in flight fail with AbortedError. Tensors that were handed out stay valid.
    """
    if _Life.owner == os.getpid():
        _Life.place = {}
        check(lib.bagua_shutdown())


def _register_exit() -> None:
    if not _Life.exit_registered:
        _Life.exit_registered = True
        atexit.register(_at_exit)


def _at_exit() -> None:
    if _Life.owner == os.getpid():
        lib.bagua_shutdown()
    rendezvous.stop_store()


def is_initialized() -> bool:
    """True between ``init`` and ``shutdown``."""
    return bool(lib.bagua_is_initialized())


def generation() -> int:
    """Number of successful ``init`` calls. What the core made in an earlier one is gone."""
    return _Life.generation


# ---- Joining ------------------------------------------------------------------------------------


class _Join:
    """A join that a signal handler interrupted: the rank stays joined, the next call waits on."""

    handle = ffi.new("uint64_t *")  # 0: none
    generation = 0
    last = ffi.new("int32_t *")
    shape = ffi.new("int64_t[1]", [1])


def join() -> int:
    """Tells the other ranks that this one has nothing more to submit, and waits until all say so.

    Returns the rank that joined last, the same everywhere. See ``bagua_ext.torch.join``.

    Raises:
        ValueError: a step of an optimizer's plan is under way on this rank.
        PeerLostError: a rank died or left.
        CollectiveTimeoutError: some ranks neither join nor work.
    """
    if not _Join.handle[0] or _Join.generation != generation():
        _Join.generation = generation()
        _start_join()
    handle = _Join.handle[0]
    status = lib.bagua_wait(handle, WAIT_SECONDS)
    while status == lib.BAGUA_IN_PROGRESS:
        status = lib.bagua_wait(handle, WAIT_SECONDS)
    error = error_of(status) if status else None
    _Join.handle[0] = 0
    lib.bagua_release(handle)
    if error is not None:
        raise error
    return _Join.last[0]


def _start_join() -> None:
    output = ffi.new("bagua_tensor_t *", {"dtype": lib.BAGUA_INT32, "device": -1, "ndim": 1})
    output.data, output.shape = _Join.last, _Join.shape
    request = ffi.new("bagua_request_t *", {"kind": lib.BAGUA_JOIN, "outputs": output})
    request.prescale = request.postscale = 1.0
    _Join.handle[0] = 0
    check(lib.bagua_enqueue(request, _Join.handle))


# ---- Place in the job ---------------------------------------------------------------------------
#
# A forked child has its parent's place, although it cannot communicate.

_PLACE = (
    "rank",
    "size",
    "local_rank",
    "local_size",
    "cross_rank",
    "cross_size",
    "is_homogeneous",
)


def _is_forked() -> bool:
    return bool(_Life.place) and _Life.owner != os.getpid()


def _known(value: int, what: str) -> int:
    if value >= 0:
        return value
    if _is_forked():
        return _Life.place[what]
    raise NotInitializedError(f"{what}() was called before init(): call init() first")


def rank() -> int:
    """This process's number in the job, 0 to size() - 1."""
    return _known(lib.bagua_rank(), "rank")


def size() -> int:
    """Number of processes of the job."""
    return _known(lib.bagua_size(), "size")


def local_rank() -> int:
    """This process's number among those of its host."""
    return _known(lib.bagua_local_rank(), "local_rank")


def local_size() -> int:
    """Number of processes on this host."""
    return _known(lib.bagua_local_size(), "local_size")


def cross_rank() -> int:
    """This host's number among the hosts that have a process of the same local rank."""
    return _known(lib.bagua_cross_rank(), "cross_rank")


def cross_size() -> int:
    """Number of hosts that have a process of the same local rank."""
    return _known(lib.bagua_cross_size(), "cross_size")


def is_homogeneous() -> bool:
    """True if every host holds equally many ranks."""
    return bool(_known(lib.bagua_is_homogeneous(), "is_homogeneous"))


# ---- What is built in ---------------------------------------------------------------------------


def counters() -> dict[str, int]:
    """Returns the core's counters by name: bytes by transport, messages, negotiations, copies."""
    count = lib.bagua_counters(ffi.NULL, ffi.NULL, 0)
    names, values = ffi.new("const char *[]", max(count, 1)), ffi.new("int64_t[]", max(count, 1))
    count = min(count, lib.bagua_counters(names, values, count))
    return {ffi.string(names[i]).decode(): values[i] for i in range(count)}


def nccl_built() -> int:
    """0: NCCL is not there yet. Horovod returns NCCL's version here, hence the type."""
    return 0


def mpi_built() -> bool:
    """False: the core never uses MPI."""
    return False


def gloo_built() -> bool:
    """False: the core moves bytes itself; no Gloo is needed."""
    return False


def cuda_built() -> bool:
    """False: there is no CUDA part yet."""
    return False


def rocm_built() -> bool:
    """False: there is no ROCm part."""
    return False


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not used."""
    return False


def mpi_enabled() -> bool:
    """False: the core never uses MPI."""
    return False


def gloo_enabled() -> bool:
    """False: the core never uses Gloo."""
    return False


def mpi_threads_supported() -> bool:
    """False: the core never uses MPI."""
    return False
