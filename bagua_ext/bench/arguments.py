"""Arguments of ``bagua-bench``: what can be asked for, and the options made of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bagua_ext.bench.frameworks import FRAMEWORKS
from bagua_ext.bench.options import Options
from bagua_ext.bench.sizes import parse_size, parse_sizes

_CASES = {
    "allreduce": "one tensor over message sizes, beside a bare loop over shared memory",
    "latency": "one small tensor after the other, from Python and from C",
    "many": "many small tensors, each by itself and as one group",
    "train": "training steps, beside those of the framework's own data parallelism",
    "idle": "processor time of ranks that have nothing to do",
    "startup": "time that import and init of all ranks take",
}
_BOTH = ("allreduce", "many", "train")  # with either framework; the others with torch
_T = TypeVar("_T")
_SIZES = {"allreduce": "4K,64K,1M,16M,64M", "latency": "8,64,512,4K,64K"}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bagua-bench",
        description="Measures bagua_ext beside other libraries: in turns, with checked results.",
    )
    cases = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    for name, text in _CASES.items():
        _add_arguments(cases.add_parser(name, help=text, description=text), name)
    return parser


def _add_arguments(parser: argparse.ArgumentParser, case: str) -> None:
    add = parser.add_argument
    add("-np", "--num-proc", dest="np", type=int, default=2, metavar="N", help="ranks (2)")
    add("--rounds", type=_positive, metavar="N", help="turns of each candidate")
    add("--json", type=Path, metavar="FILE", help="write all samples there")
    add("--plot", type=Path, metavar="FILE.png", help="draw them (needs matplotlib)")
    if case != "startup":
        add("--bind", action="store_true", help="keep each rank on a core of its own, in turn")
    if case not in ("idle", "startup"):
        add("--warmup", type=int, default=3, metavar="N", help="turns before those (3)")
    if case in _BOTH:
        text = "whose binding is measured (torch)"
        add("--framework", choices=tuple(FRAMEWORKS), default="torch", help=text)
    if case != "idle":
        add("--compare", type=_names_for(case), metavar="NAMES", help=_compare_help(case))
    if case in _SIZES:
        text = f"bytes, comma-separated ({_SIZES[case]})"
        add("--sizes", type=_sizes, default=parse_sizes(_SIZES[case]), help=text)
        add("--mpi-python", default="", metavar="PYTHON", help="interpreter that has mpi4py")
        add("--horovod-python", default="", metavar="PYTHON", help="interpreter with Horovod")
    if case == "many":
        add("--tensors", type=_positive, default=500, metavar="N", help="how many (500)")
        add("--numel", type=_positive, default=1000, metavar="N", help="floats in each (1000)")
    if case == "train":
        add("--parameters", type=_size, default=16 << 20, metavar="N", help="of the model (16M)")
        text = "samples of each rank's step, comma-separated (1,128)"
        add("--batches", type=_numbers, default=(1, 128), metavar="N,N", help=text)
    if case == "idle":
        add("--seconds", type=float, default=3.0, metavar="S", help="length of a pause (3)")


def _argument(parse: Callable[[str], _T], text: str) -> _T:
    """``parse(text)`` with its ValueError's text as argparse's message."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size(text: str) -> int:
    return _argument(parse_size, text)


def _sizes(text: str) -> tuple[int, ...]:
    return _argument(parse_sizes, text)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number from 1 on")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(_positive, text.split(",")))


def _libraries(case: str, framework: str) -> tuple[str, ...]:
    """What ``case`` can be compared with; libraries with a launcher of their own do one tensor."""
    known = FRAMEWORKS[framework].libraries
    return known if case in _SIZES else known[:1]


def _frameworks(case: str) -> tuple[str, ...]:
    return tuple(FRAMEWORKS) if case in _BOTH else ("torch",)


def _names_for(case: str) -> Callable[[str], tuple[str, ...]]:
    return _names_of(sum((_libraries(case, name) for name in _frameworks(case)), ()))


def _compare_help(case: str) -> str:
    texts = [f"{', '.join(_libraries(case, name))} with {name}" for name in _frameworks(case)]
    known = "; ".join(texts) if len(texts) > 1 else texts[0]
    return f"comma-separated, of: {known}; none for this library alone (the first)"


def _names_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip() not in ("", "none"))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"'{name}' cannot be compared with here; known: {', '.join(known)}, none"
                )
        return names

    return parse


def make_options(args: argparse.Namespace) -> Options:
    """Raises ValueError if a library cannot be compared with under the framework."""
    names = Options.__dataclass_fields__.keys()
    given = {name: value for name, value in vars(args).items() if name in names}
    if "compare" in given:
        framework = given.get("framework", "torch")
        given["compare"] = _compared(args.case, framework, given["compare"])
    return Options(**given)


def _compared(case: str, framework: str, names: tuple[str, ...] | None) -> tuple[str, ...]:
    known = _libraries(case, framework)
    if names is None:
        return known[:1]
    for name in names:
        if name not in known:
            raise ValueError(
                f"'{name}' cannot be compared with under --framework {framework}; "
                f"known: {', '.join(known)}, none"
            )
    return names
