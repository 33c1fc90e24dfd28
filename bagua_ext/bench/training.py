"""What the training steps of all frameworks have in common: size, check, and what is noted."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import numpy as np

from bagua_ext import objects
from bagua_ext.bench.measure import WrongResultError
from bagua_ext.bench.report import Row

OURS = "bagua"
LOCAL = "no exchange"
RATE = 0.002
_WIDTH = 1024
_TOLERANCE = 1e-3  # of all that training changed; the joined batch rounds differently


def layers_of(parameters: int) -> tuple[int, int]:
    """Width and number of square layers without bias that have about ``parameters`` in all."""
    width = min(_WIDTH, math.isqrt(parameters))
    return width, max(1, parameters // width**2)


def check_weights(name: str, got: np.ndarray, wanted: np.ndarray, start: np.ndarray) -> None:
    """Raises WrongResultError unless training moved ``start`` to ``got`` as it did to ``wanted``.

    All ranks call it: their weights must be the same bit by bit.
    """
    error = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted - start))
    if not error <= _TOLERANCE:
        raise WrongResultError(
            f"{name}: what it learned is {error:.2g} of the way away from what one process learns "
            f"with the joined batch; at most {_TOLERANCE} is rounding"
        )
    digests = objects.allgather_object(hashlib.sha256(got.tobytes()).hexdigest())
    if len(set(digests)) > 1:
        raise WrongResultError(f"{name}: ranks ended with different weights: {digests}")


def with_exchange(
    row: Row, local: float, alone: Mapping[str, float], further: Mapping[str, str]
) -> Row:
    """``row`` with a note: what it adds to a step of ``local`` seconds without exchange.

    ``alone`` has the seconds of an exchange with nothing to overlap with, by candidate; ``further``
    what else there is to say. Candidates that are not in ``alone`` get no note.
    """
    if row.candidate not in alone:
        return row
    added, own = (row.median - local) * 1e3, alone[row.candidate] * 1e3
    text = f"adds {added:.1f} ms, exchange alone {own:.1f} ms"
    if row.candidate in further:
        text += f", {further[row.candidate]}"
    return Row(row.group, row.candidate, row.samples, note=text)
