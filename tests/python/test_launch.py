"""Who started this process: full matches win, partial ones are errors that name what is missing."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_ext.launch import Launcher, LaunchInfo, Meeting, detect
from bagua_ext.secret import read_secret

TORCH = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
ELASTIC = {**TORCH, "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"}
BAGUA = {
    "BAGUA_RANK": "2",
    "BAGUA_SIZE": "4",
    "BAGUA_RENDEZVOUS": "127.0.0.1:4000",
    "BAGUA_SECRET_FD": "7",
}


def test_nothing_set_is_rank_0_of_1() -> None:
    info = detect({"PATH": "/bin", "MASTER_ADDR": "localhost"})
    assert info == LaunchInfo(Launcher.ALONE, 0, 1)


def test_bagua_run_wins_over_the_variables_it_sets_for_others() -> None:
    info = detect({**ELASTIC, **BAGUA})
    assert (info.launcher, info.rank, info.size) == (Launcher.BAGUA_RUN, 2, 4)
    assert (info.meeting, info.address, info.secret_fd) == (Meeting.GIVEN, "127.0.0.1:4000", 7)


def test_torchrun_meets_through_its_agent_and_tells_restarts_apart() -> None:
    info = detect(ELASTIC)
    assert (info.launcher, info.rank, info.size) == (Launcher.TORCHRUN, 1, 3)
    assert (info.meeting, info.address) == (Meeting.AGENT, "localhost:29500")
    assert info.key != detect({**ELASTIC, "TORCHELASTIC_RESTART_COUNT": "3"}).key


def test_plain_variables_meet_beside_the_master_port() -> None:
    info = detect(TORCH)
    assert (info.launcher, info.meeting) == (Launcher.ENVIRONMENT, Meeting.RANK_ZERO)
    assert info.address == "127.0.0.1:29501"


@pytest.mark.parametrize("variables", (BAGUA, ELASTIC, TORCH))
def test_a_missing_variable_is_named(variables: dict[str, str]) -> None:
    optional = {"LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}
    for missing in variables.keys() - optional:
        rest = {name: value for name, value in variables.items() if name != missing}
        with pytest.raises(ValueError, match=missing):
            detect(rest)


@pytest.mark.parametrize(
    ("name", "value"),
    (("RANK", "3"), ("RANK", "-1"), ("WORLD_SIZE", "two"), ("MASTER_PORT", "65535")),
)
def test_a_value_out_of_range_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        detect({**TORCH, name: value})


def test_several_hosts_and_other_launchers_are_refused() -> None:
    with pytest.raises(ValueError, match="several hosts"):
        detect({**TORCH, "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="Open MPI"):
        detect({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})
    with pytest.raises(ValueError, match="srun"):
        detect({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"})
    # The shell of an allocation has the number of tasks too, and is a single process.
    assert detect({"SLURM_NTASKS": "2"}).size == 1


def test_the_user_key_is_made_once_and_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    info = detect(TORCH)
    key = read_secret(info)
    assert len(key) == 32 and read_secret(info) == key
    path = tmp_path / "bagua_ext" / "key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        read_secret(info)


def test_the_secret_descriptor_is_read_from_its_start_each_time() -> None:
    fd = os.memfd_create("secret")
    try:
        os.write(fd, b"0123456789abcdef")
        info = LaunchInfo(Launcher.BAGUA_RUN, 0, 2, secret_fd=fd)
        assert read_secret(info) == read_secret(info) == b"0123456789abcdef"
        os.ftruncate(fd, 8)
        with pytest.raises(ValueError, match="at least 16"):
            read_secret(info)
    finally:
        os.close(fd)
    with pytest.raises(ValueError, match="BAGUA_SECRET_FD"):
        read_secret(info)


SCRIPT = """
import os, torch, bagua_ext.torch as hvd
for _ in range(3):
    hvd.init()
    total = hvd.allreduce(torch.ones(4), op=hvd.Sum)
    # One write: the ranks share the pipe.
    os.write(1, f"RESULT {hvd.rank()} {hvd.size()} {int(total.sum())}\\n".encode())
    hvd.shutdown()
"""


def _environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    names = (*TORCH, "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    home = str(tmp_path / "config")
    return {**kept, "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": home, **variables}


def test_torchrun_starts_a_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    job = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        env=_environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.split("\n")).count("RESULT 0 2 8") == 3
    assert sorted(job.stdout.split("\n")).count("RESULT 1 2 8") == 3


def _free_port_pair() -> int:
    # In an order of its own, so that runs side by side rarely meet.
    for port in random.sample(range(21000, 32000, 2), 100):
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


def test_plain_variables_start_a_job(tmp_path: Path) -> None:
    port = str(_free_port_pair())
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=_environment(tmp_path, **common, RANK=rank, LOCAL_RANK=rank),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    outputs = [process.communicate(timeout=60)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    for rank, output in enumerate(outputs):
        assert output.split("\n").count(f"RESULT {rank} 2 8") == 3
