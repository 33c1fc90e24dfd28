"""Fixtures that run a script of ``checks/`` as the ranks of a job."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CHECKS = HERE / "checks"
VARIABLES: dict[str, dict[str, str]] = {
    "torch": {},
    "tensorflow": {
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_NUM_INTRAOP_THREADS": "1",
    },
}
DEADLINE_SECONDS = 120.0
START_SECONDS = 120.0


@dataclass(frozen=True)
class Outcome:
    """How a job ended: each rank's exit code, None if it had to be ended; what all printed."""

    codes: list[int | None]
    output: str


RunRanks = Callable[..., Outcome]
LaunchRanks = Callable[..., "subprocess.CompletedProcess[str]"]


def job_environment(**variables: str) -> dict[str, str]:
    """The environment of a job: no variables of another launcher, one thread for arithmetic."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in outer and not k.startswith("BAGUA_")}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


class RankServer:
    """The process that ``rank_server.py`` describes; ``framework`` is what it imports."""

    def __init__(self, framework: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "rank_server.py"), framework],
            env=job_environment(**VARIABLES[framework]),
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, ranks: int, *arguments: str, **variables: str) -> Outcome:
        """Runs ``checks/SCRIPT`` on ``ranks`` forks with ``variables`` in their environment."""
        job = {
            "script": str(CHECKS / script),
            "arguments": arguments,
            "ranks": ranks,
            "environment": variables,
            "seconds": DEADLINE_SECONDS,
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        limit = START_SECONDS + DEADLINE_SECONDS
        if not select.select([self._process.stdout], [], [], limit)[0]:
            pytest.fail(f"no answer within {limit} s", pytrace=False)
        answer = self._process.stdout.readline()
        if not answer:
            pytest.fail(f"the rank server ended: {self._process.wait()}", pytrace=False)
        return Outcome(**json.loads(answer))

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """One for the session: what it imports is imported once."""
    server = RankServer("torch", tmp_path_factory.mktemp("ranks"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def tf_rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """As ``rank_server``, with TensorFlow and Keras instead of torch."""
    # A folder of that name can be imported as well.
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        pytest.skip("TensorFlow is not installed")
    server = RankServer("tensorflow", tmp_path_factory.mktemp("tf_ranks"))
    yield server
    server.close()


def runner(server: RankServer) -> RunRanks:
    """Returns ``run(script, ranks, *arguments, ok=True, **environment)`` on forks of ``server``.

    With ``ok`` every rank must exit with 0; the output is the message if one does not.
    """

    def run(script: str, ranks: int, *arguments: str, ok: bool = True, **variables: str) -> Outcome:
        outcome = server.run(script, ranks, *arguments, **variables)
        if ok and any(code != 0 for code in outcome.codes):
            pytest.fail(f"exit codes {outcome.codes}\n{outcome.output[-8000:]}", pytrace=False)
        return outcome

    return run


@pytest.fixture
def run_ranks(rank_server: RankServer) -> RunRanks:
    """Runs ``checks/SCRIPT`` on N forked ranks that have imported torch; see ``runner``."""
    return runner(rank_server)


@pytest.fixture
def run_tf_ranks(tf_rank_server: RankServer) -> RunRanks:
    """Runs ``checks/SCRIPT`` on N forked ranks that have imported TensorFlow; see ``runner``."""
    return runner(tf_rank_server)


def launch_job(
    folder: Path, words: list[str], variables: dict[str, str], ok: bool
) -> subprocess.CompletedProcess[str]:
    """Runs bagua-run with ``words``; with ``ok`` it must exit with 0."""
    job = subprocess.run(
        [sys.executable, "-m", "bagua_ext.runner", *words],
        env=job_environment(**variables),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=DEADLINE_SECONDS,
    )
    if ok and job.returncode != 0:
        pytest.fail(f"exit code {job.returncode}\n{job.stdout[-8000:]}", pytrace=False)
    return job


@pytest.fixture
def launch_ranks(tmp_path: Path) -> LaunchRanks:
    """Runs ``checks/SCRIPT`` on N ranks that bagua-run starts; arguments as of ``run_ranks``."""

    def launch(
        script: str, ranks: int, *arguments: str, ok: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        words = ["-np", str(ranks), sys.executable, str(CHECKS / script), *arguments]
        return launch_job(tmp_path, words, variables, ok)

    return launch


@pytest.fixture
def launch_mixed(tmp_path: Path) -> LaunchRanks:
    """Runs ``checks/SCRIPT FRAMEWORK ARGUMENTS`` on so many ranks of each framework, in order.

    ``launch(script, ((1, "torch"), (1, "tensorflow")), *arguments, ok=True, **environment)``.
    """

    def launch(
        script: str,
        programs: tuple[tuple[int, str], ...],
        *arguments: str,
        ok: bool = True,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        words: list[str] = []
        for count, framework in programs:
            program = [sys.executable, str(CHECKS / script), framework, *arguments]
            words += [*([":"] if words else []), "-np", str(count), *program]
        return launch_job(tmp_path, words, {**VARIABLES["tensorflow"], **variables}, ok)

    return launch
