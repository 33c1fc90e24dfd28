"""The moment at which a doomed rank ends, and its end, for every framework."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

from bagua_ext import basics

MOMENT = Path(os.environ["BAGUA_TEST_MOMENT"])
BELL = MOMENT.with_suffix(".bell")


def note_the_moment() -> None:
    draft = MOMENT.with_suffix(f".{os.getpid()}")
    draft.write_text(repr(time.monotonic()))
    draft.replace(MOMENT)
    # Opening the bell's other end wakes those who wait; without one nobody waits.
    with contextlib.suppress(OSError):
        os.close(os.open(BELL, os.O_WRONLY | os.O_NONBLOCK))


def wait_for_the_moment() -> None:
    with contextlib.suppress(FileExistsError):
        os.mkfifo(BELL)
    bell = os.open(BELL, os.O_RDONLY | os.O_NONBLOCK)
    waiter = select.poll()
    waiter.register(bell, select.POLLIN)
    # Who notes the moment writes the file before the bell, so one of the two is seen.
    if not MOMENT.exists():
        waiter.poll()
    os.close(bell)


def end(how: str) -> None:
    note_the_moment()
    if how == "exit":
        os._exit(5)
    if how == "exception":
        raise KeyError("a bug of the user's")
    if how == "leave":
        basics.shutdown()
        sys.exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def end_soon(how: str) -> None:
    """Ends this process from another thread while the main one is inside a collective."""
    timer = threading.Timer(0.2, end, [how])
    timer.daemon = True
    timer.start()
