"""Compression of gradients on their way between ranks."""

from __future__ import annotations

import tensorflow as tf

from bagua_ext.compression import Compressor, Narrowing, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Narrowing):
    """Sends float32 and float64 as float16; other dtypes as they are."""

    codec = "fp16"
    wide, narrow = (tf.float32, tf.float64), tf.float16
    cast = staticmethod(tf.cast)


class BF16Compressor(Narrowing):
    """Sends float32 and float64 as bfloat16; other dtypes as they are."""

    codec = "bf16"
    wide, narrow = (tf.float32, tf.float64), tf.bfloat16
    cast = staticmethod(tf.cast)


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
