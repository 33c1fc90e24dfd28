"""The variables that a rank finds in its environment (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bagua_ext.runner.placement import Slot

# Marks every process of a job, so that one that left its process group is still found.
JOB_ID_VARIABLE = "BAGUA_JOB_ID"


@dataclass(frozen=True)
class Meeting:
    """How the ranks of a job find each other.

    ``secret_fd`` is inherited by every rank; it holds 32 bytes, read with ``os.pread`` at 0.
    ``master_port`` was free a moment ago and is bound by nobody. ``cores``: of this host.
    """

    job_id: str
    rendezvous: str
    secret_fd: int
    master_address: str
    master_port: int
    cores: int
    start_timeout_seconds: float | None = None


def rank_environment(base: Mapping[str, str], slot: Slot, meeting: Meeting) -> dict[str, str]:
    """``base`` with the variables of ``slot`` on top; the launcher's own always win."""
    environment = dict(base)
    place = {
        "RANK": slot.rank,
        "SIZE": slot.size,
        "LOCAL_RANK": slot.local_rank,
        "LOCAL_SIZE": slot.local_size,
        "CROSS_RANK": slot.cross_rank,
        "CROSS_SIZE": slot.cross_size,
    }
    for prefix in ("BAGUA_", "HOROVOD_"):
        environment.update({prefix + name: str(value) for name, value in place.items()})
    environment.update(
        {
            "RANK": str(slot.rank),
            "WORLD_SIZE": str(slot.size),
            "LOCAL_RANK": str(slot.local_rank),
            "LOCAL_WORLD_SIZE": str(slot.local_size),
            "MASTER_ADDR": meeting.master_address,
            "MASTER_PORT": str(meeting.master_port),
            "BAGUA_RENDEZVOUS": meeting.rendezvous,
            "BAGUA_SECRET_FD": str(meeting.secret_fd),
            JOB_ID_VARIABLE: meeting.job_id,
        }
    )
    if meeting.start_timeout_seconds is not None:
        environment["BAGUA_START_TIMEOUT_SECONDS"] = f"{meeting.start_timeout_seconds:g}"
    if slot.local_size > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
        # TensorFlow's own default is all cores for every rank.
        share = str(max(1, meeting.cores // slot.local_size))
        environment.setdefault("TF_NUM_INTRAOP_THREADS", share)
        environment.setdefault("TF_NUM_INTEROP_THREADS", share)
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment
