"""DistributedOptimizer as a torch Optimizer, over changes of its parameters and of the engine."""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from driver import raised, run_checks
from torch import nn
from training import (
    Pair,
    adam,
    batches,
    build,
    loss_of,
    plain_step,
    same,
    same_on_all_ranks,
    sgd,
    wrapped,
)

import bagua_ext.torch as hvd


def check_it_is_an_optimizer() -> None:
    model = build()
    inner = adam(model.parameters())
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert type(optimizer) is hvd.DistributedOptimizer
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert "Adam" in repr(optimizer)


def check_learning_rate_schedulers() -> None:
    makers = (
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
    )
    for make in makers:
        pair = Pair()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # e.g. a scheduler stepped before the optimizer
            schedulers = [make(pair.plain), make(pair.distributed)]
            for joined, own in batches(5):
                plain_step(pair.alone, pair.plain, joined)
                plain_step(pair.shared, pair.distributed, own)
                for scheduler in schedulers:
                    scheduler.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
        pair.check()


def check_state_dict_goes_in_and_out() -> None:
    pair = Pair(adam)
    pair.train(3)
    state = copy.deepcopy(pair.distributed.state_dict())
    weights = copy.deepcopy(pair.shared.state_dict())
    pair.train(2, seed=1)
    other = build()
    other.load_state_dict(weights)
    optimizer = wrapped(other, adam)
    optimizer.load_state_dict(state)
    for _, own in batches(2, seed=1):
        plain_step(other, optimizer, own)
    same(other, pair.shared, rtol=0, atol=0)


def check_pickle_save_and_deepcopy() -> None:
    def through_file(pair: object) -> object:
        file = io.BytesIO()
        torch.save(pair, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    ways = (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)), through_file)
    for way in ways:
        pair = Pair()
        pair.train(2)
        model, optimizer = way((pair.shared, pair.distributed))
        assert isinstance(optimizer, hvd.DistributedOptimizer)
        assert optimizer.param_groups[0]["params"][0] is model[0].weight
        for joined, own in batches(3, seed=1):
            plain_step(pair.alone, pair.plain, joined)
            plain_step(model, optimizer, own)
        pair.shared = model
        pair.check()


def check_step_hooks_of_the_wrapped_optimizer() -> None:
    model = build()
    optimizer = wrapped(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    plain_step(model, optimizer, next(batches(1))[1])
    assert calls == ["before", "after"]


def check_frozen_half_and_toggled_parameters() -> None:
    pair = Pair()

    def freeze(frozen: bool) -> None:
        for model in (pair.alone, pair.shared):
            for parameter in model[0].parameters():
                parameter.requires_grad_(not frozen)
                parameter.grad = None

    freeze(True)
    pair.distributed = wrapped(pair.shared)
    pair.train(3)
    pair.check()
    freeze(False)
    pair.train(3, seed=1)
    pair.check()
    freeze(True)
    pair.train(3, seed=2)
    pair.check()


def check_add_param_group() -> None:
    alone, shared = build(), build()
    plain, distributed = sgd(alone[0].parameters()), None
    distributed = hvd.DistributedOptimizer(sgd(shared[0].parameters()))
    pair = Pair()
    pair.alone, pair.shared, pair.plain, pair.distributed = alone, shared, plain, distributed
    pair.train(2)
    for optimizer, model in ((plain, alone), (distributed, shared)):
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
    pair.train(3, seed=1)
    for optimizer, model in ((plain, alone), (distributed, shared)):
        optimizer.add_param_group({"params": list(model[4].parameters())})
    pair.train(3, seed=2)
    pair.check()


def check_two_optimizers_of_one_model() -> None:
    def train(model: nn.Module, optimizers: list[object], batch: object) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()

    alone, shared = build(), build()
    plain = [sgd(alone[0].parameters()), adam(alone[2].parameters())]
    distributed = [
        hvd.DistributedOptimizer(sgd(shared[0].parameters())),
        hvd.DistributedOptimizer(adam(shared[2].parameters())),
    ]
    for joined, own in batches(4):
        train(alone, plain, joined)
        train(shared, distributed, own)
    same(shared, alone)


def check_a_dropped_optimizer_leaves_the_model_alone() -> None:
    model = build()
    optimizer = wrapped(model)
    batch = next(batches(1))[1]
    plain_step(model, optimizer, batch)
    kept = model[0].weight.grad
    values = kept.clone()
    del optimizer
    model.zero_grad()
    loss_of(model, batch).backward()  # no rank waits for another
    assert torch.equal(kept, values)


def check_wrapping_again_takes_over() -> None:
    pair = Pair()
    pair.train(2)
    old = pair.distributed  # kept, as a scheduler would keep it
    pair.distributed = hvd.DistributedOptimizer(old._optimizer, pair.shared.named_parameters())
    pair.train(3, seed=1)
    pair.check()
    assert old.overlap() == (0, 0)


def check_wrong_arguments() -> None:
    model = build()
    named = list(model.named_parameters())

    def make(*args: object, **options: object) -> object:
        return lambda: hvd.DistributedOptimizer(sgd(model.parameters()), *args, **options)

    raised(ValueError, make([p for _, p in named]), "named_parameters")
    raised(ValueError, make([*named, named[0]]), "unique", named[0][0])
    raised(ValueError, make(named[1:]), "not named")
    raised(ValueError, make(named, op=hvd.Max), "Average")
    raised(ValueError, make(named, op=hvd.Adasum), "not there yet")
    raised(ValueError, make(named, op=hvd.Sum, gradient_predivide_factor=2.0), "predivide")
    raised(ValueError, make(named, algorithm="bytegrad"), "bytegrad")
    raised(ValueError, make(named, backward_passes_per_step=0), "0")
    raised(ValueError, make(named, num_groups=-1), "-1")
    raised(ValueError, make(named, groups=[1, 2]), "lists")
    raised(ValueError, make(named, bucket_bytes=0), "bucket_bytes")
    raised(ValueError, make(named, process_set=3), "process_set")


def check_broadcast_of_parameters_and_buffers() -> None:
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).double())
    model[1].num_batches_tracked += hvd.rank()
    model[1].running_mean += hvd.rank()
    root = hvd.size() - 1
    hvd.broadcast_parameters(model.state_dict(), root)
    assert int(model[1].num_batches_tracked) == root
    for tensor in model.state_dict().values():
        gathered = hvd.allgather(tensor[None])
        assert all(torch.equal(row, tensor) for row in gathered)
    with torch.no_grad():
        model[0].weight += hvd.rank()
    hvd.broadcast_parameters(model.named_parameters(), 0)
    same_on_all_ranks(model[:1])
    raised(ValueError, lambda: hvd.broadcast_parameters([torch.ones(1)], 0), "state_dict")
    if hvd.size() > 1:
        wrong = {"a": torch.ones(2), "b": torch.ones(3 if hvd.rank() == 1 else 4)}
        error = lambda: hvd.broadcast_parameters(wrong, 0)  # noqa: E731
        raised(hvd.MismatchError, error, "'b'", "rank 1", "float32[3]", "float32[4]")


