"""Reads from environment variables who started this process and which rank it is.

Nothing here touches files or sockets: ``detect`` is a pure function, ``rendezvous`` acts on it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Launcher(enum.Enum):
    """Who started this process."""

    BAGUA_RUN = "bagua-run"
    TORCHRUN = "torchrun"
    ENVIRONMENT = "RANK and MASTER_ADDR"
    ALONE = "no launcher"


class Meeting(enum.Enum):
    """How the ranks find the rendezvous store."""

    NONE = "none"  # one rank
    GIVEN = "given"  # somebody serves it at `address`
    RANK_ZERO = "rank zero"  # rank 0 serves it at `address`
    AGENT = "agent"  # rank 0 serves it and publishes where in the agent's store at `address`


@dataclass(frozen=True)
class LaunchInfo:
    """What the launcher says about this process.

    ``address`` is "host:port". ``key`` tells apart the jobs and restarts that share one agent.
    The secret comes from descriptor ``secret_fd``, else from ``secret_file``, else from the user's
    own key file.
    """

    launcher: Launcher
    rank: int
    size: int
    meeting: Meeting = Meeting.NONE
    address: str = ""
    key: str = ""
    secret_fd: int | None = None
    secret_file: str | None = None


# Launchers that are recognised but cannot be served yet: (name, variable of the size, variables
# that must be there besides).
_UNSUPPORTED = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", ()),
    ("MPICH's mpirun", "PMI_SIZE", ()),
    ("srun", "SLURM_NTASKS", ("SLURM_STEP_ID", "SLURM_PROCID")),
    ("horovodrun", "HOROVOD_SIZE", ()),
)


def detect(environ: Mapping[str, str]) -> LaunchInfo:
    """Returns this process's place in the job; the first launcher that matches wins.

    Raises:
        ValueError: a launcher's variables are there in part, contradict each other or are no
            numbers, or the launcher is not supported.
    """
    if _any(environ, "BAGUA_RANK", "BAGUA_SIZE", "BAGUA_RENDEZVOUS", "BAGUA_SECRET_FD"):
        return _from_bagua_run(environ)
    if "TORCHELASTIC_RUN_ID" in environ:
        return _from_torchrun(environ)
    if _any(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        return _from_plain_variables(environ)
    _refuse_unsupported(environ)
    return LaunchInfo(Launcher.ALONE, rank=0, size=1)


def _from_bagua_run(environ: Mapping[str, str]) -> LaunchInfo:
    _require(environ, Launcher.BAGUA_RUN, "BAGUA_RANK", "BAGUA_SIZE")
    rank, size = _rank_and_size(environ, "BAGUA_RANK", "BAGUA_SIZE")
    secret_file = environ.get("BAGUA_SECRET_FILE")
    if size == 1:
        return LaunchInfo(Launcher.BAGUA_RUN, rank, size)
    _require(environ, Launcher.BAGUA_RUN, "BAGUA_RENDEZVOUS")
    if secret_file is None:
        _require(environ, Launcher.BAGUA_RUN, "BAGUA_SECRET_FD")
    fd = _number(environ, "BAGUA_SECRET_FD") if "BAGUA_SECRET_FD" in environ else None
    return LaunchInfo(
        Launcher.BAGUA_RUN,
        rank,
        size,
        Meeting.GIVEN,
        _checked_address(environ["BAGUA_RENDEZVOUS"], "BAGUA_RENDEZVOUS"),
        secret_fd=fd,
        secret_file=secret_file,
    )


def _from_torchrun(environ: Mapping[str, str]) -> LaunchInfo:
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    _require(environ, Launcher.TORCHRUN, *needed)
    rank, size = _rank_and_size(environ, "RANK", "WORLD_SIZE")
    if size == 1:
        return LaunchInfo(Launcher.TORCHRUN, rank, size)
    _refuse_several_hosts(environ, size)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE", "True") != "True":
        return _served_by_rank_zero(environ, Launcher.TORCHRUN, rank, size)
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return LaunchInfo(
        Launcher.TORCHRUN,
        rank,
        size,
        Meeting.AGENT,
        f"{environ['MASTER_ADDR']}:{_number(environ, 'MASTER_PORT')}",
        key=f"bagua_ext/{environ['TORCHELASTIC_RUN_ID']}/{restarts}",
        secret_file=environ.get("BAGUA_SECRET_FILE"),
    )


def _from_plain_variables(environ: Mapping[str, str]) -> LaunchInfo:
    _require(environ, Launcher.ENVIRONMENT, "RANK", "WORLD_SIZE")
    if "LOCAL_RANK" not in environ:
        raise ValueError(
            "RANK and WORLD_SIZE are set but LOCAL_RANK is not. Some platforms count hosts that "
            "way, not processes. Start the processes with bagua-run, or set LOCAL_RANK as well."
        )
    rank, size = _rank_and_size(environ, "RANK", "WORLD_SIZE")
    if size == 1:
        return LaunchInfo(Launcher.ENVIRONMENT, rank, size)
    _require(environ, Launcher.ENVIRONMENT, "MASTER_ADDR", "MASTER_PORT")
    _refuse_several_hosts(environ, size)
    return _served_by_rank_zero(environ, Launcher.ENVIRONMENT, rank, size)


def _served_by_rank_zero(
    environ: Mapping[str, str], launcher: Launcher, rank: int, size: int
) -> LaunchInfo:
    # MASTER_PORT itself belongs to whoever set it.
    port = _number(environ, "MASTER_PORT") + 1
    return LaunchInfo(
        launcher,
        rank,
        size,
        Meeting.RANK_ZERO,
        _checked_address(f"127.0.0.1:{port}", "MASTER_PORT + 1"),
        secret_file=environ.get("BAGUA_SECRET_FILE"),
    )


def _refuse_several_hosts(environ: Mapping[str, str], size: int) -> None:
    local_size = environ.get("LOCAL_WORLD_SIZE")
    if local_size is not None and local_size != str(size):
        raise ValueError(
            f"WORLD_SIZE is {size} but LOCAL_WORLD_SIZE is {local_size}: jobs on several hosts are "
            "not supported yet. Start all processes on one host."
        )


def _refuse_unsupported(environ: Mapping[str, str]) -> None:
    for name, size, others in _UNSUPPORTED:
        if environ.get(size, "1") != "1" and all(variable in environ for variable in others):
            raise ValueError(
                f"this process was started by {name} ({size}={environ[size]}), which is not "
                "supported yet. Start the job with bagua-run or torchrun."
            )


def _any(environ: Mapping[str, str], *names: str) -> bool:
    return any(name in environ for name in names)


def _require(environ: Mapping[str, str], launcher: Launcher, *names: str) -> None:
    missing = [name for name in names if name not in environ]
    if missing:
        raise ValueError(
            f"the variables of {launcher.value} are set in part: {', '.join(missing)} missing. "
            "Set the missing ones, or unset all of them to run as a single rank."
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name} is '{environ[name]}', expected a whole number") from None


def _rank_and_size(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _number(environ, rank_name), _number(environ, size_name)
    if not 0 <= rank < size:
        raise ValueError(
            f"{rank_name} is {rank} and {size_name} is {size}; 0 <= rank < size must hold"
        )
    return rank, size


def _checked_address(address: str, origin: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{origin} is '{address}', expected host:port with a port of 1 to 65535")
    return address
