"""Runs scripts as the ranks of jobs, each rank a fork of this process, which has done the imports.

A rank that is started anew needs seconds for its imports; a fork needs none, so that a test can
afford many jobs. The argument names what is imported: ``torch`` or ``tensorflow``. TensorFlow bears
the fork as long as nothing was computed: the import alone starts no thread.

Reads one job a line from standard input, as JSON, and answers each with a line:

    {"script": PATH, "arguments": [...], "ranks": N, "environment": {...}, "seconds": LIMIT}
    {"codes": [exit code of each rank, null if it ran past LIMIT], "output": "[rank] line\\n..."}

As the launcher does, it serves the store, tells it at once which rank ended, and ends what the
ranks leave behind.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import runpy
import secrets
import select
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua_ext.runner.processes import become_subreaper, descendants, die_with_parent
from bagua_ext.runner.store import CoreStore

Job = dict[str, Any]

# torch's optimizers import torch._dynamo.
IMPORTS = {
    "torch": ("torch", "torch._dynamo", "bagua_ext.torch"),
    "tensorflow": ("tensorflow", "keras", "bagua_ext.tensorflow"),
}


@dataclass
class Rank:
    """A process of a job and the file that holds what it printed."""

    pid: int
    output: Any
    code: int | None = None

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")


class Store:
    """The rendezvous store in a process of its own: this one has no threads when it forks."""

    def __init__(self, size: int, secret: bytes) -> None:
        address, address_out = os.pipe()
        lost, self.lost = os.pipe()
        arm = die_with_parent()
        self._pid = os.fork()
        if self._pid == 0:
            arm()
            os.close(self.lost)
            _serve_store(size, secret, address_out, lost)
        os.close(address_out)
        os.close(lost)
        with os.fdopen(address) as pipe:
            self.address = pipe.read()

    def report_lost(self, rank: int, why: str) -> None:
        """Tells ranks that wait in ``init`` that ``rank`` ended."""
        os.write(self.lost, f"{rank} {why}\n".encode())

    def stop(self) -> None:
        """Ends the store's process."""
        os.close(self.lost)
        os.waitpid(self._pid, 0)


def _serve_store(size: int, secret: bytes, address_out: int, lost: int) -> None:
    store = CoreStore(size, secret)
    with os.fdopen(address_out, "w") as pipe:
        pipe.write(store.address)
    with os.fdopen(lost) as pipe:
        for line in pipe:
            rank, why = line.split(maxsplit=1)
            store.report_lost(int(rank), why.strip())
    store.stop()
    os._exit(0)


def become_rank(job: Job, rank: int, store: Store, key: int, output: int) -> None:
    """Gives a fork the environment, arguments and descriptors of rank ``rank``."""
    os.close(store.lost)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.update(job["environment"])
    for name, own, all_of_them in (("RANK", rank, "SIZE"), ("LOCAL_RANK", rank, "LOCAL_SIZE")):
        os.environ[f"BAGUA_{name}"] = str(own)
        os.environ[f"BAGUA_{all_of_them}"] = str(job["ranks"])
    os.environ["BAGUA_RENDEZVOUS"], os.environ["BAGUA_SECRET_FD"] = store.address, str(key)
    faulthandler.dump_traceback_later(max(1.0, job["seconds"] - 2.0))
    if "keras" in sys.modules:
        sys.modules["keras"].utils.set_random_seed(1 + rank)
    else:
        sys.modules["torch"].manual_seed(1 + rank)
    sys.argv = [job["script"], *job["arguments"]]
    sys.path.insert(0, str(Path(job["script"]).parent))


def why(code: int) -> str:
    """How a rank ended, as the launcher words it."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def watch(ranks: list[Rank], store: Store, seconds: float) -> None:
    """Waits until all ranks ended, at most ``seconds``, and ends those that have not."""
    end = time.monotonic() + seconds
    running = {os.pidfd_open(rank.pid): number for number, rank in enumerate(ranks)}
    waiter = select.poll()
    for descriptor in running:
        waiter.register(descriptor, select.POLLIN)
    while running and (left := end - time.monotonic()) > 0:
        for descriptor, _ in waiter.poll(1000 * left):
            number = running.pop(descriptor)
            rank = ranks[number]
            rank.code = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
            store.report_lost(number, why(rank.code))
            waiter.unregister(descriptor)
            os.close(descriptor)
    for descriptor in running:
        os.close(descriptor)
    store.stop()
    for pid in descendants(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def run(job: Job) -> dict[str, Any] | None:
    """Runs a job and returns its outcome; None in a fork that has become a rank of it."""
    secret = secrets.token_bytes(32)
    key = os.memfd_create("secret")
    os.write(key, secret)
    store = Store(job["ranks"], secret)
    ranks: list[Rank] = []
    for number in range(job["ranks"]):
        output = tempfile.TemporaryFile()  # noqa: SIM115
        arm = die_with_parent()
        pid = os.fork()
        if pid == 0:
            arm()
            become_rank(job, number, store, key, output.fileno())
            return None
        ranks.append(Rank(pid, output))
    watch(ranks, store, job["seconds"])
    os.close(key)
    lines = [f"[{i}] {line}" for i, rank in enumerate(ranks) for line in rank.text().splitlines()]
    return {"codes": [rank.code for rank in ranks], "output": "\n".join(lines)}


def be_the_script(path: str) -> None:
    """Runs ``path`` as a program, up to and with its exit handlers.

    The interpreter is not taken apart afterwards: with a framework that takes most of a second.
    """
    code = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def main() -> None:
    """Serves until standard input ends."""
    become_subreaper()
    for module in IMPORTS[sys.argv[1]]:
        importlib.import_module(module)
    gc.freeze()  # a fork's collector then leaves the shared pages alone
    for line in sys.stdin:
        job = json.loads(line)
        outcome = run(job)
        if outcome is None:
            be_the_script(job["script"])
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
