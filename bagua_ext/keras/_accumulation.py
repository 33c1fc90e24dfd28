"""Sums of gradients over the calls of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from bagua_ext.keras._framework import load_framework

framework = load_framework()

Step = Callable[[list[Any], list[Any]], None]


class Accumulator:
    """Adds up gradients and lets every ``passes``-th call make a step with the sums.

    The sums are variables, so that this works in compiled functions as well, where Python runs only
    once. They belong to no optimizer and are not saved.
    """

    def __init__(self, passes: int, average: bool, key_of: Callable[[Any], Any]) -> None:
        if passes < 1:
            raise ValueError(f"backward_passes_per_step is {passes}, expected 1 or more")
        self.passes = passes
        self._key_of = key_of  # what a Keras variable and the framework's variable in it share
        self._factor = 1.0 / passes if average else 1.0
        self._sums: dict[Any, Any] = {}
        self._done: Any = None  # calls since the last step
        self._present: set[Any] = set()  # variables that ever had a gradient

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the sums for ``variables``."""
        if self.passes == 1:
            return
        self._done = _zeros((), "int32", "passes_done")
        for variable in variables:
            dtype = keras.backend.standardize_dtype(variable.dtype)
            self._sums[self._key_of(variable)] = _zeros(variable.shape, dtype, "gradient_sum")

    def add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        step: Step,
        skip: Callable[[], None],
    ) -> None:
        """Adds ``gradients``; then calls ``step`` with the sums, or ``skip`` before its time."""
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                self._present.add(self._key_of(variable))
                framework.add_to(self._sums[self._key_of(variable)], gradient)
        self._done.assign_add(1)
        is_last = keras.ops.equal(self._done, self.passes)
        framework.choose(is_last, lambda: self._finish(list(variables), step), skip)

    def _finish(self, variables: list[Any], step: Step) -> None:
        keys = [self._key_of(variable) for variable in variables]
        values = {key: framework.value_of(self._sums[key]) for key in keys if key in self._present}
        if self._factor != 1.0:
            values = {key: framework.scaled(value, self._factor) for key, value in values.items()}
        step([values.get(key) for key in keys], variables)
        for key in keys:
            total = self._sums[key]
            total.assign(keras.ops.zeros_like(total))
        self._done.assign(0)


def _zeros(shape: Sequence[int], dtype: str, name: str) -> Any:
    return keras.Variable(
        initializer="zeros", shape=tuple(shape), dtype=dtype, trainable=False, name=name
    )
