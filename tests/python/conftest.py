"""Fixtures that run a script of ``checks/`` as the ranks of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKS = Path(__file__).resolve().parent / "checks"
DEADLINE_SECONDS = 120.0

RunRanks = Callable[..., subprocess.CompletedProcess[str]]


def job_environment(**variables: str) -> dict[str, str]:
    """The environment of a job: no variables of another launcher, one thread for arithmetic."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in outer and not k.startswith("BAGUA_")}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """Runs ``checks/SCRIPT`` on N ranks; ``run(script, ranks, *arguments, ok=True, **variables)``.

    With ``ok`` the job must succeed within the deadline; its output is the message if it does not.
    """

    def run(
        script: str, ranks: int, *arguments: str, ok: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bagua_ext.runner", "-np", str(ranks)]
        command += [sys.executable, str(CHECKS / script), *arguments]
        job = subprocess.run(
            command,
            env=job_environment(**variables),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=DEADLINE_SECONDS,
        )
        if ok and job.returncode != 0:
            pytest.fail(f"exit code {job.returncode}\n{job.stdout[-8000:]}", pytrace=False)
        return job

    return run
