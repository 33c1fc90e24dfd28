"""Callbacks for ``model.fit``. Give them to every rank, in the same order."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from numbers import Number
from pathlib import Path
from typing import Any

import keras

from bagua_ext import basics, objects
from bagua_ext.exceptions import MismatchError
from bagua_ext.keras._arguments import innermost
from bagua_ext.keras.functions import broadcast_model
from bagua_ext.keras.optimizer import DistributedOptimizer

Logs = dict[str, Any]


class _WithoutXla(keras.callbacks.Callback):
    """Turns XLA off where Keras' ``jit_compile="auto"`` would have chosen it.

    XLA cannot hold collectives. Where Keras would not have chosen it, it was asked for, and the
    first step says that it cannot be.
    """

    def set_model(self, model: keras.Model) -> None:
        """Remembers the model; may set its ``jit_compile`` to False, with a warning."""
        super().set_model(model)
        distributed = isinstance(getattr(model, "optimizer", None), DistributedOptimizer)
        chooses = getattr(model, "_resolve_auto_jit_compile", lambda: True)
        if distributed and model.jit_compile and chooses():
            warnings.warn(
                "XLA cannot compile DistributedOptimizer's collectives: training without it. Pass "
                "jit_compile=False to model.compile to avoid this warning.",
                stacklevel=2,
            )
            model.jit_compile = False


class BroadcastGlobalVariablesCallback(_WithoutXla):
    """Gives all ranks rank ``root_rank``'s weights and optimizer state, once.

    That happens before the first batch if all ranks' models are built by then, else after it.
    Random seeds stay each rank's own. ``device`` is accepted for Horovod's sake, without effect.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Broadcasts if all ranks can."""
        self._try()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Broadcasts after an epoch of one batch."""
        self._try()

    def _try(self) -> None:
        if self.broadcast_done:
            return
        model = self.model
        ready = model.built and all(layer.built for layer in model._flatten_layers())
        if not all(objects.allgather_object(ready, "BroadcastGlobalVariablesCallback.ready")):
            return
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        broadcast_model(model, self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(_WithoutXla):
    """Replaces the metrics of an epoch by their averages over all ranks.

    Callbacks that come later in the list see the averages; so list this one before
    ReduceLROnPlateau, EarlyStopping, TensorBoard and checkpoints. ``device`` is accepted for
    Horovod's sake, without effect.

    Raises:
        MismatchError: on every rank, if the ranks' metrics have different names.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Averages the numbers in ``logs``, in place."""
        logs = {} if logs is None else logs
        own = {name: float(value) for name, value in logs.items() if _is_number(value)}
        everyone = objects.allgather_object(own, "MetricAverageCallback")
        for rank, other in enumerate(everyone):
            if other.keys() != everyone[0].keys():
                raise MismatchError(
                    f"MetricAverageCallback: rank {rank} has the metrics {sorted(other)}, rank 0 "
                    f"has {sorted(everyone[0])}. All ranks must compile and validate alike."
                )
        for name in own:
            logs[name] = sum(other[name] for other in everyone) / len(everyone)


def _is_number(value: Any) -> bool:
    if isinstance(value, Number):
        return not isinstance(value, complex)
    return getattr(value, "shape", None) == ()


class LearningRateScheduleCallback(_WithoutXla):
    """Sets the learning rate to ``initial_lr * multiplier`` in epochs start_epoch to end_epoch - 1.

    Args:
        initial_lr: what is multiplied.
        multiplier: a number, or a function of the epoch.
        start_epoch: first epoch in which this callback acts.
        end_epoch: first epoch in which it does no more; None: never.
        staircase: call ``multiplier`` at the beginning of an epoch with its number; otherwise
            before every batch with the number of epochs done, a fraction. A constant multiplier is
            always a staircase.
        momentum_correction: when the learning rate changes, scale the velocities of an optimizer
            with momentum by the same factor, as these hold the old one.
        steps_per_epoch: batches of an epoch; None: as ``model.fit`` knows them.

    Raises:
        ValueError: when training begins, if the optimizer has a schedule of its own, or if the
            steps of an epoch are needed and not known.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is None: give the learning rate that is multiplied")
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Checks that the learning rate can be set, and when."""
        rate = _stepping(self.model.optimizer)._learning_rate
        if not isinstance(rate, keras.Variable):
            raise ValueError(
                f"the optimizer's learning rate is a {type(rate).__name__}, which "
                f"{type(self).__name__} cannot set: give the optimizer a number"
            )
        if self.steps_per_epoch is None and self.params.get("steps"):
            self.steps_per_epoch = self.params["steps"]
        if self.steps_per_epoch is None and not self.staircase:
            raise ValueError(
                f"the number of batches of an epoch is not known: give {type(self).__name__} "
                "steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Notes the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Sets the learning rate if this is the time."""
        if self.current_epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self.current_epoch >= self.end_epoch:
            return
        if not self.staircase:
            self._set(self.multiplier(self.current_epoch + batch / self.steps_per_epoch))
        elif batch == 0:
            self._set(self.multiplier(self.current_epoch))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Adds the learning rate to the epoch's logs, as ``lr``."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set(self, multiplier: float) -> None:
        optimizer = self.model.optimizer
        old, new = float(optimizer.learning_rate), self.initial_lr * multiplier
        if old == new:
            return
        optimizer.learning_rate = new
        if self.momentum_correction and old:
            _scale_velocities(optimizer, new / old)


def _stepping(optimizer: Any) -> Any:
    """Returns the optimizer that makes the step, inside of those that wrap it."""
    distributed = isinstance(optimizer, DistributedOptimizer)
    return innermost(optimizer.wrapped if distributed else optimizer)


def _scale_velocities(optimizer: Any, factor: float) -> None:
    """Multiplies the velocities that hold the learning rate: SGD's and RMSprop's with momentum."""
    optimizer = _stepping(optimizer)
    if not getattr(optimizer, "momentum", 0.0):
        return
    for velocity in getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", []):
        if velocity is not None:
            velocity.assign(velocity * factor)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate batch by batch from ``initial_lr`` / size() to ``initial_lr``.

    The last batch of epoch ``warmup_epochs`` is the first with all of it. Afterwards the learning
    rate is left alone. ``verbose`` 1 prints a line then.

    Raises:
        ValueError: as LearningRateScheduleCallback.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._warming,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def _warming(self, epoch: float) -> float:
        size = basics.size()
        part = (epoch + 1.0 / self.steps_per_epoch) / self.end_epoch
        return (1.0 + part * (size - 1)) / size

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Adds the learning rate to the logs; says when it is reached."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == self.end_epoch - 1:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: the learning rate's warmup to {rate:g} is done.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keeps the best model in a file that rank 0 alone writes.

    Rank 0 decides by its own metric; with MetricAverageCallback before it in the list that is the
    average, and ``best`` is the same on all ranks. The file is written beside its place and moved
    there, so that a process that is killed leaves the old one.

    Args:
        monitor: name of the metric.
        verbose: 1 prints a line for each decision, on rank 0.
        save_weights_only: save the weights alone (``.weights.h5``) instead of the model
            (``.keras``).
        mode: "min", "max" or "auto".
        save_freq: "epoch", or a number of batches.
        filepath: where to; may be set later as the attribute of that name.

    Raises:
        ValueError: when training begins, if there is no ``filepath``.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | os.PathLike[str] | None = None,
    ) -> None:
        if str(monitor).endswith((".keras", ".h5")):
            raise ValueError(f"monitor='{monitor}' is a file: give filepath='{monitor}'")
        ending = "unset.weights.h5" if save_weights_only else "unset.keras"
        super().__init__(
            ending if filepath is None else filepath,
            monitor,
            verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Checks that there is a place for the file."""
        if not self.filepath:
            raise ValueError("BestModelCheckpoint has no filepath: give it one, on every rank")
        self.filepath = os.fspath(self.filepath)
        super().on_train_begin(logs)

    def _save_model(self, epoch: int, batch: int | None, logs: Logs | None) -> None:
        if self.monitor_op is None:
            self._set_monitor_op()
        if basics.is_initialized() and basics.rank() != 0:
            self._note(logs)
            return
        if "://" in self.filepath:
            super()._save_model(epoch, batch, logs)  # such a place shows whole files alone
            return
        path = Path(self._get_file_path(epoch, batch, logs or {}))
        if self._should_save_model(epoch, batch, logs, path):
            self._write(path)

    def _note(self, logs: Logs | None) -> None:
        """Keeps ``best`` as rank 0 does."""
        current = (logs or {}).get(self.monitor)
        if current is not None and self._is_improvement(current, self.best):
            self.best = current

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Keras goes by the ending.
        beside = path.with_name(f".{os.getpid()}.{path.name}")
        try:
            if self.save_weights_only:
                self.model.save_weights(beside, overwrite=True)
            else:
                self.model.save(beside, overwrite=True)
            with open(beside, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
