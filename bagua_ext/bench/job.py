"""One measuring process: what it gives to every case."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from bagua_ext import basics, objects
from bagua_ext.bench.frameworks import FRAMEWORKS
from bagua_ext.bench.measure import Candidate, alternate
from bagua_ext.bench.options import Options
from bagua_ext.bench.report import Report
from bagua_ext.bench.shared import SpinBarrier, meet_asleep
from bagua_ext.launch import detect


class Job:
    """This rank's part of a bench; every method is called by all ranks together."""

    def __init__(self, options: Options, cores: Sequence[int], strategy: Any = None) -> None:
        self.options = options
        self.cores = cores  # those that the launcher gave to this rank
        self.strategy = strategy  # TensorFlow's own, if compared with
        self.rank: int = basics.rank()
        self.size: int = basics.size()
        self.meet = SpinBarrier()

    def rounds(self, default: int) -> int:
        return default if self.options.rounds is None else self.options.rounds

    def compares(self, library: str) -> bool:
        return library in self.options.compare

    def alternate(
        self, candidates: Sequence[Candidate], rounds: int, repeats: int = 1
    ) -> dict[str, list[float]]:
        """``measure.alternate``, each operation timed on the rank that took longest."""
        mine = alternate(
            candidates, self.meet, rounds=rounds, warmup=self.options.warmup, repeats=repeats
        )
        everyones = objects.allgather_object(mine)
        return {
            name: [max(sample) for sample in zip(*(each[name] for each in everyones), strict=True)]
            for name in mine
        }


def work(options: Options) -> Report:
    """Runs a case in this process, one rank of the job."""
    framework = FRAMEWORKS[options.framework]
    session = importlib.import_module(framework.session)
    cores = sorted(os.sched_getaffinity(0))
    if options.bind:  # before init, so that the engine's threads inherit it
        os.sched_setaffinity(0, {cores[detect(os.environ).rank % len(cores)]})
    with session.opened(options) as strategy:
        case = importlib.import_module(f"{framework.cases}.{options.case}")
        report: Report = case.measure(Job(options, cores, strategy))
        meet_asleep()  # nobody leaves before the slowest is done
    basics.shutdown()
    return report
