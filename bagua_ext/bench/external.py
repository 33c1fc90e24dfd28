"""Libraries whose processes need a launcher of their own: MPI through mpi4py, Horovod.

They cannot run inside the ranks of a bagua-run job. Rank 0 starts a job of theirs between rounds,
while all ranks of this one sleep; so the libraries take turns in blocks of rounds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bagua_ext import objects
from bagua_ext.bench.options import Options
from bagua_ext.bench.shared import meet_asleep

if TYPE_CHECKING:
    from bagua_ext.bench.job import Job

# The module of each.
EXTERNALS = {"mpi": "mpi4py", "horovod": "horovod"}
_LAUNCHERS = {"mpi": "mpiexec", "horovod": "horovodrun"}
_WORKER = "external_worker.py"
_LAUNCH_VARIABLES = ("BAGUA_", "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "MASTER_")
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_TIMEOUT_SECONDS = 300


class NotInstalledError(ValueError):
    """A library to compare with is not there."""


@dataclass(frozen=True)
class External:
    """A library and how its processes are started."""

    name: str
    launcher: str
    python: str

    @staticmethod
    def find(name: str, options: Options) -> External:
        """The library called ``name`` in ``EXTERNALS``.

        Raises:
            NotInstalledError: if its module or its launcher is missing; the text says what to do.
        """
        module, program = EXTERNALS[name], _LAUNCHERS[name]
        chosen = options.mpi_python if name == "mpi" else options.horovod_python
        python = chosen or sys.executable
        if not _has_module(python, module):
            raise NotInstalledError(
                f"{module} is not installed for {python}; leave {name} out of --compare, or name "
                f"an interpreter that has it with --{name}-python"
            )
        launcher = shutil.which(program, path=str(Path(python).parent)) or shutil.which(program)
        if launcher is None:
            raise NotInstalledError(
                f"{program} is neither beside {python} nor in PATH; leave {name} out of --compare"
            )
        return External(name, launcher, python)

    def command(self, size: int, arguments: list[str]) -> list[str]:
        """The worker's source goes as text: its interpreter need not have this package."""
        source = Path(__file__).with_name(_WORKER).read_text()
        command = [self.launcher, *self._launcher_options(), str(size), self.python, "-c", source]
        return [*command, self.name, *arguments]

    def _launcher_options(self) -> list[str]:
        if self.name == "mpi" and _is_open_mpi(self.launcher):
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            return [*root, "--oversubscribe", "-n"]
        return ["-np"]

    def measure(
        self, ranks: int, size: int, rounds: int, warmup: int, repeats: int, cores: Sequence[int]
    ) -> list[float]:
        """Seconds of ``rounds * repeats`` operations on ``size`` bytes, on the slowest rank.

        Rank r is bound to the r-th of ``cores``, counted round; to none if there are none.

        Raises:
            RuntimeError: if the job fails, a wrong result included, or takes too long.
        """
        arguments = [str(number) for number in (size, rounds, warmup, repeats, *cores)]
        command = self.command(ranks, arguments)
        try:
            done = subprocess.run(
                command,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self.name} did not end within {_TIMEOUT_SECONDS} s") from None
        if done.returncode:
            raise RuntimeError(f"{self.name} failed with {done.returncode}: {done.stderr[-2000:]}")
        return _samples_of(done.stdout, self.name)


def clean_environment() -> dict[str, str]:
    """This process's environment without what a launcher put in."""
    return {
        key: value
        for key, value in os.environ.items()
        if key not in _RANK_VARIABLES and not key.startswith(_LAUNCH_VARIABLES)
    }


def run_on_rank_zero(
    external: External, size: int, rounds: int, repeats: int, job: Job
) -> list[float]:
    """Samples of a job of ``external``'s own, known to every rank of this one afterwards."""
    outcome: tuple[list[float], str] = ([], "")
    meet_asleep()
    if job.rank == 0:
        try:
            warmup, cores = job.options.warmup, job.cores if job.options.bind else ()
            outcome = external.measure(job.size, size, rounds, warmup, repeats, cores), ""
        except RuntimeError as error:
            outcome = [], str(error)
    samples: list[float]
    samples, failure = objects.broadcast_object(outcome, root_rank=0)
    if failure:
        raise RuntimeError(failure)
    return samples


def _has_module(python: str, module: str) -> bool:
    if python == sys.executable:
        spec = importlib.util.find_spec(module)
        return spec is not None and spec.origin is not None
    try:
        tried = subprocess.run([python, "-c", f"import {module}"], capture_output=True)
    except OSError:
        return False
    return tried.returncode == 0


def _is_open_mpi(launcher: str) -> bool:
    told = subprocess.run([launcher, "--version"], capture_output=True, text=True)
    return "Open MPI" in told.stdout or "OpenRTE" in told.stdout


def _samples_of(output: str, name: str) -> list[float]:
    for line in output.splitlines():
        start = line.find('{"seconds"')  # horovodrun labels its lines
        if start >= 0:
            return [float(second) for second in json.loads(line[start:])["seconds"]]
    raise RuntimeError(f"{name} printed no samples but: {output[-2000:]}")
