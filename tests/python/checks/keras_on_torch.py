"""The checks of the Keras layer, for Keras on PyTorch."""

from __future__ import annotations

import keras
import keras_callbacks
import keras_fit
import keras_layers
import keras_optimizer
import keras_saving
from driver import run_checks

import bagua_ext.keras as hvd

MODULES = (keras_optimizer, keras_fit, keras_layers, keras_callbacks, keras_saving)
CHECKS = {
    name: value
    for module in MODULES
    for name, value in vars(module).items()
    if name.startswith("check_")
}


if __name__ == "__main__":
    assert keras.config.backend() == "torch", keras.config.backend()
    run_checks({"hvd": hvd, **CHECKS})
