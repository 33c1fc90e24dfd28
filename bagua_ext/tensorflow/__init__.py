"""Data-parallel training for TensorFlow: ``import bagua_ext.tensorflow as hvd``."""

from __future__ import annotations

from bagua_ext.tensorflow._library import require_tensorflow

require_tensorflow()

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
from bagua_ext.tensorflow import _gradients  # noqa: E402, F401
from bagua_ext.tensorflow._autograph import keep_out  # noqa: E402
from bagua_ext.tensorflow.compression import Compression  # noqa: E402
from bagua_ext.tensorflow.functions import (  # noqa: E402
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from bagua_ext.tensorflow.operations import (  # noqa: E402
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from bagua_ext.tensorflow.optimizer import DistributedOptimizer  # noqa: E402
from bagua_ext.tensorflow.tape import (  # noqa: E402
    DistributedGradientTape,
    PartialDistributedGradientTape,
)

for _function in (is_initialized, counters, rank, size, local_rank, local_size):
    keep_out(_function)
for _function in (cross_rank, cross_size, is_homogeneous):
    keep_out(_function)


_NOT_YET = {
    "elastic": "elastic training",
    "start_timeline": "the timeline",
    "stop_timeline": "the timeline",
}


def __getattr__(name: str) -> object:
    """Loads what needs Keras; says of names that Horovod has that they are not there yet."""
    if name == "SyncBatchNormalization":
        from bagua_ext.keras import SyncBatchNormalization

        return SyncBatchNormalization
    if name in _NOT_YET:
        raise AttributeError(f"bagua_ext.tensorflow.{name}: {_NOT_YET[name]} is not there yet")
    raise AttributeError(f"module 'bagua_ext.tensorflow' has no attribute '{name}'")


def init(ranks: object = None, process_sets: object = None) -> None:
    """Meets the other ranks; see ``bagua_ext.basics.init``."""
    basics.init(ranks, process_sets, framework="tensorflow")


__all__ = [
    "AbortedError",
    "Adasum",
    "Average",
    "BaguaError",
    "BroadcastGlobalVariablesHook",
    "CollectiveTimeoutError",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PartialDistributedGradientTape",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "counters",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "get_process_set_ids_and_ranks",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_ids",
    "process_set_included_op",
    "rank",
    "rocm_built",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
    "size_op",
]
