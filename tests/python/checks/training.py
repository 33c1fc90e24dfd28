"""What the optimizer checks share: data cut over ranks, and one process trained on all of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import bagua_ext.torch as hvd

PER_RANK = 4
FEATURES = 6

Build = Callable[[], nn.Module]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
Batch = tuple[torch.Tensor, torch.Tensor]


def build() -> nn.Module:
    """The same small net on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def batches(steps: int, seed: int = 0) -> Iterator[tuple[Batch, Batch]]:
    """(joined batch, this rank's part) for each step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(PER_RANK * hvd.size(), FEATURES, generator=generator)
        y = torch.randn(PER_RANK * hvd.size(), 3, generator=generator)
        own = slice(PER_RANK * hvd.rank(), PER_RANK * (hvd.rank() + 1))
        yield (x, y), (x[own], y[own])


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.02)


def wrapped(model: nn.Module, make: MakeOptimizer = sgd, **options: Any) -> Any:
    return hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)


class Pair:
    """One model trained by one process on joined batches, and one by all ranks on their parts."""

    def __init__(
        self, make: MakeOptimizer = sgd, make_model: Build = build, **options: Any
    ) -> None:
        self.alone, self.shared = make_model(), make_model()
        self.plain = make(self.alone.parameters())
        self.distributed = wrapped(self.shared, make, **options)

    def train(self, steps: int = 5, step: Callable[..., None] | None = None, seed: int = 0) -> None:
        """Trains both; ``step(model, optimizer, batch)`` is one step, the plain one by default."""
        step = step or plain_step
        for joined, own in batches(steps, seed):
            step(self.alone, self.plain, joined)
            step(self.shared, self.distributed, own)

    def check(self, **tolerance: float) -> None:
        """The parameters are equal to those of one process, and on all ranks to the bit."""
        same(self.shared, self.alone, **tolerance)
        same_on_all_ranks(self.shared)


def plain_step(model: nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def same(model: nn.Module, other: nn.Module, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-6}
    pairs = zip(model.named_parameters(), other.parameters(), strict=True)
    for (name, mine), theirs in pairs:
        torch.testing.assert_close(
            mine, theirs, msg=lambda m, name=name: f"{name}: {m}", **tolerance
        )


def same_on_all_ranks(model: nn.Module) -> None:
    flat = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
    for rank, row in enumerate(hvd.allgather(flat[None], name="same_on_all_ranks")):
        assert torch.equal(row, flat), f"rank {rank} differs by {(row - flat).abs().max()}"


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
