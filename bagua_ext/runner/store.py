"""The rendezvous store as the launcher sees it; the core serves it on a thread of its own."""

from __future__ import annotations

from typing import Protocol

LOOPBACK = "127.0.0.1"


class Store(Protocol):
    """Where the ranks of a job meet."""

    address: str  # "host:port"

    def report_lost(self, rank: int, why: str) -> None:
        """Tells ranks that wait in ``init`` that ``rank`` is gone; ``why`` says how it ended."""

    def stop(self) -> None:
        """Ends the store."""


class CoreStore:
    """The store of libbagua_core, on loopback, for ``size`` ranks that know ``secret``.

    Raises:
        ImportError: if the core is not built.
        RuntimeError: if it cannot listen.
    """

    def __init__(self, size: int, secret: bytes) -> None:
        from bagua_ext._core import ffi, lib

        self._lib = lib
        port, store = ffi.new("int32_t*", 0), ffi.new("bagua_store_t**")
        status = lib.bagua_store_start(
            LOOPBACK.encode(), port, size, ffi.from_buffer("uint8_t[]", secret), len(secret), store
        )
        if status != lib.BAGUA_OK:
            text = ffi.string(lib.bagua_last_error()).decode(errors="replace")
            raise RuntimeError(f"the rendezvous store does not start: {text}")
        self._store = store[0]
        self.address = f"{LOOPBACK}:{port[0]}"

    def report_lost(self, rank: int, why: str) -> None:
        self._lib.bagua_store_report_lost(self._store, rank, why.encode())

    def stop(self) -> None:
        self._lib.bagua_store_stop(self._store)
