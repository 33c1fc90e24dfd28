"""Compression of gradients on their way between ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Turns a tensor into a smaller one and back."""

    codec = "none"  # the core's name for the same format

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the compressed tensor and what ``decompress`` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns ``tensor`` in the form that ``compress`` was given."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns ``tensor`` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns ``tensor`` itself."""
        return tensor


def _narrow(tensor: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, Any]:
    if tensor.dtype in (tf.float32, tf.float64):
        return tf.cast(tensor, dtype), tensor.dtype
    return tensor, None


def _widen(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
    return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16; other dtypes as they are."""

    codec = "fp16"

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns ``tensor`` rounded to float16 and its own dtype."""
        return _narrow(tensor, tf.float16)

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns ``tensor`` in dtype ``ctx``, or as it is if that is None."""
        return _widen(tensor, ctx)


class BF16Compressor(Compressor):
    """Sends float32 and float64 as bfloat16; other dtypes as they are."""

    codec = "bf16"

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns ``tensor`` rounded to bfloat16 and its own dtype."""
        return _narrow(tensor, tf.bfloat16)

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns ``tensor`` in dtype ``ctx``, or as it is if that is None."""
        return _widen(tensor, ctx)


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
