"""Errors of bagua_ext. Each text names operation, tensor, ranks, values and the next step."""

from __future__ import annotations

# An error raised while a tf.function is traced stays what it is if it has this very constructor;
# AutoGraph turns others into one of its own.
_plain_constructor = Exception.__init__


class BaguaError(RuntimeError):
    """Communication failed. Base of the errors that come from other ranks or from the core."""

    __init__ = _plain_constructor


class MismatchError(BaguaError):
    """The ranks disagree about an operation. Raised on every rank; the job stays usable."""


class PeerLostError(BaguaError):
    """A rank died or left the job. Sticky: ``shutdown()`` and ``init()`` start anew."""


class CollectiveTimeoutError(BaguaError):
    """An operation waited longer than ``BAGUA_TIMEOUT_SECONDS`` for other ranks."""


class AbortedError(BaguaError):
    """This or another rank ended the job's communication. Sticky, as PeerLostError."""


class NotInitializedError(ValueError):
    """A function that needs ``init()`` was called before it or after ``shutdown()``."""

    __init__ = _plain_constructor


# The name that scripts written for Horovod catch.
HorovodInternalError = BaguaError
