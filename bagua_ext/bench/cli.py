"""``bagua-bench``: reads the arguments, starts the processes, shows and saves what they found."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bagua_ext.bench import machine, plot
from bagua_ext.bench.options import LIBRARIES, Options
from bagua_ext.bench.report import Report
from bagua_ext.bench.sizes import parse_size, parse_sizes

_CASES = {
    "allreduce": "one tensor over message sizes, beside a bare loop over shared memory",
    "latency": "one small tensor after the other, from Python and from C",
    "many": "many small tensors, each by itself and as one group",
    "train": "training steps with an optimizer, beside DistributedDataParallel",
    "idle": "processor time of ranks that have nothing to do",
    "startup": "time that import and init of all ranks take",
}
_T = TypeVar("_T")
_SIZES = {"allreduce": "4K,64K,1M,16M,64M", "latency": "8,64,512,4K,64K"}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 0 if it measured and all results were right."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.plot:
        try:
            plot.require_matplotlib()
        except ValueError as error:
            parser.error(str(error))
    options = _options(args)
    os.environ["OMP_NUM_THREADS"] = "1"  # before anything loads torch; what is started inherits it
    try:
        report = _measure(options)
    except (RuntimeError, ValueError) as error:
        print(f"bagua-bench: {error}", file=sys.stderr)
        return 1
    if report is not None:
        _show(report, options, args)
    return 0


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
    if case != "idle":
        known = LIBRARIES if case in _SIZES else ("gloo",)
        text = f"comma-separated, of: {', '.join(known)}; none for this library alone (gloo)"
        add("--compare", type=_names_of(known), default=("gloo",), metavar="NAMES", help=text)
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


def _options(args: argparse.Namespace) -> Options:
    names = Options.__dataclass_fields__.keys()
    return Options(**{name: value for name, value in vars(args).items() if name in names})


def _measure(options: Options) -> Report | None:
    """The report, or None on the ranks of a job that leave it to rank 0."""
    from bagua_ext.launch import Launcher, detect

    _refuse_missing(options)
    if options.case == "startup":
        from bagua_ext.bench.cases import startup

        return startup.measure(options)
    place = detect(os.environ)
    if place.launcher is Launcher.ALONE:
        from bagua_ext.bench.launch import measure_on_ranks

        return measure_on_ranks(options)
    from bagua_ext.bench.job import work

    report = work(options)
    return report if place.rank == 0 else None


def _refuse_missing(options: Options) -> None:
    from bagua_ext.bench.external import External

    for name in options.compare:
        if name != "gloo":
            External.find(name, options)


def _show(report: Report, options: Options, args: argparse.Namespace) -> None:
    header = machine.describe(options, report.size)
    for key, text in header.items():
        print(f"# {key}: {text}")
    print(report.table(), flush=True)
    if args.json:
        content = {"header": header, **report.as_json()}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.plot:
        plot.save(report, header["machine"], args.plot)
