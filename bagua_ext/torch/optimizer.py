"""DistributedOptimizer: a torch optimizer whose gradients are reduced over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from bagua_ext import basics
from bagua_ext.process_sets import ProcessSet, global_process_set, group_of, numbered
from bagua_ext.reduce_ops import Average, ReduceOp
from bagua_ext.reductions import checked_bucket_bytes, make_reduction
from bagua_ext.torch._compile import keep_out
from bagua_ext.torch._reducer import Reducer, Settings
from bagua_ext.torch.compression import Compression, Compressor

Parameter = torch.Tensor


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps ``optimizer`` so that each step uses gradients reduced over all ranks of a set.

    When ``backward`` of a step's last pass returns, ``grad`` of every parameter that some rank used
    holds the reduced gradient, as with one process and the joined batch; parameters that no rank
    used keep None. All ranks make the same number of backwards, or none, per step; ``step`` and
    ``synchronize`` complete what a rank did not contribute with zeros. Gradients are views of
    buckets that the ranks of a host share, unless ``flatten`` is False.

    Everything else, such as ``param_groups``, ``state`` and hooks, is the wrapped optimizer's.

    Args:
        optimizer: the optimizer that makes the step.
        named_parameters: (name, parameter) pairs for messages, e.g. ``model.named_parameters()``.
        compression: format of float32 gradients on their way: Compression.none, fp16 or bf16.
        backward_passes_per_step: backwards whose gradients add up before they are reduced.
        op: Average or Sum.
        gradient_predivide_factor: f divides before the sum and multiplies after; Average only.
        num_groups: number of buckets to share the parameters out to; 0: by size.
        groups: lists of parameters that share a bucket, or a number as ``num_groups``.
        sparse_as_dense: make sparse gradients dense; otherwise they are an error.
        process_set: the ranks to reduce over, of which this one must be.
        algorithm: None (reduces gradients by ``op``); nothing else is there yet.
        bucket_bytes: largest bucket in bytes; None: BAGUA_BUCKET_BYTES or 10 MiB.
        flatten: let gradients be views of the buckets.

    Raises:
        NotInitializedError: before ``init``.
        ValueError: an argument is wrong or not supported yet, or this rank is not in
            ``process_set``.
    """

    # Loss scalers then unscale the gradients themselves, which are the same on all ranks.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]] | None = None,
        compression: type[Compressor] = Compression.none,
        backward_passes_per_step: int = 1,
        op: ReduceOp = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Sequence[Sequence[Parameter]] | int | None = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
        *,
        algorithm: Any = None,
        bucket_bytes: int | None = None,
        flatten: bool = True,
    ) -> None:
        # The base class's constructor would give this object parameter groups of its own.
        basics.size()
        group_of(process_set)
        if algorithm is not None:
            raise ValueError(
                f"algorithm={algorithm!r} is not there yet; None (gradients are averaged) is"
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"optimizer must be a torch Optimizer, got {type(optimizer).__name__}")
        _check_passes(backward_passes_per_step)
        self._optimizer = optimizer
        self._arguments = {
            "names": _named(optimizer, named_parameters),
            "group_of": _grouped(optimizer, num_groups, groups),
            "passes": backward_passes_per_step,
            "settings": Settings(
                name=numbered("DistributedOptimizer", process_set),
                reduction=make_reduction(op, gradient_predivide_factor, compression),
                bucket_bytes=checked_bucket_bytes(bucket_bytes),
                flatten=flatten,
                sparse_as_dense=sparse_as_dense,
                process_set=process_set,
            ),
        }
        self._start()

    def _start(self) -> None:
        names: list[tuple[str, Parameter]] = self._arguments["names"]
        group_of: list[tuple[int, Parameter]] = self._arguments["group_of"]
        groups = {id(parameter): group for group, parameter in group_of}
        optimizer = self._optimizer
        self._skip = False
        self._reducer = Reducer(
            parameters=lambda: _trainable(optimizer),
            name_of=_namer(optimizer, names),
            group_of=lambda parameter: groups.get(id(parameter)),
            settings=self._arguments["settings"],
            passes=self._arguments["passes"],
        )

    def _lay_out_by_name(self, plan_name: str) -> None:
        """Gives the gradients an order that ranks of other frameworks have too; before a step."""
        settings = self._arguments["settings"]
        self._arguments["settings"] = replace(settings, name=plan_name, by_name=True)
        self._start()

    # ---- A step -------------------------------------------------------------------------------

    @keep_out
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes the wrapped optimizer's step; reduces first what ``backward`` has not.

        A ``closure`` is called as often as the wrapped optimizer wants, with reduced gradients when
        it returns. An optimizer that decides by the closure's loss needs the same one on all ranks:
        return ``allreduce(loss)``.
        """
        reducer = self._reducer
        if closure is None:
            if not self._skip:
                reducer.synchronize()
            result = self._optimizer.step()
        else:
            if reducer.accumulating:
                reducer.synchronize()
            result = self._optimizer.step(self._reducing(closure))
        reducer.forget()
        return result

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            self._reducer.forget()
            with torch.enable_grad():
                loss = closure()
            self._reducer.synchronize()
            return loss

        return reduced

    @keep_out
    def synchronize(self) -> None:
        """Reduces the gradients of a window of backwards that is not complete; else does nothing.

        Call it before clipping when the last window of an epoch is short.
        """
        self._reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it ``step`` does not reduce: for scripts that called ``synchronize`` before."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backwards add up before the gradients are reduced."""
        _check_passes(passes)
        self._arguments["passes"] = self._reducer.passes = passes

    @keep_out
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, or sets them to zero in place."""
        self._optimizer.zero_grad(set_to_none)
        self._reducer.forget()

    def overlap(self) -> tuple[int, int]:
        """Bytes exchanged while backward still ran, and all bytes, since the plan was made."""
        return self._reducer.overlap()

    # ---- The wrapped optimizer's --------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self._optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self._optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self._optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state_dict: a checkpoint loads with and without this wrapper."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict of the wrapped optimizer's kind, on every rank alike."""
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters; all ranks do so before the same step, which registers a new plan."""
        self._optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer, "arguments": self._arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._optimizer = state["optimizer"]
        self._arguments = state["arguments"]
        self._start()


# ---- Arguments ----------------------------------------------------------------------------------


def _all_parameters(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _trainable(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _namer(
    optimizer: torch.optim.Optimizer, names: list[tuple[str, Parameter]]
) -> Callable[[Parameter], str]:
    """Returns the names of ``names``; parameters added later are named by their place."""
    known = {id(parameter): name for name, parameter in names}

    def name_of(parameter: Parameter) -> str:
        if id(parameter) in known:
            return known[id(parameter)]
        for i, group in enumerate(optimizer.param_groups):
            for j, other in enumerate(group["params"]):
                if other is parameter:
                    return f"parameter.{i}.{j}"
        return "parameter"

    return name_of


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Parameter]] | None
) -> list[tuple[str, Parameter]]:
    """Returns (name, parameter) for all parameters of ``optimizer``."""
    if named_parameters is None:
        return [
            (f"parameter.{i}.{j}", parameter)
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        ]
    named = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    names = [name for name, _ in named]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            + ", ".join(duplicates)
        )
    known = {id(parameter) for _, parameter in named}
    unnamed = [tuple(p.shape) for p in _all_parameters(optimizer) if id(p) not in known]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{len(unnamed)} of the optimizer's, with shapes {unnamed[:5]}."
        )
    return named


def _grouped(
    optimizer: torch.optim.Optimizer,
    num_groups: int,
    groups: Sequence[Sequence[Parameter]] | int | None,
) -> list[tuple[int, Parameter]]:
    """Returns (group, parameter) for the parameters that the user grouped."""
    if isinstance(groups, int):
        num_groups, groups = groups, None
    if num_groups < 0:
        raise ValueError(f"num_groups is {num_groups}, expected 0 or more")
    if groups is None:
        parameters = _all_parameters(optimizer)
        total = len(parameters)
        count = min(num_groups, total)
        return [(i * count // total, p) for i, p in enumerate(parameters)] if count else []
    if not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError("groups should be a list of lists of parameters, or a whole number")
    pairs = [(i, parameter) for i, group in enumerate(groups) for parameter in group]
    if not all(isinstance(parameter, torch.Tensor) for _, parameter in pairs):
        raise ValueError("groups should hold parameters of the model")
    if len({id(parameter) for _, parameter in pairs}) != len(pairs):
        raise ValueError("a parameter occurs in groups more than once")
    return pairs


def _check_passes(passes: int) -> None:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step is {passes}, expected 1 or more")
