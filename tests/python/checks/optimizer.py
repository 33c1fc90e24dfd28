"""DistributedOptimizer against one process trained on the joined batch: the steps themselves."""

from __future__ import annotations

import warnings

import torch
from driver import raised, run_checks
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import (
    FEATURES,
    Pair,
    adam,
    batches,
    build,
    loss_of,
    plain_step,
    same_on_all_ranks,
    sgd,
    wrapped,
)

import bagua_ext.torch as hvd


def check_sgd_and_adam() -> None:
    for make in (sgd, adam):
        pair = Pair(make)
        pair.train(6)
        pair.check()


def check_a_steady_state_negotiates_nothing() -> None:
    for options in ({}, {"bucket_bytes": 300}, {"flatten": False}, {"backward_passes_per_step": 2}):
        pair = Pair(**options)
        pair.train(2)
        before = hvd.counters()
        buckets = before["plan_buckets"]
        pair.train(5, seed=1)
        after = hvd.counters()
        for name in ("operations", "negotiated_full", "negotiated_cached"):
            assert after[name] == before[name], (options, name, before, after)
        assert after["plan_buckets"] > buckets or hvd.size() == 1
        pair.check()


def check_buckets_are_exchanged_while_backward_runs() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    optimizer = wrapped(model, bucket_bytes=1)
    assert optimizer.overlap() == (0, 0)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
    overlapped, total = optimizer.overlap()
    # The first backward made the plan; the last bucket of each step may or may not be early.
    assert total == 20 * 12 * (256 * 256 + 256) * 4, total
    assert 0 < overlapped <= total, (overlapped, total)
    same_on_all_ranks(model)


def check_channels_last_parameters_and_gradients() -> None:
    def make_model() -> nn.Module:
        torch.manual_seed(4)
        layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    for options in ({}, {"fused": True}, {"foreach": True}):

        def make(params: object, options: dict[str, bool] = options) -> torch.optim.Optimizer:
            return torch.optim.Adam(params, lr=0.01, **options)

        pair = Pair(make, make_model=make_model)
        size, rank = hvd.size(), hvd.rank()
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(2 * size, 3, 8, 8, generator=generator)
            x = x.to(memory_format=torch.channels_last)
            own = x[2 * rank : 2 * rank + 2]
            for model, optimizer, part in (
                (pair.alone, pair.plain, x),
                (pair.shared, pair.distributed, own),
            ):
                optimizer.zero_grad()
                model(part).square().mean().backward()
                optimizer.step()
        pair.check()


def check_small_buckets_groups_and_predivision() -> None:
    model = build()
    lists = [list(model[0].parameters()), list(model[4].parameters())]
    assert len(lists) == 2
    for options in (
        {"bucket_bytes": 1},
        {"bucket_bytes": 300},
        {"num_groups": 2},
        {"groups": 3},
        {"gradient_predivide_factor": 4.0},
        {"flatten": False},
    ):
        pair = Pair(**options)
        pair.train()
        pair.check()


def check_groups_given_as_lists() -> None:
    alone, shared = build(), build()
    groups = [list(shared[0].parameters()), list(shared[4].parameters())]
    pair = Pair()
    pair.alone, pair.shared = alone, shared
    pair.plain, pair.distributed = sgd(alone.parameters()), wrapped(shared, groups=groups)
    pair.train()
    pair.check()


def check_sum_is_size_times_average() -> None:
    averaged = Pair(lambda p: torch.optim.SGD(p, lr=0.1))
    summed = Pair(lambda p: torch.optim.SGD(p, lr=0.1 / hvd.size()), op=hvd.Sum)
    averaged.train()
    for _, own in batches(5):
        plain_step(summed.shared, summed.distributed, own)
    summed.alone = averaged.alone
    summed.check()


def check_gradients_are_reduced_views_when_backward_returns() -> None:
    pair = Pair()
    for joined, own in batches(3):
        pair.plain.zero_grad()
        pair.distributed.zero_grad()
        assert all(p.grad is None for p in pair.shared.parameters())
        loss_of(pair.alone, joined).backward()
        loss_of(pair.shared, own).backward()
        for mine, theirs in zip(pair.shared.parameters(), pair.alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        storages = {p.grad.untyped_storage().data_ptr() for p in pair.shared.parameters()}
        assert len(storages) == 1
        pair.plain.step()
        pair.distributed.step()
    pair.check()


def check_zero_grad_in_place_keeps_the_views() -> None:
    def step(model: nn.Module, optimizer: object, batch: object) -> None:
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, batch).backward()
        optimizer.step()

    pair = Pair()
    pair.train(1, step)
    before = [p.grad for p in pair.shared.parameters()]
    pair.train(3, step, seed=1)
    assert all(p.grad is g for p, g in zip(pair.shared.parameters(), before, strict=True))
    pair.check()


