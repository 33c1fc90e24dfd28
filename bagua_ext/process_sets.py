"""Sets of ranks that communicate among themselves, the same for every framework.

A ``ProcessSet`` is a list of global ranks until every rank of the job, member or not, has added it:
in ``init(process_sets=[...])`` or by ``add_process_set``. From then on its members pass it to
operations as ``process_set=``. Sets end with ``shutdown``; the objects may be added again after the
next ``init``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from bagua_ext import basics
from bagua_ext._core import ffi, lib


class ProcessSet:
    """The set of the global ranks ``ranks``, given in any order.

    Raises:
        ValueError: ``ranks`` are no whole numbers.
    """

    _id: int | None = None
    _generation = 0  # of the engine that `_id` belongs to
    _member = False

    def __init__(self, ranks: Iterable[int]) -> None:
        try:
            self._ranks = sorted(rank.__index__() for rank in ranks)
        except (AttributeError, TypeError):
            raise ValueError(
                f"ProcessSet({ranks!r}): expected a list of ranks, for example ProcessSet([0, 2])"
            ) from None

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the set, ascending."""
        return list(self._ranks)

    @property
    def process_set_id(self) -> int | None:
        """The set's number, the same on every rank; None while it is not added."""
        current = self._generation == basics.generation() and basics.is_initialized()
        return self._id if current else None

    def rank(self) -> int:
        """This process's number within the set.

        Raises:
            ValueError: the set is not added, or this process is no member of it.
        """
        self._require_added()
        if not self._member:
            raise ValueError(_not_a_member(self))
        return lib.bagua_group_rank(self._id)

    def size(self) -> int:
        """Number of ranks in the set. Raises ValueError if the set is not added."""
        self._require_added()
        return len(self._ranks)

    def included(self) -> bool:
        """True if this process belongs to the set. Raises ValueError if the set is not added."""
        self._require_added()
        return self._member

    def _attach(self, number: int) -> None:
        self._id, self._generation = number, basics.generation()
        self._member = lib.bagua_group_rank(number) >= 0

    def _detach(self) -> None:
        self._id, self._member = None, False

    def _require_added(self) -> None:
        if self.process_set_id is None:
            basics.size()  # raises before init
            raise ValueError(_not_added(self))

    def __repr__(self) -> str:
        return f"ProcessSet({self._ranks})"

    def __reduce__(self) -> tuple[object, ...]:
        return _find_or_make, (self._ranks,)


class GlobalProcessSet(ProcessSet):
    """The set of all ranks, which is always there."""

    def __init__(self) -> None:
        super().__init__(())

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return list(range(basics.size()))

    @property
    def process_set_id(self) -> int:
        """0."""
        return 0

    def rank(self) -> int:
        """This process's rank."""
        return basics.rank()

    def size(self) -> int:
        """Number of ranks."""
        return basics.size()

    def included(self) -> bool:
        """True between ``init`` and ``shutdown``."""
        return basics.is_initialized()

    def __repr__(self) -> str:
        return "global_process_set"

    def __reduce__(self) -> str:
        return "global_process_set"


global_process_set = GlobalProcessSet()


class _Added:
    """The sets that were added since the last ``init``, by number, without the global one."""

    sets: dict[int, ProcessSet] = {}


# ---- Adding and removing ------------------------------------------------------------------------


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Adds a set and returns it; every rank calls this with the same ranks, members or not.

    Raises:
        ValueError: the set, or one of the same ranks, is there already; a rank does not exist or is
            given twice; on this rank alone.
        MismatchError: on every rank, if their lists differ. The job stays usable.
    """
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = new.ranks
    basics.size()  # raises before init
    twin = _find(ranks)
    if twin is not None:
        raise ValueError(
            f"{new!r} cannot be added: {twin!r} has the same ranks already, with "
            f"process_set_id {twin.process_set_id}. Use that one."
        )
    number = ffi.new("int32_t *")
    members = ffi.new("int32_t[]", ranks or 1)
    basics.wait_until_done(lambda wait: lib.bagua_group_add(members, len(ranks), wait, number))
    new._attach(number[0])
    _Added.sets[number[0]] = new
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set, on every rank alike; False if it is not there.

    Optimizers of the set cannot be used afterwards.

    Raises:
        ValueError: ``process_set`` is the set of all ranks.
        MismatchError: on every rank, if their sets differ, or a rank has operations of it in
            flight, which are named. The set stays then.
    """
    number = process_set.process_set_id
    if number is None:
        basics.size()  # raises before init
        return False
    basics.wait_until_done(lambda wait: lib.bagua_group_remove(number, wait))
    _Added.sets.pop(number, None)
    process_set._detach()
    return True


