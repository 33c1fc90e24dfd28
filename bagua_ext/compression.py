"""What every framework's Compression has in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Compressor:
    """Turns a tensor into a smaller one and back."""

    # The core's name for the same format; None: operations alone can use it, optimizers cannot.
    codec: str | None = None

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the compressed tensor and what ``decompress`` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns ``tensor`` in the form that ``compress`` was given."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    codec = "none"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns ``tensor`` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns ``tensor`` itself."""
        return tensor


class Narrowing(Compressor):
    """Sends float32 and float64 in 16 bits; other dtypes as they are.

    A framework gives the three: what it narrows, to what, and its cast.
    """

    wide: ClassVar[tuple[Any, ...]]
    narrow: ClassVar[Any]
    cast: ClassVar[Callable[[Any, Any], Any]]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Returns ``tensor`` rounded to the narrow dtype, and its own dtype."""
        if tensor.dtype in cls.wide:
            return cls.cast(tensor, cls.narrow), tensor.dtype
        return tensor, None

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Returns ``tensor`` in dtype ``ctx``, or as it is if that is None."""
        return tensor if ctx is None else cls.cast(tensor, ctx)