def check_gradients_that_are_never_zeroed_add_up() -> None:
    def step(model: nn.Module, optimizer: object, batch: object) -> None:
        loss_of(model, batch).backward()
        optimizer.step()

    pair = Pair(lambda p: torch.optim.SGD(p, lr=0.01))
    pair.train(4, step)
    pair.check()


def check_model_zero_grad_is_enough() -> None:
    def step(model: nn.Module, optimizer: object, batch: object) -> None:
        model.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    pair = Pair()
    pair.train(4, step)
    pair.check()


def check_several_backwards_before_a_step() -> None:
    def step(model: nn.Module, optimizer: object, batch: object) -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        (model(batch[0]).square().mean() * 0.3).backward()
        model[0](batch[0]).square().mean().backward()  # reaches one layer alone
        optimizer.step()

    pair = Pair()
    pair.train(4, step)
    pair.check()


def check_second_backward_is_refused_where_it_is_not_exact() -> None:
    for options in ({"op": hvd.Sum}, {"compression": hvd.Compression.fp16}):
        model = build()
        optimizer = wrapped(model, **options)
        batch = next(batches(1))[1]
        loss_of(model, batch).backward()
        error = lambda: loss_of(model, batch).backward()  # noqa: E731
        raised(ValueError, error, "backward_passes_per_step")
        plain_step(model, optimizer, batch)
        same_on_all_ranks(model)


def check_accumulation_with_a_short_last_window() -> None:
    pair = Pair(backward_passes_per_step=3)
    data = list(batches(9))
    for window in ([0, 1, 2], [3, 4, 5], [6], [7, 8]):
        for model, optimizer in ((pair.alone, pair.plain), (pair.shared, pair.distributed)):
            is_shared = model is pair.shared
            optimizer.zero_grad()
            for i in window:
                loss_of(model, data[i][is_shared]).backward()
            if is_shared and len(window) < 3:
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    pair.check()


def check_a_short_window_is_reduced_by_step() -> None:
    pair = Pair(backward_passes_per_step=3)
    pair.train(4)  # one pass per step
    pair.check()
    pair.distributed.set_backward_passes_per_step(1)
    pair.train(3, seed=1)
    pair.check()


def check_clipping_and_skip_synchronize() -> None:
    def step(model: nn.Module, optimizer: object, batch: object) -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if hasattr(optimizer, "skip_synchronize"):
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    pair = Pair()
    pair.train(5, step)
    pair.check()