def check_broadcast_of_optimizer_state() -> None:
    for make in (sgd, adam, lambda p: torch.optim.LBFGS(p, max_iter=2)):
        model = build()
        optimizer = make(model.parameters())
        if hvd.rank() == 0:
            optimizer.param_groups[0]["lr"] = 0.123
            for joined, _ in batches(2):

                def closure(joined: object = joined) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(model, joined)
                    loss.backward()
                    return loss

                optimizer.step(closure)
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.param_groups[0]["lr"] == 0.123
        wrapper = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_optimizer_state(wrapper, 0, model)
        for _ in range(2):

            def shared_closure() -> torch.Tensor:
                wrapper.zero_grad()
                loss = loss_of(model, next(batches(1))[1])
                loss.backward()
                return hvd.allreduce(loss.detach())

            wrapper.step(shared_closure)
        same_on_all_ranks(model)


def check_training_goes_on_after_shutdown_and_init() -> None:
    pair = Pair()
    pair.train(2)
    views = [p.grad for p in pair.shared.parameters()]
    values = [view.clone() for view in views]
    hvd.shutdown()
    assert all(torch.equal(view, value) for view, value in zip(views, values, strict=True))
    raised(hvd.NotInitializedError, lambda: wrapped(build()), "init")
    hvd.init()
    pair.train(3, seed=1)
    pair.check()


def check_a_forked_child_knows_its_place_and_leaves_the_job_alone() -> None:
    pair = Pair()
    pair.train(2)
    place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.is_homogeneous())
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        with failing_the_process():
            assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.is_homogeneous()) == place
            assert not hvd.is_initialized()
            raised(hvd.NotInitializedError, hvd.barrier, "forked", f"rank {hvd.rank()}")
            gather = lambda: hvd.allgather(torch.ones(2))  # noqa: E731
            raised(hvd.NotInitializedError, gather, "forked")
            loss = loss_of(pair.shared, next(batches(1))[1])
            raised(hvd.NotInitializedError, loss.backward, "forked")
            hvd.shutdown()
            del pair
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pair.train(2, seed=1)
    pair.check()


def check_data_loaders_with_forked_workers() -> None:
    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index, hvd.rank(), hvd.size()])

    options = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "fork"}
    for _ in range(2):
        loader = torch.utils.data.DataLoader(Rows(), **options)
        for batch in loader:
            assert batch[:, 1].eq(hvd.rank()).all() and batch[:, 2].eq(hvd.size()).all()
            total = hvd.allreduce(batch[:, 0], name="rows", op=hvd.Sum)
            assert torch.equal(total, batch[:, 0] * hvd.size())


@contextmanager
def failing_the_process() -> Iterator[None]:
    """Ends this process with 0, or with 1 and the error if there is one."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    os._exit(0)


def check_ranks_with_different_models_are_told_so() -> None:
    if hvd.size() == 1:
        return
    width = 5 if hvd.rank() == 1 else 4
    model = nn.Linear(3, width)
    optimizer = wrapped(model)
    loss = model(torch.ones(2, 3)).sum()
    raised(hvd.MismatchError, loss.backward, "weight")
    del optimizer
    pair = Pair()
    pair.train(2)
    pair.check()


if __name__ == "__main__":
    run_checks(globals())
