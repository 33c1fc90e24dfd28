"""Compression of gradients on their way between ranks."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Turns a tensor into a smaller one and back."""

    codec = "none"  # the core's name for the same format

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the compressed tensor and what ``decompress`` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns ``tensor`` in the form that ``compress`` was given."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns ``tensor`` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns ``tensor`` itself."""
        return tensor


def _narrow(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor.to(dtype), tensor.dtype
    return tensor, None


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16; other dtypes as they are."""

    codec = "fp16"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns ``tensor`` rounded to float16 and its own dtype."""
        return _narrow(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns ``tensor`` in dtype ``ctx``, or as it is if that is None."""
        return tensor if ctx is None else tensor.to(ctx)


class BF16Compressor(Compressor):
    """Sends float32 and float64 as bfloat16; other dtypes as they are."""

    codec = "bf16"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns ``tensor`` rounded to bfloat16 and its own dtype."""
        return _narrow(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns ``tensor`` in dtype ``ctx``, or as it is if that is None."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
