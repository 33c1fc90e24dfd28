"""What the ranks compare of their optimizers: kind and settings, by names of no framework.

Imports no framework: both kinds of optimizer are asked for attributes alone. Equal settings do not
always compute the same, and this is told too:

- Weight decay in torch's SGD, Adam, ... is added to the gradient; Keras's, and AdamW's, is taken
  off the weight: another name, unless it makes no difference (SGD without momentum).
- RMSprop and Adagrad: torch adds epsilon to the root, Keras under it.
- Adam: torch adds epsilon after the correction of bias, Keras before: ``differs_early``.
- A Keras schedule changes the learning rate by itself, torch's are no part of the optimizer:
  ``learning_rate_schedule``, which only Keras ranks have.
- SGD with momentum: a changed learning rate acts on earlier steps' momentum in torch, not in Keras.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

Settings = dict[str, Any]

_TORCH_NAMES = {"lr": "learning_rate", "eps": "epsilon", "alpha": "rho"}
# How it is done, not what; and what Keras has no word for while it is off.
_TORCH_WAYS = {"foreach", "fused", "capturable", "differentiable", "initial_lr", "max_lr"}
_KERAS_WAYS = {"name"}
_KERAS_AVERAGES = {"ema_momentum", "ema_overwrite_frequency"}
_EPSILON_UNDER_ROOT = {"RMSprop", "Adagrad"}
_TOO_SMALL_TO_MATTER = 1e-11


def of_torch(kind: str, group: Mapping[str, Any]) -> Settings:
    """Returns the settings of a parameter group of torch's optimizer of class ``kind``."""
    settings: Settings = {"kind": "Adam" if kind == "AdamW" else kind}
    for name, value in group.items():
        if name == "betas":
            settings["beta_1"], settings["beta_2"] = map(_plain, value)
        elif name not in _TORCH_WAYS and name != "params":
            settings[_TORCH_NAMES.get(name, name)] = _plain(value)
    decoupled = settings.pop("decoupled_weight_decay", False) or kind == "AdamW"
    harmless = kind == "SGD" and not settings.get("momentum")
    if not decoupled and not harmless and "weight_decay" in settings:
        settings["weight_decay_in_gradient"] = settings.pop("weight_decay")
    return _without_unset(settings)


def of_keras(optimizer: Any, decays: bool) -> Settings:
    """Returns the settings of a Keras optimizer; ``decays``: for a variable with weight decay."""
    kind = type(optimizer).__name__
    settings: Settings = {"kind": "Adam" if kind == "AdamW" else kind}
    config = optimizer.get_config()
    skipped = _KERAS_WAYS if config.get("use_ema") else _KERAS_WAYS | _KERAS_AVERAGES
    for name, value in config.items():
        if name not in skipped:
            settings[name] = _plain(value)
    settings["learning_rate"] = float(optimizer.learning_rate)
    if isinstance(config.get("learning_rate"), dict):
        settings["learning_rate_schedule"] = _plain(config["learning_rate"])
    if not decays:
        settings.pop("weight_decay", None)
    if kind in _EPSILON_UNDER_ROOT and "epsilon" in settings:
        settings["epsilon_under_root"] = settings.pop("epsilon")
    return _without_unset(settings)


def summary(each: Mapping[str, Settings]) -> Settings:
    """Returns settings of an optimizer, given those of each tensor by name.

    What is the same for all tensors is "optimizer.NAME"; the rest is "TENSOR: NAME".
    """
    if not each:
        return {}
    names = sorted({name for settings in each.values() for name in settings})
    result: Settings = {}
    for name in names:
        values = [settings.get(name) for settings in each.values()]
        if all(value == values[0] for value in values):
            result[f"optimizer.{name}"] = values[0]
            continue
        for tensor, settings in each.items():
            if settings.get(name) is not None:
                result[f"{tensor}: {name}"] = settings[name]
    return result


def differs_early(settings: Settings) -> bool:
    """True if torch's and Keras's optimizers with ``settings`` make different first steps."""
    epsilon = settings.get("optimizer.epsilon", 0.0)
    return settings.get("optimizer.kind") == "Adam" and epsilon > _TOO_SMALL_TO_MATTER


def _plain(value: Any) -> Any:
    """Returns a number as a Python number, and what is no number or text by its repr."""
    if isinstance(value, (bool, str, type(None))):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if hasattr(value, "item") or isinstance(value, numbers.Real):
        return float(value)
    return repr(value)


def _without_unset(settings: Settings) -> Settings:
    """Drops what is off: not every framework has a word for it."""
    optional = ("weight_decay", "weight_decay_in_gradient", "dampening", "lr_decay")
    return {
        name: value
        for name, value in settings.items()
        if value is not None and value is not False and not (name in optional and value == 0)
    }
