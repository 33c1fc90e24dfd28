"""DistributedOptimizer: a Keras optimizer whose gradients are reduced over all ranks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from bagua_ext import basics
from bagua_ext.exceptions import NotInitializedError
from bagua_ext.keras._accumulation import Accumulator
from bagua_ext.keras._arguments import (
    agreed,
    checked_groups,
    innermost,
    path_of,
    places_of,
    refuse_second_window,
    resolved,
    scales_by_policy,
)
from bagua_ext.keras._framework import load_framework
from bagua_ext.process_sets import ProcessSet, global_process_set, group_of, numbered
from bagua_ext.reduce_ops import NAMES, Average, ReduceOp
from bagua_ext.reductions import Reduction, checked_bucket_bytes, make_reduction

framework = load_framework()
Compression = framework.hvd.Compression

LossScaleOptimizer = keras.optimizers.LossScaleOptimizer
Variable = Any  # a Keras variable, or one of the framework
Gradient = Any  # a tensor of the framework, an IndexedSlices or None


@dataclass(frozen=True)
class _Arguments:
    """What a DistributedOptimizer was made with."""

    reduction: Reduction
    bucket_bytes: int
    groups: Sequence[Sequence[Any]] | int
    process_set: ProcessSet
    scale_local: bool
    config: dict[str, Any]


@keras.saving.register_keras_serializable(package="bagua_ext")
class DistributedOptimizer(keras.optimizers.Optimizer):
    """Wraps ``optimizer`` so that each step uses gradients reduced over all ranks of a set.

    ``apply`` and ``apply_gradients`` reduce what they are given and hand the result to the wrapped
    optimizer, which then clips, decays and steps as with one process and the joined batch. All
    ranks make the same calls. Everything else is the wrapped optimizer's: variables, iterations,
    learning rate and schedule, hyperparameters, and what ``save_weights`` keeps, which therefore
    loads with and without this wrapper.

    A saved model that was compiled with it is loaded with it again once ``bagua_ext.keras`` is
    imported. ``init`` is needed for steps only, not to load, evaluate or predict; a step without it
    is an error, since each process would train a model of its own.

    The result is a LossScaleOptimizer as well if ``optimizer`` is one, or if Keras' global dtype
    policy is mixed_float16, where one is put in between. Gradients are reduced before they are
    checked for overflow, so that all ranks skip the same steps and keep the same scale.

    With ``backward_passes_per_step`` n the gradients of n calls add up on each rank, sparse ones as
    dense; every n-th call reduces and steps. ``iterations`` counts all calls, for schedules too.
    The sums are not saved: a window that is open when the model is saved begins anew.

    Args:
        optimizer: the optimizer that makes the step, or its name.
        name: of this object; default: "Distributed" and the optimizer's class.
        device_dense: accepted for Horovod's sake, without effect.
        device_sparse: accepted for Horovod's sake, without effect.
        compression: format of float32 gradients on their way: Compression.none, fp16 or bf16.
        sparse_as_dense: make sparse gradients dense before they are reduced.
        gradient_predivide_factor: f divides before the sum and multiplies after; Average only.
        op: Average or Sum.
        backward_passes_per_step: calls whose gradients add up before they are reduced.
        average_aggregated_gradients: divide the sum of these calls by their number.
        num_groups: as ``groups`` with a number.
        groups: lists of variables that share a bucket, or the number of buckets; 0: by size.
        process_set: the ranks to reduce over, of which this one must be.
        scale_local_gradients: divide gradients of ``register_local_var`` by the number of ranks.
        algorithm: None (reduces gradients by ``op``); nothing else is there yet.
        bucket_bytes: largest bucket in bytes; None: BAGUA_BUCKET_BYTES or 10 MiB.

    Raises:
        ValueError: an argument is wrong or not supported yet.
    """

    def __new__(
        cls, optimizer: Any = None, *arguments: Any, **options: Any
    ) -> DistributedOptimizer:
        """Makes the kind that is a LossScaleOptimizer where one is wanted."""
        scales = isinstance(optimizer, LossScaleOptimizer) or scales_by_policy()
        if cls is DistributedOptimizer and scales:
            cls = DistributedLossScaleOptimizer
        return super().__new__(cls)

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer | str,
        name: str | None = None,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        op: ReduceOp = Average,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
        num_groups: int = 0,
        groups: Sequence[Sequence[Variable]] | int | None = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        *,
        algorithm: Any = None,
        bucket_bytes: int | None = None,
    ) -> None:
        if algorithm is not None:
            raise ValueError(f"algorithm={algorithm!r} is not there yet; None (an average) is")
        optimizer = _checked_optimizer(optimizer)
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"process_set={process_set!r}: expected a ProcessSet")
        if isinstance(self, LossScaleOptimizer) and not isinstance(optimizer, LossScaleOptimizer):
            optimizer = LossScaleOptimizer(optimizer)
        reduction = make_reduction(op, gradient_predivide_factor, compression)
        if backward_passes_per_step > 1:
            refuse_second_window(innermost(optimizer))
        # The base class's constructor would give this object variables of its own. What Keras needs
        # of it is the sign that attributes may be set.
        self._lock = False
        self._wrapped = optimizer
        self._arguments = _Arguments(
            reduction=reduction,
            bucket_bytes=checked_bucket_bytes(bucket_bytes),
            groups=checked_groups(num_groups, groups),
            process_set=process_set,
            scale_local=scale_local_gradients,
            config={
                "name": name or f"Distributed{type(innermost(optimizer)).__name__}",
                "device_dense": device_dense,
                "device_sparse": device_sparse,
                "compression": reduction.codec,
                "sparse_as_dense": sparse_as_dense,
                "gradient_predivide_factor": gradient_predivide_factor,
                "op": NAMES[reduction.op],
                "backward_passes_per_step": backward_passes_per_step,
                "average_aggregated_gradients": average_aggregated_gradients,
                "scale_local_gradients": scale_local_gradients,
                "bucket_bytes": bucket_bytes,
            },
        )
        self._local: set[Any] = set()
        self._local_places: Sequence[int] = ()  # of a loaded optimizer, until it is built
        self._reducer: Any = None
        self._accumulator = Accumulator(
            backward_passes_per_step, average_aggregated_gradients, optimizer._var_key
        )
        if optimizer.built:
            self._accumulator.build(optimizer._trainable_variables)

    # ---- A step -------------------------------------------------------------------------------

    @framework.keep_out
    def apply(
        self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None
    ) -> None:
        """Reduces ``grads`` over all ranks and makes the wrapped optimizer's step with them.

        Raises:
            NotInitializedError: ``init`` was not called.
            MismatchError: on every rank, if the ranks' variables differ.
            ValueError: this rank is not in the optimizer's process set.
        """
        grads = list(grads)
        if not grads or (trainable_variables is None and not self.built):
            self._wrapped.apply(grads, trainable_variables)
            return
        _require_init()
        known = self._wrapped._trainable_variables
        variables = list(known if trainable_variables is None else trainable_variables)
        if not self.built:
            self.build(variables)
        if self._accumulator.passes == 1:
            self._wrapped.apply(self._reduced(grads, variables), variables)
        else:
            self._accumulator.add(grads, variables, self._step, self._skip)

    @framework.keep_out
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Gradient, Variable]]) -> Variable:
        """As ``apply``, with pairs. Returns ``iterations``."""
        pairs = list(grads_and_vars)
        self.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
        return self.iterations

    def register_local_var(self, var: Variable) -> None:
        """Keeps the gradient of ``var`` out of the reduction: the variable is this rank's own.

        Raises:
            ValueError: the wrapped optimizer decides by all gradients together, so that the ranks'
                own ones would drive the shared variables apart.
        """
        scales = isinstance(self._wrapped, LossScaleOptimizer)
        if scales or innermost(self._wrapped).global_clipnorm is not None:
            raise ValueError(
                f"variable '{path_of(var)}' cannot be this rank's own: "
                f"{'loss scaling' if scales else 'global_clipnorm'} makes what happens to the "
                "shared variables depend on it"
            )
        self._local.add(self._wrapped._var_key(var))

    def _step(self, grads: list[Gradient], variables: list[Variable]) -> None:
        self._wrapped.apply(self._reduced(grads, variables), variables)

    def _skip(self) -> None:
        innermost(self._wrapped)._iterations.assign_add(1)

    def _reduced(self, grads: list[Gradient], variables: list[Variable]) -> list[Gradient]:
        if not self._local:
            return self._agreed_reducer().reduce(grads, variables)
        own = [self._wrapped._var_key(variable) in self._local for variable in variables]
        shared = [i for i, is_own in enumerate(own) if not is_own]
        factor = 1.0 / self._process_set().size() if self._arguments.scale_local else 1.0
        results = [g if g is None else framework.scaled(g, factor) for g in grads]
        if shared:
            given, chosen = [grads[i] for i in shared], [variables[i] for i in shared]
            reduced = self._agreed_reducer().reduce(given, chosen)
            for i, result in zip(shared, reduced, strict=True):
                results[i] = result
        return results

    def _process_set(self) -> ProcessSet:
        """The set of these ranks that was added, which a loaded optimizer does not hold."""
        process_set = copy.copy(self._arguments.process_set)
        group_of(process_set)
        return process_set

    def _agreed_reducer(self) -> Any:
        """The reducer, which the first step makes on all ranks: a rank may make or load others."""
        if self._reducer is None:
            process_set = self._process_set()
            self._reducer = framework.make_reducer(
                name=numbered("keras.DistributedOptimizer", process_set),
                reduction=self._arguments.reduction,
                bucket_bytes=self._arguments.bucket_bytes,
                sparse_as_dense=self._arguments.config["sparse_as_dense"],
                process_set=process_set,
                agreed=agreed(self._arguments.config),
                groups=resolved(self._arguments.groups, self._wrapped._trainable_variables),
            )
        return self._reducer

    # ---- The wrapped optimizer's --------------------------------------------------------------

    @property
    def wrapped(self) -> keras.optimizers.Optimizer:
        """The optimizer that makes the step."""
        return self._wrapped

    @property
    def name(self) -> str:
        """This object's name; the variables' names begin with the wrapped optimizer's."""
        return self._arguments.config["name"]

    @property
    def variables(self) -> list[Variable]:
        """The wrapped optimizer's variables."""
        return self._wrapped.variables

    @property
    def iterations(self) -> Variable:
        """The wrapped optimizer's count of calls."""
        return self._wrapped.iterations

    @property
    def learning_rate(self) -> Any:
        """The wrapped optimizer's learning rate, at this iteration if it has a schedule."""
        return self._wrapped.learning_rate

    def __getattr__(self, name: str) -> Any:
        # TensorFlow keeps its notes about this object in attributes that begin with _self_.
        if name == "_wrapped" or name.startswith(("__", "_self_")):
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor":
            _refuse_outer_loss_scale()
        if name == "_wrapped":
            super().__setattr__(name, value)  # TensorFlow's checkpoints follow it
        elif name.startswith("_") or not hasattr(self._wrapped, name):
            object.__setattr__(self, name, value)  # Keras would wrap lists and dicts
        else:
            setattr(self._wrapped, name, value)

    def __dir__(self) -> list[str]:
        # Keras saves what is listed here; the wrapped optimizer's state is saved as this object's.
        return [name for name in super().__dir__() if name not in ("_wrapped", "wrapped")]

    def build(self, variables: Sequence[Variable]) -> None:
        """Makes the variables that a step needs."""
        variables = list(variables)
        self._wrapped.build(variables)
        self._accumulator.build(variables)
        for place in self._local_places:
            self.register_local_var(variables[place])

    def stateless_apply(
        self, optimizer_variables: list[Any], grads: list[Gradient], trainable_variables: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """As ``apply``, returning the new values instead of assigning them."""
        arguments = (optimizer_variables, grads, trainable_variables)
        return keras.optimizers.Optimizer.stateless_apply(self, *arguments)

    def scale_loss(self, loss: Any) -> Any:
        """Returns ``loss`` as the wrapped optimizer wants it to be differentiated."""
        return self._wrapped.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Variable]) -> None:
        """Overwrites the model's variables with their averages if the optimizer keeps any."""
        self._wrapped.finalize_variable_values(var_list)

    def exclude_from_weight_decay(
        self, var_list: list[Variable] | None = None, var_names: list[str] | None = None
    ) -> None:
        """Names variables that do not decay; before ``build``."""
        self._wrapped.exclude_from_weight_decay(var_list, var_names)

    def assign(self, variable: Variable, value: Any) -> None:
        """Sets ``variable`` as the wrapped optimizer does."""
        self._wrapped.assign(variable, value)

    def assign_add(self, variable: Variable, value: Any) -> None:
        """Adds to ``variable`` as the wrapped optimizer does."""
        self._wrapped.assign_add(variable, value)

    def assign_sub(self, variable: Variable, value: Any) -> None:
        """Subtracts from ``variable`` as the wrapped optimizer does."""
        self._wrapped.assign_sub(variable, value)

    def update_step(self, gradient: Any, variable: Variable, learning_rate: Any) -> None:
        """Makes the wrapped optimizer's step for one variable; nothing is reduced."""
        self._wrapped.update_step(gradient, variable, learning_rate)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets the values of ``variables``."""
        self._wrapped.set_weights(weights)

    def save_own_variables(self, store: Any) -> None:
        """Saves the wrapped optimizer's variables."""
        self._wrapped.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Loads the wrapped optimizer's variables."""
        self._wrapped.load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        """Returns what ``from_config`` needs; variables are kept by place if built."""
        groups = self._arguments.groups
        if not isinstance(groups, int):
            groups = places_of(groups, self._wrapped._trainable_variables if self.built else [])
        process_set = self._arguments.process_set
        known = self._wrapped._trainable_variables if self.built else []
        local = [i for i, v in enumerate(known) if self._wrapped._var_key(v) in self._local]
        return {
            **self._arguments.config,
            "groups": groups,
            "local_variables": local or list(self._local_places),
            "process_set": None if process_set is global_process_set else process_set.ranks,
            "optimizer": keras.saving.serialize_keras_object(self._wrapped),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> DistributedOptimizer:
        """Returns the optimizer that ``get_config`` described; needs no ``init``."""
        options = dict(config)
        wrapped = keras.saving.deserialize_keras_object(options.pop("optimizer"), custom_objects)
        options["compression"] = getattr(Compression, options["compression"])
        options["op"] = {text: number for number, text in NAMES.items()}[options["op"]]
        ranks = options["process_set"]
        options["process_set"] = global_process_set if ranks is None else ProcessSet(ranks)
        local = options.pop("local_variables", ())
        optimizer = cls(wrapped, **options)
        optimizer._local_places = local
        return optimizer


@keras.saving.register_keras_serializable(package="bagua_ext")
class DistributedLossScaleOptimizer(DistributedOptimizer, LossScaleOptimizer):
    """A DistributedOptimizer around a LossScaleOptimizer. Keras takes it for one, as it is."""

    def load_own_variables(self, store: Any) -> None:
        """Loads the variables; the scale stays as it is if the optimizer was saved without one."""
        inner = self._wrapped.inner_optimizer
        saved_without = len(store.keys()) == len(inner.variables)
        (inner if saved_without else self._wrapped).load_own_variables(store)


def PartialDistributedOptimizer(  # noqa: N802
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Sequence[Sequence[Variable]] | int | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Sequence[Any] | Any | None = None,
    scale_local_gradients: bool = True,
) -> DistributedOptimizer:
    """Returns a DistributedOptimizer that leaves the variables of ``local_layers`` to each rank.

    ``local_layers`` is one layer or several, all built.
    """
    distributed = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    layers = [] if local_layers is None else local_layers
    for layer in [layers] if isinstance(layers, keras.layers.Layer) else layers:
        if not layer.built:
            raise ValueError(f"layer '{layer.name}' of local_layers has no variables yet: build it")
        for variable in layer.trainable_variables:
            distributed.register_local_var(variable)
    return distributed


# ---- Arguments ----------------------------------------------------------------------------------


def _checked_optimizer(optimizer: Any) -> keras.optimizers.Optimizer:
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"optimizer must be a Keras optimizer or its name, got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, DistributedOptimizer):
        raise ValueError(f"optimizer '{optimizer.name}' is a DistributedOptimizer already")
    return optimizer


# ---- Errors -------------------------------------------------------------------------------------


def _require_init() -> None:
    if not basics.is_initialized():
        raise NotInitializedError(
            "DistributedOptimizer has to reduce gradients, and init() was not called. Call "
            "bagua_ext.keras.init() before training; without a launcher it makes this process rank "
            "0 of 1. To train this process's model alone, compile it with optimizer.wrapped."
        )


def _refuse_outer_loss_scale() -> None:
    """Raises ValueError if LossScaleOptimizer's constructor is running.

    It sets ``loss_scale_factor`` of what it wraps, and tells it nothing else.
    """
    constructor, frame = LossScaleOptimizer.__init__.__code__, sys._getframe(1)
    while frame is not None and frame.f_code is not constructor:
        frame = frame.f_back
    if frame is not None:
        raise ValueError(
            "LossScaleOptimizer around a DistributedOptimizer would let each rank decide by its "
            "own gradients whether to take part in a step. Wrap it the other way round: "
            "DistributedOptimizer(LossScaleOptimizer(optimizer)). If model.compile did it, either "
            "do that yourself or set the dtype policy (keras.config.set_dtype_policy) before "
            "DistributedOptimizer is called, which then does."
        )
