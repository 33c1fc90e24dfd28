"""Makes models of torch and of Keras the ranks of one data-parallel job."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from bagua_ext import objects
from bagua_ext.exceptions import MismatchError
from bagua_ext.interop import handshake
from bagua_ext.interop.handshake import Report
from bagua_ext.interop.listing import Entry, Listing, Names
from bagua_ext.interop.optimizers import differs_early
from bagua_ext.process_sets import global_process_set
from bagua_ext.reduce_ops import Average

_BROADCAST_BYTES = 64 << 20  # at most so many in one broadcast, unless one tensor has more


class _Tied:
    """Numbers the plans; ranks that tied fewer optimizers, in other process sets, skip numbers."""

    count = 0


def _side_of(model: Any) -> ModuleType:
    """Returns what knows the model's framework; only that one is imported."""
    bases = {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(model).__mro__}
    # A Keras model on torch is a torch module as well.
    if "keras.Model" in bases:
        from bagua_ext.interop import _keras_side

        return _keras_side
    if "torch.Module" in bases:
        from bagua_ext.interop import _torch_side

        return _torch_side
    raise ValueError(f"expected a torch Module or a Keras model, got {type(model).__name__}")


def tie(
    model: Any,
    optimizer: Any,
    *,
    root_rank: int = 0,
    names: Names | None = None,
    allow: Iterable[str] = (),
    process_set: Any = global_process_set,
    **options: Any,
) -> Any:
    """Ties ``model`` to those of all ranks and returns its DistributedOptimizer.

    Collective. The ranks compare their tensors (name, shape, dtype, whether trained), settings of
    layers (epsilon and momentum of normalizations, strides, padding, dilation, groups) and of
    optimizers; then all get rank ``root_rank``'s weights, moving statistics included. Afterwards
    the returned optimizer reduces gradients, which all ranks lay out by canonical name: in torch's
    layout as soon as one rank has a torch model, in Keras's if none has.

    In a torch model an LSTM's or RNN's ``bias_hh`` is added to ``bias_ih``, set to zero and no
    longer trained: Keras has one bias. Moving statistics are each rank's own during training; Keras
    keeps the biased variance of the batch, torch the unbiased one. ``average_statistics`` and
    ``broadcast`` make them equal again.

    Args:
        model: a torch Module, or a Keras model that is built.
        optimizer: the optimizer of the model's framework, not wrapped.
        root_rank: the global rank whose weights count.
        names: canonical names of layers or tensors by their path in this model, where models differ
            in structure or order; None leaves out what is not trained.
        allow: patterns of names in the table of differences that may differ, e.g. "*.padding".
        process_set: the ranks that train together.
        options: further arguments of the framework's DistributedOptimizer.

    Raises:
        MismatchError: on every rank, with the same table, if models or optimizers differ.
        ValueError: this rank's model or arguments are wrong; the other ranks get a MismatchError.
    """
    listing, report, error = _report(model, optimizer, names, options)
    report = replace(report, tied=_Tied.count)
    reports = objects.allgather_object(report, "interop.tie", process_set)
    complaint = handshake.complaint(reports, process_set.ranks, list(allow))
    if error is not None:
        raise error
    if complaint:
        raise MismatchError(complaint)
    side = _side_of(model)
    if handshake.is_mixed(reports) and differs_early(report.settings):
        _warn_of_epsilon()
    _broadcast(side, listing, root_rank, process_set)
    options["process_set"] = process_set
    number = max(report.tied for report in reports)
    _Tied.count = number + 1
    torchs = handshake.torch_is_canonical(reports)
    return side.wrap(optimizer, listing, torchs, f"interop.{number}", options)


def _report(
    model: Any, optimizer: Any, names: Names | None, options: Mapping[str, Any]
) -> tuple[Listing, Report, Exception | None]:
    """Returns the model's tensors and what the other ranks are told, also if it is an error."""
    framework = "unknown"
    try:
        side = _side_of(model)
        framework = side.framework()
        refused = {"groups", "num_groups", "named_parameters"} & options.keys()
        if refused:
            raise ValueError(f"tie() decides about {', '.join(sorted(refused))} itself")
        listing = side.list_model(model, optimizer, names)
        settings = side.optimizer_settings(optimizer, listing)
    except Exception as error:  # raised once the others know
        return Listing([], {}, {}, []), Report(framework, error=str(error)), error
    return listing, handshake.report_of(framework, listing, settings), None


def _warn_of_epsilon() -> None:
    warnings.warn(
        "Adam adds epsilon after the correction of bias in torch and before it in Keras, so that "
        "the ranks' weights drift apart a little in the first steps. Use a tiny epsilon, such as "
        "1e-12, on all ranks, or call interop.broadcast(model) now and then.",
        stacklevel=3,
    )


