"""What happens to an optimizer's gradients on their way, the same for every framework."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from bagua_ext.reduce_ops import Average, ReduceOp, Sum, chosen_op

_DEFAULT_BUCKET_BYTES = 10 << 20


@dataclass(frozen=True)
class Reduction:
    """One reduction of gradients: ``postscale * op(codec(prescale * gradient))``."""

    op: ReduceOp
    prescale: float
    postscale: float
    codec: str


def make_reduction(op: ReduceOp | None, predivide_factor: float, compression: Any) -> Reduction:
    """Returns the reduction that an optimizer's arguments ask for.

    ``predivide_factor`` f divides before the sum and multiplies after it. ``compression`` is one of
    a framework's Compression classes.

    Raises:
        ValueError: ``op`` is neither Average nor Sum, or ``predivide_factor`` does not go with it.
    """
    op = chosen_op(None, op)
    if op not in (Average, Sum):
        raise ValueError("gradients are reduced with op=Average or op=Sum")
    if predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor is {predivide_factor}, expected more than 0")
    codec = getattr(compression, "codec", None)
    if codec is None:
        raise ValueError(
            f"compression={compression!r}: gradients in buckets are compressed by the core, in its "
            "own formats; use Compression.none, fp16 or bf16"
        )
    return Reduction(op, 1.0 / predivide_factor, predivide_factor, codec)


def checked_bucket_bytes(bucket_bytes: int | None) -> int:
    """Returns ``bucket_bytes``, or the default (BAGUA_BUCKET_BYTES, 10 MiB) for None.

    Raises:
        ValueError: ``bucket_bytes`` is not positive.
    """
    if bucket_bytes is None:
        text = os.environ.get("BAGUA_BUCKET_BYTES") or str(_DEFAULT_BUCKET_BYTES)
        if not text.isdecimal():
            raise ValueError(f"BAGUA_BUCKET_BYTES is '{text}', expected a number of bytes")
        bucket_bytes = int(text)
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, expected more than 0")
    return bucket_bytes
