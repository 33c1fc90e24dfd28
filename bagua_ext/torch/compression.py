"""Compression of gradients on their way between ranks."""

from __future__ import annotations

import torch

from bagua_ext.compression import Compressor, Narrowing, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Narrowing):
    """Sends float32 and float64 as float16; other dtypes as they are."""

    codec = "fp16"
    wide, narrow = (torch.float32, torch.float64), torch.float16
    cast = staticmethod(torch.Tensor.to)


class BF16Compressor(Narrowing):
    """Sends float32 and float64 as bfloat16; other dtypes as they are."""

    codec = "bf16"
    wide, narrow = (torch.float32, torch.float64), torch.bfloat16
    cast = staticmethod(torch.Tensor.to)


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