# ---- Weights of all ranks -----------------------------------------------------------------------


def broadcast(
    model: Any,
    root_rank: int = 0,
    *,
    names: Names | None = None,
    process_set: Any = global_process_set,
) -> None:
    """Gives all ranks rank ``root_rank``'s weights, moving statistics included. Collective.

    Frameworks round differently, so weights that every rank updates by itself drift apart in the
    last digits; this ends it.
    """
    side = _side_of(model)
    _broadcast(side, _shared(side, model, names), root_rank, process_set)


def average_statistics(
    model: Any, *, names: Names | None = None, process_set: Any = global_process_set
) -> None:
    """Gives all ranks the mean of their moving means and variances. Collective."""
    side = _side_of(model)
    entries = [e for e in _shared(side, model, names).entries if "moving_" in e.name]
    for run in _runs(entries):
        flat = _flat(side, run)
        _spread(side, run, objects.allreduce_array(flat, _label(run), Average, process_set))


def _broadcast(side: ModuleType, listing: Listing, root_rank: int, process_set: Any) -> None:
    for run in _runs(listing.entries):
        flat = _flat(side, run)
        _spread(side, run, objects.broadcast_array(flat, root_rank, _label(run), process_set))


def _runs(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Cuts ``entries`` into lists of one dtype and limited size; the same on all ranks."""
    for _, same in itertools.groupby(
        sorted(entries, key=lambda e: (e.dtype, e.name)), key=lambda entry: entry.dtype
    ):
        run: list[Entry] = []
        total = 0
        for entry in same:
            size = 8 * int(np.prod(entry.own_shape))
            if run and total + size > _BROADCAST_BYTES:
                yield run
                run, total = [], 0
            run.append(entry)
            total += size
        yield run


def _flat(side: ModuleType, run: Sequence[Entry]) -> np.ndarray:
    values = [entry.layout.to_canonical(side.read(entry)).reshape(-1) for entry in run]
    return np.concatenate(values)


def _spread(side: ModuleType, run: Sequence[Entry], flat: np.ndarray) -> None:
    begin = 0
    for entry in run:
        count = int(np.prod(entry.own_shape))
        canonical = flat[begin : begin + count].reshape(entry.layout.shape)
        side.write(entry, entry.layout.from_canonical(canonical, entry.own_shape))
        begin += count


def _label(run: Sequence[Entry]) -> str:
    return f"interop.weights {run[0].name} to {run[-1].name}"


# ---- Weights of this rank -----------------------------------------------------------------------


def _shared(side: ModuleType, model: Any, names: Names | None) -> Listing:
    """Lists the model's tensors.

    Raises:
        ValueError: torch and Keras do not share one of its layers.
    """
    listing = side.list_model(model, None, names)
    if listing.problems:
        raise ValueError("; ".join(listing.problems))
    return listing


def weights(model: Any, *, names: Names | None = None) -> dict[str, np.ndarray]:
    """Returns copies of all weights by canonical name, in torch's layout; bfloat16 as float32.

    Models of different frameworks that compute the same have equal weights.

    Raises:
        ValueError: torch and Keras do not share one of the model's layers.
    """
    side = _side_of(model)
    entries = _shared(side, model, names).entries
    return {entry.name: entry.layout.to_canonical(side.read(entry)) for entry in entries}


def load_weights(
    model: Any, weights: Mapping[str, np.ndarray], *, names: Names | None = None
) -> None:
    """Sets all weights of ``model`` to ``weights``, as ``weights`` returns them.

    Raises:
        ValueError: names or shapes differ; nothing is changed.
    """
    side = _side_of(model)
    entries = _shared(side, model, names).entries
    own = {entry.name: entry.layout.shape for entry in entries}
    given = {name: tuple(np.shape(value)) for name, value in weights.items()}
    for name in sorted(own.keys() | given.keys()):
        if own.get(name) != given.get(name):
            raise ValueError(
                f"'{name}': the model has {own.get(name, 'nothing')}, given is "
                f"{given.get(name, 'nothing')}"
            )
    for entry in entries:
        value = np.asarray(weights[entry.name])
        side.write(entry, entry.layout.from_canonical(value, entry.own_shape))


def describe(model: Any, *, names: Names | None = None) -> str:
    """Returns a table: canonical name, shape in torch's layout, dtype, path in the model."""
    side = _side_of(model)
    lines = [("name", "shape", "dtype", "in the model")]
    for entry in side.list_model(model, None, names).entries:
        shape = "x".join(map(str, entry.layout.shape)) or "scalar"
        lines.append((entry.name, shape, entry.dtype, entry.own))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(line.rstrip() for line in cells)
