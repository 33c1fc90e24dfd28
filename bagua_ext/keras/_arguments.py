"""Arguments of DistributedOptimizer: checked, saved by place and found again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

LossScaleOptimizer = keras.optimizers.LossScaleOptimizer
Variable = Any  # a Keras variable, or one of the framework


def agreed(config: dict[str, Any]) -> str:
    """Returns the settings of an optimizer's ``config`` that the ranks compare, as "name=value"."""
    passes = config["backward_passes_per_step"]
    averages = passes > 1 and config["average_aggregated_gradients"]
    return f"backward_passes_per_step={passes}{' averaged' if averages else ''}"


def scales_by_policy() -> bool:
    """True if Keras puts a LossScaleOptimizer around optimizers, as things are."""
    return keras.config.dtype_policy().name == "mixed_float16"


def refuse_second_window(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ValueError if ``optimizer`` counts calls itself, which several passes would upset."""
    counts = ("gradient_accumulation_steps", "ema_overwrite_frequency")
    set_ones = [name for name in counts if getattr(optimizer, name, None)]
    if set_ones:
        raise ValueError(
            f"backward_passes_per_step cannot be combined with {set_ones[0]}="
            f"{getattr(optimizer, set_ones[0])} of the wrapped optimizer: both count its calls. "
            "Use one of them"
        )


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer that a LossScaleOptimizer wraps, or ``optimizer`` itself."""
    return optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer


def checked_groups(num_groups: int, groups: Any) -> Sequence[Sequence[Any]] | int:
    """Returns lists of variables, of their names or places, or the number of buckets."""
    if groups is None:
        groups = num_groups
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"the number of groups is {groups}, expected 0 or more")
        return groups
    if not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError("groups should be a list of lists of variables, or a whole number")
    members = [m if isinstance(m, int) else path_of(m) for group in groups for m in group]
    if len(set(members)) != len(members):
        raise ValueError("a variable occurs in groups more than once")
    return groups


def path_of(variable: Variable | str) -> str:
    """Returns the name of a variable; a saved group may hold names."""
    if isinstance(variable, str):
        return variable
    return getattr(variable, "path", None) or variable.name


def places_of(groups: Sequence[Sequence[Any]], variables: Sequence[Variable]) -> list[list[Any]]:
    """Returns each member's index in ``variables``, or its name if it is not there.

    A loaded model has the same variables in the same order, but not always under the same names.
    """
    index = {path_of(variable): i for i, variable in enumerate(variables)}
    return [
        [m if isinstance(m, int) else index.get(path_of(m), path_of(m)) for m in group]
        for group in groups
    ]


def resolved(groups: Sequence[Sequence[Any]] | int, variables: Sequence[Variable]) -> Any:
    """Returns groups of members of ``variables``; None instead of 0."""
    if isinstance(groups, int):
        return groups or None
    places = places_of(groups, variables)
    unknown = sorted(m for group in places for m in group if isinstance(m, str))
    if unknown:
        known = [path_of(variable) for variable in variables]
        raise ValueError(f"groups hold {unknown}, which are not among the variables: {known}")
    return [[variables[i] for i in group] for group in places]
