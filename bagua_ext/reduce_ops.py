"""Names of the reductions, and how Horovod's ``average`` argument maps to them."""

from __future__ import annotations

from bagua_ext._core import lib

ReduceOp = int

Average: ReduceOp = lib.BAGUA_AVERAGE
Sum: ReduceOp = lib.BAGUA_SUM
Adasum: ReduceOp = lib.BAGUA_ADASUM
Min: ReduceOp = lib.BAGUA_MIN
Max: ReduceOp = lib.BAGUA_MAX
Product: ReduceOp = lib.BAGUA_PRODUCT

NAMES = {
    Average: "Average",
    Sum: "Sum",
    Adasum: "Adasum",
    Min: "Min",
    Max: "Max",
    Product: "Product",
}


def chosen_op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """Returns the reduction that ``average`` or ``op`` asks for; Average if neither does.

    Raises:
        ValueError: both are given, or the reduction is unknown or not there yet.
    """
    if op is None:
        return Average if average is None or average else Sum
    if average is not None:
        raise ValueError(f"average={average} and op={NAMES.get(op, op)} are both given: give op")
    if op == Adasum:
        raise ValueError("op=Adasum is not there yet; use Average, Sum, Min, Max or Product")
    if op not in NAMES:
        raise ValueError(f"op={op!r} is unknown; use Average, Sum, Min, Max or Product")
    return op
