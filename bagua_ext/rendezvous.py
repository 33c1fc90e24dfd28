"""Where the ranks of a job meet: serves the store, or finds who does."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from bagua_ext._core import ffi, lib
from bagua_ext.exceptions import BaguaError, CollectiveTimeoutError
from bagua_ext.launch import LaunchInfo, Meeting

# Signals are answered between slices.
_SLICE_SECONDS = 1.0


@dataclass
class _Served:
    """The store that this process serves; it outlives init/shutdown cycles."""

    store: Any = None
    address: str = ""
    owner: int = 0
    of: LaunchInfo | None = field(default=None)


_served = _Served()


def meeting_address(info: LaunchInfo, secret: bytes) -> str:
    """Returns "host:port" of the store that all ranks of the job use; "" for a single rank.

    Rank 0 starts the store first where nobody else serves it. It stays until ``stop_store``.

    Raises:
        BaguaError: the port is taken, or the launcher's agent cannot be reached.
        CollectiveTimeoutError: rank 0 did not publish its address in time.
    """
    if info.meeting is Meeting.NONE:
        return ""
    if info.meeting is Meeting.GIVEN:
        return info.address
    if info.meeting is Meeting.RANK_ZERO:
        return _serve(info, secret, _port_of(info.address)) if info.rank == 0 else info.address
    return _through_agent(info, secret)


def stop_store() -> None:
    """Stops the store of this process, if it serves one. A forked child's copy is left alone."""
    if _served.store is not None and _served.owner == os.getpid():
        lib.bagua_store_stop(_served.store)
    _served.store = None


def _serve(info: LaunchInfo, secret: bytes, port: int) -> str:
    if _served.store is not None and _served.of == info:
        return _served.address
    stop_store()
    port_out = ffi.new("int32_t *", port)
    store = ffi.new("bagua_store_t **")
    status = lib.bagua_store_start(b"127.0.0.1", port_out, info.size, secret, len(secret), store)
    if status != lib.BAGUA_OK:
        raise BaguaError(ffi.string(lib.bagua_last_error()).decode())
    _served.store, _served.owner, _served.of = store[0], os.getpid(), info
    _served.address = f"127.0.0.1:{port_out[0]}"
    return _served.address


def _through_agent(info: LaunchInfo, secret: bytes) -> str:
    agent = _agent_store(info)
    if info.rank == 0:
        address = _serve(info, secret, port=0)
        agent.set(info.key, address)
        return address
    return _wait_for_key(agent, info)


def _agent_store(info: LaunchInfo) -> Any:
    # torchrun brings torch along, whatever framework the ranks use.
    from torch.distributed import TCPStore

    host, _, port = info.address.rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30))
    except RuntimeError as error:
        raise BaguaError(
            f"torchrun's agent at {info.address} cannot be reached: {error}. Start the script with "
            "torchrun, or unset TORCHELASTIC_RUN_ID."
        ) from error


def _wait_for_key(agent: Any, info: LaunchInfo) -> str:
    limit = float(os.environ.get("BAGUA_START_TIMEOUT_SECONDS") or 120)
    end = time.monotonic() + limit
    while True:
        try:
            agent.wait([info.key], timedelta(seconds=_SLICE_SECONDS))
            return agent.get(info.key).decode()
        except RuntimeError as error:
            if "imeout" not in str(error) and "timed out" not in str(error):
                raise BaguaError(f"torchrun's agent at {info.address} is gone: {error}") from error
        if time.monotonic() > end:
            raise CollectiveTimeoutError(
                f"init waited {limit:.0f} s for rank 0 to publish its address through torchrun's "
                "agent. Set BAGUA_START_TIMEOUT_SECONDS to wait longer."
            )


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
