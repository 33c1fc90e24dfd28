"""Data-parallel training for PyTorch: ``import bagua_ext.torch as hvd``."""

from __future__ import annotations

from bagua_ext.torch._library import load_operations, require_torch

require_torch()
load_operations()

from bagua_ext import basics  # noqa: E402
from bagua_ext.basics import (  # noqa: E402
    ccl_built,
    counters,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from bagua_ext.exceptions import (  # noqa: E402
    AbortedError,
    BaguaError,
    CollectiveTimeoutError,
    HorovodInternalError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
)
from bagua_ext.process_sets import (  # noqa: E402
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    process_set_ids,
    remove_process_set,
)
from bagua_ext.reduce_ops import Adasum, Average, Max, Min, Product, Sum  # noqa: E402
from bagua_ext.torch._compile import keep_out  # noqa: E402
from bagua_ext.torch._gradients import register_for_compile  # noqa: E402
from bagua_ext.torch.compression import Compression  # noqa: E402
from bagua_ext.torch.exchanges import (  # noqa: E402
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from bagua_ext.torch.functions import (  # noqa: E402
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from bagua_ext.torch.operations import (  # noqa: E402
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    join,
    poll,
    synchronize,
)
from bagua_ext.torch.optimizer import DistributedOptimizer  # noqa: E402

register_for_compile()
for _function in (basics.init, shutdown, is_initialized, counters, rank, size, local_rank):
    keep_out(_function)
for _function in (local_size, cross_rank, cross_size, is_homogeneous, add_process_set):
    keep_out(_function)
for _function in (remove_process_set, process_set_ids, get_process_set_ids_and_ranks):
    keep_out(_function)


_NOT_YET = {
    "SyncBatchNorm": "synchronised batch normalisation",
    "elastic": "elastic training",
    "sparse_allreduce_async": "sparse allreduce (sparse_as_dense=True is)",
    "start_timeline": "the timeline",
    "stop_timeline": "the timeline",
}


def __getattr__(name: str) -> object:
    """Says of names that Horovod has that they are not there yet."""
    if name in _NOT_YET:
        raise AttributeError(f"bagua_ext.torch.{name}: {_NOT_YET[name]} is not there yet")
    raise AttributeError(f"module 'bagua_ext.torch' has no attribute '{name}'")


def init(ranks: object = None, process_sets: object = None) -> None:
    """Meets the other ranks; see ``bagua_ext.basics.init``."""
    basics.init(ranks, process_sets, framework="torch")


__all__ = [
    "AbortedError",
    "Adasum",
    "Average",
    "BaguaError",
    "CollectiveTimeoutError",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "counters",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "process_set_ids",
    "rank",
    "rocm_built",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "synchronize",
]
