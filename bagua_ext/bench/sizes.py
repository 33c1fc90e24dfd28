"""Message sizes as text: 4K is 4096 bytes."""

from __future__ import annotations

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of ``text``, such as 512, 4K, 64M or 1G.

    Raises:
        ValueError: if it is no positive multiple of 4, the bytes of a float32.
    """
    digits = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = digits[-1:] if digits[-1:].isalpha() else ""
    if unit not in _UNITS or not digits.removesuffix(unit).isdigit():
        raise ValueError(f"'{text}' is no size; write bytes as 512, 4K, 64M or 1G")
    size = int(digits.removesuffix(unit)) * _UNITS[unit]
    if size <= 0 or size % 4:
        raise ValueError(f"'{text}' is {size} bytes; a positive multiple of 4 is needed (float32)")
    return size


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes of a list with commas, in its order."""
    return tuple(parse_size(part) for part in text.split(","))


def format_size(size: int) -> str:
    """``size`` in the largest unit that divides it."""
    for unit in ("G", "M", "K"):
        if size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]} {unit}iB"
    return f"{size} B"
