"""A model as a list of named tensors, the same for every framework. Imports none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bagua_ext.interop.layout import Layout

Names = Mapping[str, "str | None"]


@dataclass(frozen=True)
class Entry:
    """A tensor that all ranks of a job have, each in a model of its own framework.

    Args:
        name: canonical name.
        own: path in the model.
        layout: from the model's order of elements to torch's.
        dtype: name of the dtype, e.g. "float32".
        trainable: the optimizer changes it.
        holder: the framework's tensor.
        row: the entry is this row of ``holder``; None: all of it.
        folded: a further tensor of a torch model whose values count as added to ``holder``'s.
    """

    name: str
    own: str
    layout: Layout
    dtype: str
    trainable: bool
    holder: Any
    row: int | None = None
    folded: Any = None

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape in the model's own layout."""
        shape = tuple(self.holder.shape)
        return shape if self.row is None else shape[1:]


@dataclass
class Layer:
    """A layer with tensors of its own.

    Args:
        kind: what it does, e.g. "conv2d"; the same in every framework.
        own: path in the model.
        entries: its tensors; the names are relative to the layer, e.g. "kernel".
        settings: must be equal on all ranks.
        facts: must be equal on the ranks that know them.
        problem: why the layer cannot be tied to another framework's; "" if it can.
    """

    kind: str
    own: str
    entries: list[Entry] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    def add(self, name: str, own: str, holder: Any, layout: Layout, **more: Any) -> None:
        """Appends an entry; its dtype and whether it is trained are filled in later."""
        self.entries.append(Entry(name, own, layout, "", False, holder, **more))


@dataclass(frozen=True)
class Listing:
    """A model's tensors by canonical name, ascending, and what the ranks compare beside them."""

    entries: list[Entry]
    settings: dict[str, Any]
    facts: dict[str, Any]
    problems: list[str]


def number_layers(layers: Iterable[Layer], names: Names | None) -> Listing:
    """Gives each tensor its canonical name.

    A layer is "003.conv2d" if it is the fourth in its model, its kernel "003.conv2d.kernel".
    ``names`` gives layers or tensors, by their own path, another name; None leaves one out. Neither
    is counted.

    Raises:
        ValueError: two tensors get one name, or ``names`` holds a path that the model has not.
    """
    names = dict(names or {})
    entries: list[Entry] = []
    settings: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    problems: list[str] = []
    unused = set(names)
    count = 0
    for layer in layers:
        unused -= {layer.own, *(entry.own for entry in layer.entries)}
        prefix = names.get(layer.own, f"{count:03d}.{layer.kind}")
        if prefix is None:
            continue
        count += layer.own not in names
        entries += _named(layer, prefix, names)
        settings |= {f"{prefix}.{key}": value for key, value in layer.settings.items()}
        facts |= {f"{prefix}.{key}": value for key, value in layer.facts.items()}
        problems += [layer.problem] if layer.problem else []
    if unused:
        raise ValueError(f"names: the model has no {', '.join(map(repr, sorted(unused)))}")
    entries, shared = _without_repeats(entries)
    return Listing(entries, settings | shared, facts, problems)


def _named(layer: Layer, prefix: str, names: Names) -> list[Entry]:
    named = [
        replace(entry, name=names.get(entry.own, f"{prefix}.{entry.name}"))
        for entry in layer.entries
    ]
    return [entry for entry in named if entry.name is not None]


def _without_repeats(entries: list[Entry]) -> tuple[list[Entry], dict[str, str]]:
    """Drops the later uses of a shared tensor; returns the rest by name, and who shares what."""
    first: dict[tuple[int, int | None], str] = {}
    shared: dict[str, str] = {}
    kept: dict[str, Entry] = {}
    for entry in entries:
        key = (id(entry.holder), entry.row)
        if key in first:
            shared[f"{entry.name}.shared_with"] = first[key]
            continue
        if entry.name in kept:
            raise ValueError(
                f"'{entry.own}' and '{kept[entry.name].own}' are both named '{entry.name}': give "
                "them different names"
            )
        first[key] = entry.name
        kept[entry.name] = entry
    return [kept[name] for name in sorted(kept)], shared