def add_static(process_sets: Sequence[ProcessSet | Iterable[int]]) -> None:
    """Adds those of ``process_sets`` that are not there yet: what ``init`` was given."""
    for process_set in process_sets:
        if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None:
            add_process_set(process_set)


def checked_static(
    process_sets: Sequence[ProcessSet | Iterable[int]] | str | None,
) -> Sequence[ProcessSet | Iterable[int]]:
    """Returns the sets that ``init`` is to add. Sets may always be added later: "dynamic" is none.

    Raises:
        ValueError: ``process_sets`` is something else.
    """
    if process_sets is None or process_sets == "dynamic":
        return ()
    if isinstance(process_sets, (str, ProcessSet)):
        raise ValueError(
            f"init(process_sets={process_sets!r}): expected a list of ProcessSet or 'dynamic'"
        )
    return [one if isinstance(one, ProcessSet) else ProcessSet(one) for one in process_sets]


# ---- Looking up ---------------------------------------------------------------------------------


def process_set_ids() -> list[int]:
    """The numbers of all sets, 0 being the set of all ranks."""
    return list(get_process_set_ids_and_ranks())


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of each set by its number."""
    return {0: global_process_set.ranks, **{n: one.ranks for n, one in sorted(_current().items())}}


def group_of(process_set: ProcessSet) -> int:
    """Returns the core's number of a set for an operation that this rank is about to start.

    Raises:
        ValueError: ``process_set`` is no set, is not added, or this rank is no member of it.
    """
    if process_set is global_process_set:
        return 0
    if not isinstance(process_set, ProcessSet):
        raise ValueError(
            f"process_set={process_set!r}: expected a ProcessSet, such as global_process_set"
        )
    if process_set._member and process_set._generation == basics.generation():
        return process_set._id
    process_set._require_added()
    raise ValueError(_not_a_member(process_set))


# How many of a kind were made for a set of ranks; (): all.
_made: defaultdict[tuple[str, tuple[int, ...]], Iterator[int]] = defaultdict(itertools.count)


def numbered(what: str, process_set: ProcessSet) -> str:
    """Returns "WHAT.N" for the next object of that kind of a set: the same name on all its members.

    The members make such objects in the same order; what a rank makes for other sets does not
    count.
    """
    ranks = () if process_set is global_process_set else tuple(process_set.ranks)
    return f"{what}.{next(_made[what, ranks])}"


def _current() -> dict[int, ProcessSet]:
    """The sets of the engine that runs now."""
    _Added.sets = {n: one for n, one in _Added.sets.items() if one.process_set_id == n}
    return _Added.sets


def _find(ranks: Sequence[int]) -> ProcessSet | None:
    if ranks == global_process_set.ranks:
        return global_process_set
    return next((one for one in _current().values() if one.ranks == ranks), None)


def _find_or_make(ranks: list[int]) -> ProcessSet:
    """The set that a pickled one stands for in this process."""
    return next((one for one in _current().values() if one.ranks == ranks), ProcessSet(ranks))


def _not_added(process_set: ProcessSet) -> str:
    return (
        f"{process_set!r} is not added: call add_process_set() with it on every rank, or pass it "
        "to init(process_sets=[...])"
    )


def _not_a_member(process_set: ProcessSet) -> str:
    return (
        f"rank {basics.rank()} is no member of {process_set!r}: only its ranks can call operations "
        "on it; ask included() first"
    )
