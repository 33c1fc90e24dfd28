"""Runs the processes of one job to their end: one thread, one selector, no polling."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import selectors
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bagua_ext.runner.output import (
    BACKLOG_BYTES,
    TAIL_LINES,
    CopyFile,
    RankStream,
    Sink,
    draw_box,
    open_sinks,
)
from bagua_ext.runner.placement import Launcher, ProcessSpec
from bagua_ext.runner.processes import describe_end, shell_code
from bagua_ext.runner.store import Store

# What ends ranks that do not end by themselves: (signal, seconds until the next step). The grace
# period comes first; with its default of 2 s all of it takes less than 5 s.
_END_RANKS = ((signal.SIGTERM, 1.0), (signal.SIGKILL, 1.0))
# The same for what ended ranks left behind; a resource tracker leaves by itself, after cleaning up.
_LEAVE_SECONDS = 0.3
_END_STRAYS = ((signal.SIGTERM, 0.5), (signal.SIGKILL, 0.3), (signal.SIGKILL, 0.3))
_DRAIN_SECONDS = 0.5

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

BROKEN_PIPE_CODE = 128 + signal.SIGPIPE


@dataclass(frozen=True)
class JobOptions:
    """``grace_seconds``: what ranks get to end by themselves, after a failure or a signal."""

    output_directory: Path | None = None
    timestamps: bool = False
    grace_seconds: float = 2.0
    verbose: bool = False


@dataclass
class RankState:
    """A rank from start to end. ``ended_by_us``: it ended after this job began to end it."""

    spec: ProcessSpec
    streams: list[RankStream]
    tail: collections.deque[bytes]
    returncode: int | None = None
    ended_by_us: bool = False


class Escalation:
    """Steps that follow each other at deadlines; pure but for the clock that is passed in."""

    def __init__(
        self, steps: Sequence[tuple[signal.Signals, float]], first_wait: float, now: float
    ) -> None:
        self._steps = collections.deque(steps)
        self.deadline = now + first_wait
        self.exhausted = False

    def due(self, now: float) -> signal.Signals | None:
        """The signal to send now, if any; ``exhausted`` once the last step's wait is over."""
        if self.exhausted or now < self.deadline:
            return None
        if not self._steps:
            self.exhausted = True
            return None
        signum, wait = self._steps.popleft()
        self.deadline = now + wait
        return signum


