"""Which rank runs where (pure), and the border behind which processes are started.

``assign_slots`` knows about several hosts. Starting is the business of a ``Launcher``;
``local_launcher.LocalLauncher`` is the one for this machine.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Host:
    """A host and how many ranks it takes."""

    name: str
    slots: int


@dataclass(frozen=True)
class Slot:
    """The place of one rank."""

    rank: int
    size: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass(frozen=True)
class ProcessSpec:
    """What to start for one rank. ``environment`` is complete, not an addition."""

    slot: Slot
    argv: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class StartedProcess:
    """A running rank. The descriptors are read ends and belong to the caller."""

    pid: int
    stdout: int
    stderr: int


@dataclass(frozen=True)
class EndedProcess:
    """``returncode`` as in ``subprocess``: the exit code, or minus the signal's number."""

    rank: int
    returncode: int


class Launcher(Protocol):
    """Starts, signals and reaps the processes of one job.

    Thread-safety: one thread uses it. SIGCHLD announces that ``reap`` may have news.
    """

    def start(self, spec: ProcessSpec) -> StartedProcess:
        """Starts one rank. Raises OSError, and leaves nothing behind, if that fails."""

    def send(self, rank: int, signum: signal.Signals, *, group: bool) -> None:
        """Signals a rank, or its whole process group. A rank that has ended is no error."""

    def reap(self) -> list[EndedProcess]:
        """The ranks that ended since the last call; never blocks."""

    def strays(self) -> list[int]:
        """Processes left behind by ranks that ended, wherever they moved to."""

    def kill_strays(self, signum: signal.Signals) -> None:
        """Signals every process that ``strays`` names."""

    def close(self) -> None:
        """The job is over and nothing of it runs."""


def parse_hosts(text: str) -> list[Host]:
    """Reads ``h1:2,h2:4``. A host without a number takes one rank.

    Raises:
        ValueError: with the part that is not understood.
    """
    hosts = []
    for part in text.split(","):
        name, _, slots = part.strip().partition(":")
        if not name or (slots and not slots.isdecimal()) or slots == "0":
            raise ValueError(f"host {part.strip()!r}: expected NAME:SLOTS, e.g. localhost:4")
        hosts.append(Host(name, int(slots or "1")))
    return hosts


def parse_hostfile(text: str) -> list[Host]:
    """Reads lines ``NAME slots=N``; ``#`` starts a comment.

    Raises:
        ValueError: with the line that is not understood.
    """
    hosts = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = words[1].removeprefix("slots=") if len(words) == 2 else "1"
        if len(words) > 2 or not slots.isdecimal() or slots == "0":
            raise ValueError(f"hostfile line {line.strip()!r}: expected NAME slots=N")
        hosts.append(Host(words[0], int(slots)))
    return hosts


def assign_slots(hosts: Sequence[Host], size: int) -> list[Slot]:
    """Fills the hosts in order.

    Raises:
        ValueError: if the hosts take fewer than ``size`` ranks.
    """
    available = sum(host.slots for host in hosts)
    if available < size:
        raise ValueError(f"{size} ranks asked for, but the hosts take {available}")
    counts, left = [], size
    for host in hosts:
        counts.append(min(host.slots, left))
        left -= counts[-1]
    slots: list[Slot] = []
    for index, (host, count) in enumerate(zip(hosts, counts, strict=True)):
        for local_rank in range(count):
            slots.append(
                Slot(
                    rank=len(slots),
                    size=size,
                    host=host.name,
                    local_rank=local_rank,
                    local_size=count,
                    cross_rank=sum(other > local_rank for other in counts[:index]),
                    cross_size=sum(other > local_rank for other in counts),
                )
            )
    return slots
