"""Training steps of a model whose communication dominates, or with a larger batch, does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua_ext.torch as bagua
from bagua_ext.bench.engine import FlatBucket
from bagua_ext.bench.job import Job
from bagua_ext.bench.measure import Candidate
from bagua_ext.bench.report import Report, Row
from bagua_ext.bench.training import LOCAL, OURS, RATE, check_weights, layers_of, with_exchange

DDP = "gloo, DDP"


def make_model(parameters: int) -> nn.Sequential:
    """Square layers without bias, about ``parameters`` in all, the same on every rank."""
    width, depth = layers_of(parameters)
    layers = [nn.Linear(width, width, bias=False) for _ in range(depth)]
    draw = torch.Generator().manual_seed(0)
    for layer in layers:
        nn.init.normal_(layer.weight, std=width**-0.5, generator=draw)
    return nn.Sequential(*layers)


@dataclass
class Trainer:
    """A model, its optimizer and the batch it sees in every step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: torch.Tensor

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def weights(self) -> np.ndarray:
        parameters = self.model.parameters()
        return torch.cat([parameter.detach().flatten() for parameter in parameters]).numpy()


def _plain(model: nn.Module, batch: torch.Tensor) -> Trainer:
    own = copy.deepcopy(model)
    return Trainer(own, torch.optim.SGD(own.parameters(), lr=RATE), batch)


def _ours(model: nn.Module, batch: torch.Tensor) -> Trainer:
    trainer = _plain(model, batch)
    named = trainer.model.named_parameters()
    trainer.optimizer = bagua.DistributedOptimizer(trainer.optimizer, named_parameters=named)
    return trainer


def _ddp(model: nn.Module, batch: torch.Tensor) -> Trainer:
    own = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)
    return Trainer(own, torch.optim.SGD(own.parameters(), lr=RATE), batch)


def _inputs(model: nn.Sequential, batch: int, size: int) -> list[torch.Tensor]:
    """Every rank's batch; each rank knows them all."""
    width = model[0].in_features
    draw = torch.Generator().manual_seed(1)
    return list(torch.randn(size * batch, width, generator=draw).split(batch))


def _exchange_alone(count: int, job: Job) -> dict[str, float]:
    """Median seconds of exchanging ``count`` gradients with nothing to overlap with."""
    bucket, peer = FlatBucket("train.alone", count), torch.ones(count)
    bucket.data.fill(1.0)
    runs: dict[str, Callable[[], object]] = {OURS: bucket.exchange}
    if job.compares("gloo"):
        runs[DDP] = lambda: dist.all_reduce(peer)
    candidates = [
        Candidate(name, prepare=lambda: peer.fill_(1.0), run=run, check=lambda _: None)
        for name, run in runs.items()
    ]
    samples = job.alternate(candidates, rounds=5)
    bucket.drop()
    return {name: Row("", name, seconds).median for name, seconds in samples.items()}


def _measure_batch(batch: int, alone: dict[str, float], job: Job) -> list[Row]:
    model = make_model(job.options.parameters)
    inputs = _inputs(model, batch, job.size)
    mine = inputs[job.rank]
    trainers = {LOCAL: _plain(model, mine), OURS: _ours(model, mine)}
    if job.compares("gloo"):
        trainers[DDP] = _ddp(model, mine)
    candidates = [
        Candidate(name, prepare=lambda: None, run=trainer.step, check=lambda _: None)
        for name, trainer in trainers.items()
    ]
    rounds = job.rounds(10)
    samples = job.alternate(candidates, rounds)

    start = _plain(model, mine).weights()
    joined = _plain(model, torch.cat(inputs))
    for _ in range(rounds + job.options.warmup):
        joined.step()
    for name, trainer in trainers.items():
        if name != LOCAL:
            check_weights(name, trainer.weights(), joined.weights(), start)

    early = _early_share(trainers[OURS].optimizer)
    further = {OURS: f"{100 * early:.0f} % of bytes before backward ended"}
    rows = [Row(f"batch {batch}", name, seconds) for name, seconds in samples.items()]
    return [with_exchange(row, rows[0].median, alone, further) for row in rows]


def _early_share(optimizer: torch.optim.Optimizer) -> float:
    """Part of the bytes that were exchanged before backward ended, as the core counts it."""
    early, total = optimizer.overlap()
    return early / total if total else 0.0


def measure(job: Job) -> Report:
    """Samples of whole steps: zero_grad, forward, backward, step."""
    count = sum(parameter.numel() for parameter in make_model(job.options.parameters).parameters())
    alone = _exchange_alone(count, job) if job.size > 1 else {}
    rows = [row for batch in job.options.batches for row in _measure_batch(batch, alone, job)]
    notes = [
        f"{count / (1 << 20):g} Mi parameters in float32, SGD.",
        "adds: to the step without exchange; less than the exchange alone takes where it overlaps"
        " with computation, more where copying gradients into buckets costs more than that saves.",
    ]
    return Report("train", job.size, (DDP, LOCAL), rows, notes)
