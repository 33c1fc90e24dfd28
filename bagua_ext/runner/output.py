"""From a rank's bytes to labelled lines: whole lines, never mixed, whatever the bytes are."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shutil
import socket
import stat
import time
from pathlib import Path

TAIL_LINES = 20
READ_BYTES = 64 << 10
# A line longer than this is broken, so that output without line ends takes bounded memory.
LONGEST_LINE_BYTES = 8 << 20
# Reading from the ranks pauses above this: whoever reads the launcher's output sets the pace.
BACKLOG_BYTES = 1 << 20

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CLEAR_LINE = b"\r\x1b[K"


# By these a rank says that another one was lost: the error's name, and the core's log line.
_LOSS_MARKS = (b"PeerLostError", b"the job's communication ended")


class Sink:
    """One of the launcher's own descriptors. Never blocks on a pipe, a socket or a terminal.

    What is not taken at once is kept as ``backlog`` and goes on with ``flush``.
    After an error, which ``error`` keeps, everything is dropped.
    """

    def __init__(self, fd: int) -> None:
        self.error: OSError | None = None
        self._pending: collections.deque[bytes] = collections.deque()
        self.backlog = 0
        self._socket: socket.socket | None = None
        self._owned = -1
        self.fd = self._open(fd)

    def _open(self, fd: int) -> int:
        try:
            mode = os.fstat(fd).st_mode
        except OSError as error:  # started with the descriptor closed
            self.error = error
            return fd
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(fd))
        elif stat.S_ISFIFO(mode) or os.isatty(fd):
            # Opened anew, because O_NONBLOCK on a shared description would hit the other holders.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            with contextlib.suppress(OSError):
                self._owned = os.open(f"/proc/self/fd/{fd}", flags)
                return self._owned
        return fd

    def lines(self, source: object, text: bytes) -> None:
        """Writes whole lines of ``source``, line ends included."""
        self._write(text)

    def update(self, source: object, text: bytes) -> None:
        """Shows the unfinished line of ``source`` where that makes sense; here it does not."""

    def flush(self) -> None:
        """Writes as much of the backlog as is taken now."""
        while self._pending and self.error is None:
            block = self._pending[0]
            try:
                if self._socket is not None:
                    taken = self._socket.send(block, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                else:
                    taken = os.write(self.fd, block)
            except BlockingIOError:
                return
            except OSError as error:  # the reader left, the terminal closed, the disk is full
                self.error = error
                break
            self.backlog -= taken
            if taken == len(block):
                self._pending.popleft()
            else:
                self._pending[0] = block[taken:]
        if self.error is not None:
            self._pending.clear()
            self.backlog = 0

    def close(self) -> None:
        """Drops the backlog."""
        if self._socket is not None:
            self._socket.close()
        if self._owned >= 0:
            os.close(self._owned)

    def _write(self, data: bytes) -> None:
        if self.error is not None or not data:
            return
        self._pending.append(data)
        self.backlog += len(data)
        if len(self._pending) == 1:
            self.flush()


class TerminalSink(Sink):
    """A terminal. Its last row shows the unfinished line (a progress bar) of one source."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._live: object | None = None
        self._live_text = b""

    def lines(self, source: object, text: bytes) -> None:
        if self._live is None:
            self._write(text)
            return
        if self._live is source:
            self._live = None
            self._write(_CLEAR_LINE + text)
        else:
            self._write(_CLEAR_LINE + text + self._live_text)

    def update(self, source: object, text: bytes) -> None:
        if self._live not in (None, source):
            return
        if text:
            self._live, self._live_text = source, self._cut(text)
            self._write(_CLEAR_LINE + self._live_text)
        elif self._live is source:
            self._live = None
            self._write(_CLEAR_LINE)

    @staticmethod
    def _cut(text: bytes) -> bytes:
        width = shutil.get_terminal_size().columns - 1
        shown = text[: 64 * width]
        decoded = shown.decode(errors="replace")
        if len(_ESCAPES.sub("", decoded)) <= width:
            return shown
        return _ESCAPES.sub("", decoded)[:width].encode()


