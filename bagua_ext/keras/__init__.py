"""Data-parallel training with Keras 3, on TensorFlow or PyTorch: ``import bagua_ext.keras as hvd``.

Scripts of ``horovod.keras`` and ``horovod.tensorflow.keras`` run with that one line changed; the
latter's also with ``bagua_ext.tensorflow.keras``, which is the same for Keras on TensorFlow.
"""

from __future__ import annotations

from bagua_ext.keras._framework import load_framework, require_keras

require_keras()
framework = load_framework()

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
from bagua_ext.keras import callbacks  # noqa: E402
from bagua_ext.keras.functions import (  # noqa: E402
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_model,
    broadcast_variables,
    load_model,
    reducescatter,
)
from bagua_ext.keras.normalization import SyncBatchNormalization  # noqa: E402
from bagua_ext.keras.optimizer import (  # noqa: E402
    Compression,
    DistributedOptimizer,
    PartialDistributedOptimizer,
)
from bagua_ext.objects import allgather_object, broadcast_object  # noqa: E402
from bagua_ext.process_sets import (  # noqa: E402
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from bagua_ext.reduce_ops import Adasum, Average, Max, Min, Product, Sum  # noqa: E402

init = framework.hvd.init

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
    "PartialDistributedOptimizer",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_model",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "counters",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
]
