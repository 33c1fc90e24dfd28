"""Starts ranks on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

from bagua_ext.runner.guard import Guard
from bagua_ext.runner.placement import EndedProcess, ProcessSpec, StartedProcess
from bagua_ext.runner.processes import become_subreaper, descendants, die_with_parent, send_each


class LocalLauncher:
    """A ``Launcher`` whose ranks are children of this process, each in a session of its own.

    This process becomes the reaper of all its descendants and waits for any child, so it must
    have no other children: bagua-run is a process of its own for this reason.
    Make it before any thread is started: it forks a guard.
    """

    def __init__(self, job_id: str, inherited: tuple[int, ...]) -> None:
        self._inherited = inherited
        self._guard = Guard(job_id)
        become_subreaper()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._running: dict[int, int] = {}  # pid -> rank

    def start(self, spec: ProcessSpec) -> StartedProcess:
        """Starts one rank; rank 0 alone reads the launcher's standard input."""
        stdout, stdout_write = os.pipe()
        stderr, stderr_write = os.pipe()
        try:
            # Forking beside threads is safe here: the child calls prctl and getppid, then exec.
            process = subprocess.Popen(
                list(spec.argv),
                env=dict(spec.environment),
                stdin=None if spec.slot.rank == 0 else subprocess.DEVNULL,
                stdout=stdout_write,
                stderr=stderr_write,
                pass_fds=self._inherited,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        except BaseException:
            os.close(stdout)
            os.close(stderr)
            raise
        finally:
            os.close(stdout_write)
            os.close(stderr_write)
        self._guard.add_session(process.pid)
        self._processes[spec.slot.rank] = process
        self._running[process.pid] = spec.slot.rank
        return StartedProcess(process.pid, stdout, stderr)

    def send(self, rank: int, signum: signal.Signals, *, group: bool) -> None:
        """Signals a rank that has not been reaped; its pid cannot have been reused."""
        pid = self._processes[rank].pid
        if pid not in self._running:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(pid, signum)
            else:
                os.kill(pid, signum)

    def reap(self) -> list[EndedProcess]:
        """Also collects adopted descendants, silently."""
        ended = []
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                rank = self._running.pop(pid, None)
                if rank is not None:
                    returncode = os.waitstatus_to_exitcode(status)
                    self._processes[rank].returncode = returncode
                    ended.append(EndedProcess(rank, returncode))
        return ended

    def strays(self) -> list[int]:
        """Every descendant, the guard aside; asked when no rank runs any more."""
        return descendants(os.getpid(), excluded={self._guard.pid})

    def kill_strays(self, signum: signal.Signals) -> None:
        """Signals every descendant, ranks that still run included."""
        send_each(self.strays(), signum)

    def close(self) -> None:
        """Sends the guard home."""
        self._guard.close()
