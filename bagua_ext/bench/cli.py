"""``bagua-bench``: reads the arguments, starts the processes, shows and saves what they found."""

from __future__ import annotations

import argparse
import json
import os
import sys

from bagua_ext.bench import frameworks, machine, plot
from bagua_ext.bench.arguments import make_options, make_parser
from bagua_ext.bench.frameworks import FRAMEWORKS
from bagua_ext.bench.options import Options
from bagua_ext.bench.report import Report


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 0 if it measured and all results were right."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.plot:
        try:
            plot.require_matplotlib()
        except ValueError as error:
            parser.error(str(error))
    try:
        options = make_options(args)
    except ValueError as error:
        parser.error(str(error))
    _set_environment(options)
    try:
        report = _measure(options)
    except (RuntimeError, ValueError) as error:
        print(f"bagua-bench: {error}", file=sys.stderr)
        return 1
    if report is not None:
        _show(report, options, args)
    return 0


def _set_environment(options: Options) -> None:
    """Before anything loads a framework; what is started inherits it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name, value in FRAMEWORKS[options.framework].environment.items():
        os.environ.setdefault(name, value)


def _measure(options: Options) -> Report | None:
    """The report, or None on the ranks of a job that leave it to rank 0."""
    from bagua_ext.launch import Launcher, detect

    frameworks.require(options.framework)
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
    from bagua_ext.bench.external import EXTERNALS, External

    for name in options.compare:
        if name in EXTERNALS:
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
