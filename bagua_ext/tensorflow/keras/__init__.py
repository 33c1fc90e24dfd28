"""Data-parallel training with Keras 3 on TensorFlow: ``import bagua_ext.tensorflow.keras as hvd``.

The same as ``bagua_ext.keras``, for Keras on TensorFlow alone.
"""

from __future__ import annotations

from bagua_ext.keras._framework import require_keras

require_keras()

import keras  # noqa: E402

if keras.config.backend() != "tensorflow":
    raise ImportError(
        f"bagua_ext.tensorflow.keras needs Keras on TensorFlow; its backend here is "
        f"'{keras.config.backend()}'. Set KERAS_BACKEND=tensorflow before the first import of "
        "keras, or import bagua_ext.keras, which serves PyTorch as well."
    )

from bagua_ext.keras import *  # noqa: E402, F403
from bagua_ext.keras import __all__  # noqa: E402, F401
from bagua_ext.tensorflow.keras import callbacks  # noqa: E402, F401