class Branches(nn.Module):
    """Uses one of its branches, or two, and never the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList(nn.Linear(FEATURES, 3) for _ in range(4))
        self.chosen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[self.chosen](x)


def check_parameters_without_gradient_on_some_or_all_ranks() -> None:
    alone, shared = Branches(), Branches()
    plain, distributed = sgd(alone.parameters()), wrapped(shared)
    for number, (joined, own) in enumerate(batches(5)):
        # Even ranks use branch 0, odd ones branch 1; from step 3 on all use branch 2.
        def branch(rank: int, number: int = number) -> int:
            return 2 if number >= 3 else rank % 2

        shared.chosen = branch(hvd.rank())
        plain_step(shared, distributed, own)
        plain.zero_grad()
        for rank in range(hvd.size()):
            alone.chosen = branch(rank)
            rows = slice(4 * rank, 4 * rank + 4)
            (loss_of(alone, (joined[0][rows], joined[1][rows])) / hvd.size()).backward()
        plain.step()
        for mine, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
        torch.testing.assert_close(list(shared.parameters()), list(alone.parameters()))
    same_on_all_ranks(shared)


def check_a_rank_without_any_gradient() -> None:
    pair = Pair(lambda p: torch.optim.SGD(p, lr=0.1))
    last = hvd.size() - 1
    for joined, own in batches(4):
        pair.plain.zero_grad()
        pair.distributed.zero_grad()
        rows = 4 * max(last, 1)
        scale = max(last, 1) / hvd.size()
        (loss_of(pair.alone, (joined[0][:rows], joined[1][:rows])) * scale).backward()
        if hvd.rank() < max(last, 1):
            loss_of(pair.shared, own).backward()
        pair.plain.step()
        pair.distributed.step()
    pair.check()


def check_closures() -> None:
    def step(model: nn.Module, optimizer: object, batch: object) -> None:
        batch = [part.double() for part in batch]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return hvd.allreduce(loss.detach(), name="loss") if optimizer is distributed else loss

        loss = optimizer.step(closure)
        assert torch.isfinite(torch.as_tensor(loss))

    for make in (
        sgd,
        lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4),
        lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
    ):
        # A line search magnifies what rounding differs by, so the comparison is in float64.
        pair = Pair(make, make_model=lambda: build().double())
        distributed = pair.distributed
        pair.train(3, step)
        pair.check()


def check_gradient_scaler() -> None:
    poisoned = {2}

    def make_step(scaler: torch.amp.GradScaler) -> object:
        count = iter(range(100))

        def step(model: nn.Module, optimizer: object, batch: object) -> None:
            number = next(count)
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(model, batch))
            if number in poisoned and (batch[0].shape[0] > 4 or hvd.rank() == 0):
                loss = loss * float("inf")  # on one rank alone
            loss.backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()

        return step

    for options in ({}, {"make": lambda p: torch.optim.Adam(p, lr=0.01, fused=True)}):
        pair = Pair(**options)
        scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
        steps = [make_step(scaler) for scaler in scalers]
        for joined, own in batches(5):
            steps[0](pair.alone, pair.plain, joined)
            steps[1](pair.shared, pair.distributed, own)
        assert scalers[1].get_scale() == 32.0
        pair.check()


class Checkpointed(nn.Module):
    """Recomputes nested parts in backward; `shared` is used inside and outside of them."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.inner = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.shared, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)
        self.reentrant = reentrant

    def _part(self, function: object, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        x = self._part(lambda x: torch.tanh(self.shared(self.first(x))), x)
        x = self._part(lambda x: self._part(lambda y: torch.tanh(self.inner(y)), self.shared(x)), x)
        return self._part(self.last, x)


def check_activation_checkpointing_of_both_kinds() -> None:
    # The outer of two reentrant checkpoints runs the inner one without gradients first.
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
    for reentrant in (True, False):
        pair = Pair(make_model=lambda reentrant=reentrant: Checkpointed(reentrant))
        pair.alone.reentrant = None
        pair.train(4)
        pair.check()


def check_compression() -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        pair = Pair(lambda p: torch.optim.SGD(p, lr=0.1), compression=compression)
        pair.train(4)
        pair.check(rtol=2e-2, atol=2e-2)


class Mixed(nn.Module):
    """Parameters of four dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        kinds = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
        self.layers = nn.ModuleList(nn.Linear(FEATURES, 3, dtype=kind) for kind in kinds * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x.to(layer.weight.dtype)).float() for layer in self.layers)


def check_several_dtypes() -> None:
    for options in ({}, {"compression": hvd.Compression.bf16}, {"num_groups": 3}):
        pair = Pair(lambda p: torch.optim.SGD(p, lr=0.05), make_model=Mixed, **options)
        pair.train(3)
        pair.check(rtol=3e-2, atol=3e-2)


def check_sparse_gradients() -> None:
    def table(sparse: bool) -> nn.Module:
        torch.manual_seed(2)
        return nn.Embedding(10, 3, sparse=sparse)

    alone, shared = table(False), table(True)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    options = {"make": lambda p: torch.optim.SGD(p, lr=0.1)}
    distributed = wrapped(shared, sparse_as_dense=True, **options)
    for number in range(3):
        rows = torch.arange(2 * hvd.size()) + number
        for model, optimizer, part in (
            (alone, plain, rows),
            (shared, distributed, rows[2 * hvd.rank() : 2 * hvd.rank() + 2]),
        ):
            optimizer.zero_grad()
            model(part).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(shared.weight, alone.weight)
    refusing = table(True)
    optimizer = wrapped(refusing, **options)
    loss = refusing(torch.tensor([1])).sum()
    raised(ValueError, loss.backward, "sparse_as_dense")
    del optimizer


def check_gradients_of_higher_order() -> None:
    def step(model: nn.Module, optimizer: object, batch: object) -> None:
        optimizer.zero_grad()
        x = batch[0].clone().requires_grad_()
        loss = nn.functional.mse_loss(model(x), batch[1])
        # The penalty is a mean over rows, as the loss is.
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (loss + slope.square().sum(1).mean()).backward()
        optimizer.step()

    pair = Pair()
    pair.train(4, step)
    pair.check()


def check_a_parameter_used_twice_and_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(6)
            self.one, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)
            self.two = nn.Linear(FEATURES, FEATURES)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.tanh(self.two(torch.tanh(self.one(self.one(x))))))

    pair = Pair(make_model=Tied)
    pair.train(4)
    pair.check()


def check_a_backward_that_raises_is_repaired_by_synchronize() -> None:
    pair = Pair()
    pair.train(2)
    handle = pair.shared[2].weight.register_hook(lambda grad: 1 / 0)
    joined, own = next(batches(1, seed=1))
    plain_step(pair.alone, pair.plain, joined)
    pair.distributed.zero_grad()
    raised(ZeroDivisionError, lambda: loss_of(pair.shared, own).backward(), "zero")
    handle.remove()
    pair.distributed.synchronize()  # the step that began ends, on all ranks
    pair.distributed.zero_grad()
    loss_of(pair.shared, own).backward()
    pair.distributed.step()
    pair.check()


if __name__ == "__main__":
    run_checks(globals())
