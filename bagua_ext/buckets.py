"""Decides in which order gradients lie and which share a bucket. Pure: no tensor is touched."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """What the layout needs to know about one gradient."""

    dtype: Hashable
    bytes: int
    group: int | None = None  # gradients of one group share a bucket, whatever its size


def ready_order(ready: Sequence[int], count: int) -> list[int]:
    """Returns all indices below ``count``: those of ``ready`` first, then the rest from the end.

    Backward reaches the parameters registered last first, so that is the guess for the rest.
    """
    seen = set(ready)
    first = list(dict.fromkeys(ready))
    return first + [i for i in reversed(range(count)) if i not in seen]


def lay_out(
    pieces: Sequence[Piece], order: Sequence[int], bucket_bytes: int
) -> tuple[list[int], list[int] | None]:
    """Returns the order in which pieces lie, and each one's bucket in that order.

    ``order`` is the expected order of readiness. Buckets hold one dtype, and one group if the piece
    has one; otherwise a bucket closes when the next piece would pass ``bucket_bytes``. Buckets
    follow each other by when their last piece is ready. None instead of buckets: one dtype and no
    groups, so that the core's own cut of ``order`` gives the same.
    """
    if len({piece.dtype for piece in pieces}) < 2 and all(p.group is None for p in pieces):
        return list(order), None
    buckets: list[list[int]] = []
    latest: dict[Hashable, int] = {}  # open bucket by dtype and group
    for index in order:
        piece = pieces[index]
        key = (piece.dtype, piece.group)
        bucket = latest.get(key)
        if bucket is None or _is_full(pieces, buckets[bucket], piece, bucket_bytes):
            latest[key] = bucket = len(buckets)
            buckets.append([])
        buckets[bucket].append(index)
    position = {index: place for place, index in enumerate(order)}
    buckets.sort(key=lambda members: position[members[-1]])
    flat = [index for members in buckets for index in members]
    bucket_of = [number for number, members in enumerate(buckets) for _ in members]
    return flat, bucket_of


def _is_full(pieces: Sequence[Piece], members: Sequence[int], piece: Piece, limit: int) -> bool:
    if piece.group is not None:
        return False
    return sum(pieces[i].bytes for i in members) + piece.bytes > limit