@contextlib.contextmanager
def signals_as_bytes() -> Iterator[int]:
    """A descriptor that becomes readable, one byte a signal, for SIGCHLD and those sent to us."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    handled = [signal.SIGCHLD, *_ENDING_SIGNALS, *_PASSED_SIGNALS]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
        handled.remove(signal.SIGHUP)
    old_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    old = {signum: signal.signal(signum, lambda *_: None) for signum in handled}
    try:
        yield read_end
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(old_fd)
        os.close(read_end)
        os.close(write_end)


@dataclass
class Job:
    """The processes of ``specs`` and what becomes of them.

    Call ``run`` once, on the main thread. It returns when every process has ended and all output
    is written; also when the launcher is told to end by SIGINT, SIGTERM or SIGHUP.
    """

    specs: Sequence[ProcessSpec]
    launcher: Launcher
    store: Store
    options: JobOptions = field(default_factory=JobOptions)

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._out, self._err = open_sinks()
        self._ranks: dict[int, RankState] = {}
        self._failed: list[int] = []  # in the order in which they ended, those ended by us left out
        self._code: int | None = None  # known before any rank failed: a signal, a missing command
        self._interrupts = 0
        self._ending: Escalation | None = None
        self._signals_sent = False
        self._sweeping: Escalation | None = None
        self._draining_until: float | None = None
        self._children_changed = False
        self._paused = False
        self._output_lost = self._out.error is not None

    def run(self) -> int:
        """Returns the exit code for the launcher."""
        with signals_as_bytes() as signal_fd:
            self._selector.register(signal_fd, selectors.EVENT_READ)
            try:
                self._start()
                while not self._finished():
                    self._wait(signal_fd)
                    self._advance(time.monotonic())
                self._report()
                self._drain_sinks(signal_fd)
            finally:
                self._selector.close()
                for sink in {self._out, self._err}:
                    sink.close()
        return self._exit_code()

    # ---- Start -------------------------------------------------------------------------------

    def _start(self) -> None:
        for spec in self.specs:
            rank = spec.slot.rank
            try:
                copies = self._copy_files(rank, spec.slot.size)
            except OSError as error:
                self._say(f"the output of rank {rank} cannot be written: {error}")
                self._code = 1
                self._begin_ending(0.0)
                return
            try:
                process = self.launcher.start(spec)
            except OSError as error:
                self._say(f"rank {rank} does not start: {error}")
                self._code = 127 if isinstance(error, FileNotFoundError) else 126
                self._begin_ending(0.0)
                return
            tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)
            streams = [
                RankStream(
                    fd,
                    f"[{rank}] ".encode(),
                    sink,
                    tail,
                    timestamps=self.options.timestamps,
                    copy=copy,
                )
                for fd, sink, copy in (
                    (process.stdout, self._out, copies[0]),
                    (process.stderr, self._err, copies[1]),
                )
            ]
            for stream in streams:
                self._selector.register(stream.fd, selectors.EVENT_READ, stream)
            self._ranks[rank] = RankState(spec, streams, tail)
            if self.options.verbose:
                self._say(f"rank {rank} is process {process.pid}: {shlex.join(spec.argv)}")

    def _copy_files(self, rank: int, size: int) -> tuple[CopyFile | None, CopyFile | None]:
        if self.options.output_directory is None:
            return None, None
        name = str(rank).zfill(len(str(size - 1)))
        directory = self.options.output_directory / f"rank.{name}"
        directory.mkdir(parents=True, exist_ok=True)
        return CopyFile(directory / "stdout"), CopyFile(directory / "stderr")

    # ---- Events ------------------------------------------------------------------------------

    def _wait(self, signal_fd: int) -> None:
        for key, events in self._selector.select(self._seconds_left()):
            if key.fd == signal_fd:
                self._take_signals(signal_fd)
            elif isinstance(key.data, Sink):
                key.data.flush()
            elif events & selectors.EVENT_READ and not self._paused:
                self._read(key.data)
                self._pace()
        self._pace()

    def _seconds_left(self) -> float | None:
        if self._draining_until is not None:
            deadline = None if self._paused else self._draining_until
        else:
            escalation = self._sweeping or self._ending
            deadline = None if escalation is None else escalation.deadline
        return None if deadline is None else max(deadline - time.monotonic(), 0.0)

    def _read(self, stream: RankStream) -> None:
        fd = stream.fd
        stream.read()
        if not stream.open:
            self._selector.unregister(fd)
        if stream.copy is not None and stream.copy.error:
            self._say(stream.copy.error)
            stream.copy = None

    def _pace(self) -> None:
        """Listens to the sinks that have a backlog, and to the ranks if none has too much."""
        for sink in {self._out, self._err}:
            registered = sink.fd in self._selector.get_map()
            if sink.backlog and not registered:
                self._selector.register(sink.fd, selectors.EVENT_WRITE, sink)
            elif registered and not sink.backlog:
                self._selector.unregister(sink.fd)
        pause = max(self._out.backlog, self._err.backlog) > BACKLOG_BYTES
        if pause != self._paused:
            self._paused = pause
            for stream in self._open_streams():
                if pause:
                    self._selector.unregister(stream.fd)
                else:
                    self._selector.register(stream.fd, selectors.EVENT_READ, stream)
        if self._out.error is not None and not self._output_lost:
            self._output_lost = True
            self._lose_output(self._out.error)

    def _lose_output(self, error: OSError) -> None:
        if error.errno != errno.EPIPE:
            self._say(f"standard output: {error.strerror}; the job goes on without it")
        elif self._code is None and not self._failed and self._running():
            self._code = BROKEN_PIPE_CODE
            self._say("nobody reads the output any more; ending the job")
            self._begin_ending(self.options.grace_seconds)

    def _take_signals(self, signal_fd: int) -> None:
        for number in os.read(signal_fd, 512):
            signum = signal.Signals(number)
            if signum in _PASSED_SIGNALS:
                self._send_all(signum, group=False)
            elif signum in _ENDING_SIGNALS:
                self._interrupted(signum)
            elif signum == signal.SIGCHLD:
                self._children_changed = True
        self._reap()

    def _interrupted(self, signum: signal.Signals) -> None:
        self._interrupts += 1
        if self._code is None and not self._failed:
            self._code = 128 + signum
        if self._interrupts > 1:
            self._hurry()
            return
        # As a terminal would, an interrupt goes to the workers of a rank as well.
        self._send_all(signum, group=signum == signal.SIGINT)
        if signum == signal.SIGINT:
            self._say("interrupted; once more ends the ranks at once")
        else:
            self._begin_ending(self.options.grace_seconds)

    def _hurry(self) -> None:
        self._begin_ending(0.0)
        if self._ending is not None:
            self._ending.deadline = time.monotonic()

    def _reap(self) -> None:
        for ended in self.launcher.reap():
            state = self._ranks[ended.rank]
            state.returncode = ended.returncode
            state.ended_by_us = self._signals_sent
            how = describe_end(ended.returncode)
            self.store.report_lost(ended.rank, how)
            if self.options.verbose:
                self._say(f"rank {ended.rank} {how}")
            if ended.returncode != 0 and not self._signals_sent:
                self._rank_failed(ended.rank, how)

    def _rank_failed(self, rank: int, how: str) -> None:
        first = not self._failed
        self._failed.append(rank)
        if self._code is None and first and self._running():
            self._say(f"rank {rank} {how}; the others have {self.options.grace_seconds:g} s to end")
        self._begin_ending(self.options.grace_seconds)

    # ---- Ending ------------------------------------------------------------------------------

    def _begin_ending(self, grace_seconds: float) -> None:
        if self._ending is None:
            self._ending = Escalation(_END_RANKS, grace_seconds, time.monotonic())

    def _advance(self, now: float) -> None:
        if self._running():
            signum = self._ending.due(now) if self._ending is not None else None
            if signum is not None:
                self._signals_sent = True
                self._send_all(signum, group=True)
                self._send_all(signal.SIGCONT, group=True)  # a stopped process ends too
            return
        if self._draining_until is None:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        """Ends what the ranks left behind. SIGCHLD or the next deadline is a reason to look."""
        if self._sweeping is None:
            self._sweeping = Escalation(_END_STRAYS, _LEAVE_SECONDS, now)
            self._children_changed = True
        step = now >= self._sweeping.deadline
        if not step and not self._children_changed:
            return
        self._children_changed = False
        signum = self._sweeping.due(now)
        strays = self.launcher.strays()
        if strays and signum is not None:
            self.launcher.kill_strays(signum)
        if strays and not self._sweeping.exhausted:
            return
        if strays:
            self._say(f"processes {strays} do not end, not even by SIGKILL")
        # Its end: a pipe that somebody out of reach keeps open is not waited for.
        self._draining_until = now + _DRAIN_SECONDS

    def _finished(self) -> bool:
        if self._running():
            if self._ending is None or not self._ending.exhausted:
                return False
            self._say("a rank does not end, not even by SIGKILL")
            return True
        if self._draining_until is None or self._paused:
            return False
        late = time.monotonic() >= self._draining_until
        return late or next(self._open_streams(), None) is None

    def _running(self) -> bool:
        return any(state.returncode is None for state in self._ranks.values())

    def _open_streams(self) -> Iterator[RankStream]:
        return (s for state in self._ranks.values() for s in state.streams if s.open)

    def _send_all(self, signum: signal.Signals, *, group: bool) -> None:
        for rank in self._ranks:
            self.launcher.send(rank, signum, group=group)

    # ---- Report ------------------------------------------------------------------------------

    def _exit_code(self) -> int:
        if self._code is not None:
            return self._code
        failed = first_failure(self._ranks, self._failed)
        if failed is None:
            return 0
        returncode = self._ranks[failed].returncode
        return 1 if returncode is None else shell_code(returncode)

    def _report(self) -> None:
        for stream in list(self._open_streams()):
            stream.close()
        failed = first_failure(self._ranks, self._failed)
        if failed is None or self._code is not None:
            return
        state = self._ranks[failed]
        title = f"rank {failed} {describe_end(state.returncode or 0)}"
        if state.tail:
            box = draw_box(f"{title}; its last lines:", list(state.tail))
        else:
            box = draw_box(f"{title} without output", [])
        self._err.lines(self, box)
        others = [r for r in sorted(self._ranks) if r != failed and self._ranks[r].returncode]
        for rank in others:
            other = self._ranks[rank]
            how = describe_end(other.returncode or 0)
            cause = ", after bagua-run had told it to end" if other.ended_by_us else ""
            self._say(f"rank {rank} {how}{cause}")

    def _drain_sinks(self, signal_fd: int) -> None:
        """Writes what is left; a signal now ends the wait for a reader that does not read."""
        self._pace()
        while self._out.backlog or self._err.backlog:
            for key, _ in self._selector.select():
                if key.fd == signal_fd:
                    if any(n in _ENDING_SIGNALS for n in os.read(signal_fd, 512)):
                        return
                else:
                    key.data.flush()
            self._pace()

    def _say(self, text: str) -> None:
        self._err.lines(self, f"bagua-run: {text}\n".encode(errors="replace"))


def first_failure(ranks: dict[int, RankState], failed: Sequence[int]) -> int | None:
    """The rank that failed first, given those that failed by themselves in order of their end.

    A rank that said that it lost another one is passed over in favour of one that did not: a
    failing rank closes its connections before its process has ended, and the others may be faster
    to leave.
    """
    for rank in failed:
        if not any(stream.lost_peer for stream in ranks[rank].streams):
            return rank
    return failed[0] if failed else None
