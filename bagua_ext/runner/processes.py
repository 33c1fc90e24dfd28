"""What Linux knows about processes: who descends from whom, and how one ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Makes this process the parent of descendants whose own parent ended."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent() -> Callable[[], None]:
    """A function for a child, between fork and exec: the kernel kills it when this thread ends."""
    parent = os.getpid()
    prctl, kill = _libc.prctl, signal.SIGKILL

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, kill, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)

    return arm


@dataclass(frozen=True)
class ProcessEntry:
    """One line of /proc. ``session`` is the pid of the process that opened its session."""

    pid: int
    parent: int
    session: int
    zombie: bool


def process_table() -> dict[int, ProcessEntry]:
    """All processes that this one can see."""
    table = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:  # ended since the listing
            continue
        # The command stands in parentheses and may hold anything, parentheses too.
        state, parent, _, session = stat[stat.rindex(b")") + 2 :].split(None, 4)[:4]
        pid = int(name)
        table[pid] = ProcessEntry(pid, int(parent), int(session), state in (b"Z", b"X"))
    return table


def descendants(root: int, excluded: Collection[int] = ()) -> list[int]:
    """Living descendants of ``root``, zombies and the ``excluded`` left out."""
    table = process_table()
    children: dict[int, list[int]] = {}
    for entry in table.values():
        children.setdefault(entry.parent, []).append(entry.pid)
    found, open_ends = [], [root]
    while open_ends:
        for pid in children.get(open_ends.pop(), ()):
            if pid in excluded:
                continue
            open_ends.append(pid)
            if not table[pid].zombie:
                found.append(pid)
    return found


def marked_processes(marker: str, sessions: Collection[int]) -> list[int]:
    """Living processes in one of ``sessions``, or that have ``marker`` in their environment."""
    wanted = b"\0" + marker.encode() + b"\0"
    found = []
    for entry in process_table().values():
        if entry.zombie or entry.pid == os.getpid():
            continue
        if entry.session in sessions or wanted in b"\0" + _environment_of(entry.pid):
            found.append(entry.pid)
    return found


def _environment_of(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:  # ended, or another user's
        return b""


def send_each(pids: Iterable[int], signum: int) -> None:
    """Signals those that still run and may be signalled."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def kill_and_wait(pids: Iterable[int], timeout_seconds: float) -> None:
    """Kills processes and waits until they are gone; they need not be children."""
    poll = select.poll()
    waiting = set()
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        waiting.add(pidfd)
        poll.register(pidfd, select.POLLIN)
        send_each([pid], signal.SIGKILL)
    deadline = time.monotonic() + timeout_seconds
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left * 1000):
            poll.unregister(pidfd)
            os.close(pidfd)
            waiting.discard(pidfd)
    for pidfd in waiting:
        os.close(pidfd)


def describe_end(returncode: int) -> str:
    """``exited with code 3`` or ``was ended by SIGKILL``."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal has no name
        return f"was ended by signal {-returncode}"


def shell_code(returncode: int) -> int:
    """The exit code by which a shell would report this end."""
    return returncode if returncode >= 0 else 128 - returncode
