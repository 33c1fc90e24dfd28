"""Sets of ranks that communicate among themselves. Only the set of all ranks exists so far."""

from __future__ import annotations

from bagua_ext import basics


class GlobalProcessSet:
    """The set of all ranks."""

    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the set, ascending."""
        return list(range(basics.size()))

    def rank(self) -> int:
        """This process's number within the set."""
        return basics.rank()

    def size(self) -> int:
        """Number of ranks in the set."""
        return basics.size()

    def included(self) -> bool:
        """True if this process belongs to the set."""
        return basics.is_initialized()

    def __repr__(self) -> str:
        return "global_process_set"

    def __reduce__(self) -> str:
        return "global_process_set"


global_process_set = GlobalProcessSet()


def require_global(process_set: object) -> None:
    """Raises ValueError unless ``process_set`` is the set of all ranks."""
    if process_set is not global_process_set:
        raise ValueError(f"process_set={process_set!r}: only global_process_set is supported yet")
