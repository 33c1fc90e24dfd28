"""A process that outlives the launcher if that is killed, and then ends the job.

The kernel ends each rank with the launcher (PR_SET_PDEATHSIG), but not a rank's own children.
"""

from __future__ import annotations

import contextlib
import os
import signal

from bagua_ext.runner.environment import JOB_ID_VARIABLE
from bagua_ext.runner.processes import kill_and_wait, marked_processes

_ALL_WELL = b"done\n"
_MAX_ROUNDS = 20


class Guard:
    """Watches over one job. Make it before any thread is started: it forks.

    The guard waits at a pipe that this process alone holds open. It finds the job's processes by
    the job id in their environment and by the sessions of the ranks.
    """

    def __init__(self, job_id: str) -> None:
        read_end, self._pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _watch(read_end, job_id)
            finally:
                os._exit(0)
        os.close(read_end)

    def add_session(self, pid: int) -> None:
        """A rank was started that leads a session of its own."""
        self._write(b"%d\n" % pid)

    def close(self) -> None:
        """The job is over: the guard leaves."""
        self._write(_ALL_WELL)
        os.close(self._pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the guard itself was killed
            os.write(self._pipe, data)


def _watch(pipe: int, job_id: str) -> None:
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    # Descriptors of the launcher would keep its readers waiting for an end that does not come.
    os.dup2(pipe, 0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    told = b""
    while block := os.read(0, 4096):
        told += block
    if told.endswith(_ALL_WELL):
        return
    sessions = {int(line) for line in told.split()}
    for _ in range(_MAX_ROUNDS):  # a process may fork while the others are being killed
        found = marked_processes(f"{JOB_ID_VARIABLE}={job_id}", sessions)
        if not found:
            return
        kill_and_wait(found, timeout_seconds=1.0)
