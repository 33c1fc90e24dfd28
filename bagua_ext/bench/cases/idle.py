"""Processor time that ranks use while nothing is to be done, and while they wait for one."""

from __future__ import annotations

import time

import torch

import bagua_ext.torch as bagua
from bagua_ext.bench.job import Job
from bagua_ext.bench.report import Report, Row


def _cpu_seconds_asleep(seconds: float) -> float:
    """Of all threads of this process, while its main thread sleeps."""
    start = time.process_time()
    time.sleep(seconds)
    return time.process_time() - start


def _cpu_seconds_waiting(seconds: float, job: Job) -> float:
    """The same, while all ranks but the last wait in an allreduce that the last one joins late."""
    if job.rank == job.size - 1:
        time.sleep(seconds)
    start = time.process_time()
    bagua.allreduce_(torch.ones(1), name="idle.late")
    return time.process_time() - start


def measure(job: Job) -> Report:
    """Seconds of processor time of the rank that used most; one sample a round."""
    pause = job.options.seconds
    asleep, waiting = [], []
    for _ in range(job.rounds(2)):
        bagua.allreduce_(torch.ones(1024), name="idle.before")  # the engine has been at work
        bagua.barrier()
        asleep.append(max(bagua.allgather_object(_cpu_seconds_asleep(pause))))
        waiting.append(max(bagua.allgather_object(_cpu_seconds_waiting(pause, job))))
    group = f"{pause:g} s"
    rows = [Row(group, "idle", asleep), Row(group, "waiting for a late rank", waiting)]
    notes = ["Processor time in that pause, of all threads of the rank that used most."]
    return Report("idle", job.size, (), rows, notes)