def open_sinks(out: int = 1, err: int = 2) -> tuple[Sink, Sink]:
    """Sinks for the launcher's output and error: one and the same where both lead to one place."""
    sink = TerminalSink(out) if os.isatty(out) else Sink(out)
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(out), os.fstat(err)):
            return sink, sink
    return sink, TerminalSink(err) if os.isatty(err) else Sink(err)


class CopyFile:
    """A rank's output as it came, in a file. Stops at the first error, which it keeps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self.error: str | None = None

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self.error is None:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                self.error = f"{self._path}: {error.strerror}; nothing more is written to it"

    def close(self) -> None:
        os.close(self._fd)


def visible_state(line: bytes) -> bytes:
    """What a terminal shows at last of a line that carriage returns overwrote."""
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :]


class RankStream:
    """One of a rank's two output pipes; closes ``fd`` at its end.

    ``tail`` gets the last lines and may be shared by the rank's two streams.
    """

    def __init__(
        self,
        fd: int,
        label: bytes,
        sink: Sink,
        tail: collections.deque[bytes],
        *,
        timestamps: bool = False,
        copy: CopyFile | None = None,
    ) -> None:
        self.fd = fd
        self.sink = sink
        self.open = True
        self.copy = copy
        self._label = label
        self._tail = tail
        self._timestamps = timestamps
        self._partial = bytearray()
        self.lost_peer = False  # the rank said that it lost another one

    def read(self) -> None:
        """Takes one block, which must be ready; at the end of the stream ``open`` turns false."""
        block = os.read(self.fd, READ_BYTES)
        if not block:
            self.close()
            return
        if self.copy is not None:
            self.copy.write(block)
        self.feed(block)

    def feed(self, block: bytes) -> None:
        """Passes on the lines that ``block`` completes and keeps the rest."""
        end = block.rfind(b"\n")
        if end >= 0:
            self._emit(bytes(self._partial) + block[:end])
            self._partial = bytearray()
        rest = block[end + 1 :]
        self._partial += rest
        if b"\r" in rest:
            returned = self._partial.endswith(b"\r")
            self._partial = bytearray(visible_state(bytes(self._partial)))
            self._partial += b"\r" if returned else b""
        if len(self._partial) > LONGEST_LINE_BYTES:
            self._emit(bytes(self._partial))
            self._partial = bytearray()
        shown = visible_state(bytes(self._partial[-READ_BYTES:]))
        self.sink.update(self, self._prefix() + shown if shown else b"")

    def close(self) -> None:
        """Passes on an unfinished last line and closes the pipe."""
        if not self.open:
            return
        self.open = False
        rest = bytes(self._partial)
        if rest and not (rest.endswith(b"\r") and not rest.strip()):
            self._emit(rest)
        else:
            self.sink.update(self, b"")
        os.close(self.fd)
        if self.copy is not None:
            self.copy.close()

    def _prefix(self) -> bytes:
        if not self._timestamps:
            return self._label
        now = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        return f"{stamp}.{int(now % 1 * 1000):03d} ".encode() + self._label

    def _emit(self, block: bytes) -> None:
        if b"\r" in block:
            block = b"\n".join(visible_state(line) for line in block.split(b"\n"))
        prefix = self._prefix()
        self.sink.lines(self, prefix + block.replace(b"\n", b"\n" + prefix) + b"\n")
        self._tail.extend(block.rsplit(b"\n", TAIL_LINES)[-TAIL_LINES:])
        if not self.lost_peer:
            self.lost_peer = any(mark in block for mark in _LOSS_MARKS)


def draw_box(title: str, lines: list[bytes], width: int = 100) -> bytes:
    """``lines`` in a box of text; characters that a terminal would obey are left out."""
    head = f"+--- {title} "
    rows = [head + "-" * max(width - len(head), 3)]
    for line in lines:
        text = _ESCAPES.sub("", line[:2000].decode(errors="replace")).expandtabs()
        rows.append("| " + "".join(c if c.isprintable() else "?" for c in text))
    rows.append("+" + "-" * (max(len(rows[0]), width) - 1))
    return ("\n".join(rows) + "\n").encode(errors="replace")
