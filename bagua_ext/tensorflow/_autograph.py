"""Keeps AutoGraph out of functions that have nothing to convert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def keep_out(function: F) -> F:
    """Makes a tf.function call ``function``, and all that it calls, as it is.

    As ``tf.autograph.experimental.do_not_convert``, which would wrap every eager call. Converting a
    call takes longer than all that an operation does.
    """
    marked: Any = function
    marked.autograph_info__ = {}
    return function
