"""The command line of bagua-run."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bagua_ext.runner.environment import Meeting, rank_environment
from bagua_ext.runner.placement import (
    Host,
    ProcessSpec,
    Slot,
    assign_slots,
    parse_hostfile,
    parse_hosts,
)
from bagua_ext.runner.store import LOOPBACK, CoreStore, Store

SECRET_BYTES = 32
USAGE_CODE = 2

_DESCRIPTION = """\
Runs N copies of COMMAND as the ranks of one job. Several programs make one job with a colon:
  bagua-run -np 1 python a.py : -np 1 python b.py

Every line of output carries its rank. Rank 0 reads the standard input, the others /dev/null.
The exit code is that of the first rank that fails (128+n for signal n), 128+n if bagua-run itself
is ended by signal n, 127 if COMMAND does not exist, 2 for a wrong command line. When a rank fails,
the others are ended after the grace period, and nothing that a rank started outlives the job."""

_NOT_YET = {
    "several hosts": ("-p", "--ssh-port", "-i", "--ssh-identity-file", "--network-interface"),
    "elastic jobs": (
        "--min-np",
        "--max-np",
        "--host-discovery-script",
        "--slots-per-host",
        "--reset-limit",
        "--elastic-timeout",
    ),
    "timelines": ("--timeline-filename",),
    "configuration files": ("--config-file",),
}


class UsageError(ValueError):
    """The command line is wrong; the text says how."""


@dataclass(frozen=True)
class Program:
    """One part of the command line between colons."""

    count: int
    argv: Sequence[str]
    variables: dict[str, str]


StoreFactory = Callable[[int, bytes], Store]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _NotYet(argparse.Action):
    """An option of horovodrun for what is not there yet; ``dest`` names the feature."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        raise UsageError(f"{option_string}: {self.dest} are not supported yet")


def _positive_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _rank_count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes (1 or more)")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    """The options; the command is cut off before, see ``split_command``."""
    parser = _Parser(
        prog="bagua-run",
        usage="bagua-run -np N [options] COMMAND... [: -np N COMMAND...]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "-n", "--num-proc", type=_rank_count, metavar="N", help="number of processes")
    add(
        "-x",
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for the ranks",
    )
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="this host only, e.g. localhost:4")
    add("--hostfile", "-hostfile", metavar="FILE", help="lines HOST slots=N; this host only")
    add(
        "--output-filename",
        metavar="DIR",
        help="also writes the output as it comes to DIR/rank.N/stdout and stderr",
    )
    add(
        "--prefix-output-with-timestamp",
        "-prefix-output-with-timestamp",
        action="store_true",
        help="date and time before every line",
    )
    add(
        "--start-timeout",
        type=_positive_seconds,
        metavar="S",
        help="seconds in which all ranks must have called init",
    )
    add(
        "--grace-period",
        type=_positive_seconds,
        default=2.0,
        metavar="S",
        help="seconds that ranks get to end by themselves after a failure or SIGTERM (default 2)",
    )
    add("--verbose", action="store_true", help="says what is started and how it ends")
    add("-v", "--version", action="store_true", help="prints the version")
    add("-cb", "--check-build", action="store_true", help="prints what is built and usable")
    for feature, names in _NOT_YET.items():
        add(*names, dest=feature, action=_NotYet, help=argparse.SUPPRESS)
    return parser


def split_command(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Cuts ``words`` where the command begins: at the first word that is no option or value."""
    takes_value = {
        name: action.nargs != 0 for action in parser._actions for name in action.option_strings
    }
    index = 0
    while index < len(words):
        word = words[index]
        if word == "--":
            return list(words[:index]), list(words[index + 1 :])
        if not word.startswith("-"):
            break
        index += 2 if takes_value.get(word, False) else 1
    return list(words[:index]), list(words[index:])


def split_programs(words: Sequence[str]) -> list[list[str]]:
    """Cuts ``words`` at every lone colon."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == ":":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _read_variables(words: Sequence[str]) -> dict[str, str]:
    variables = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or "\0" in word:
            raise UsageError(f"argument -x/--env: {word!r} is not NAME or NAME=VALUE")
        if equals:
            variables[name] = value
        elif name not in os.environ:
            raise UsageError(f"argument -x/--env: {name} is not set; give {name}=VALUE")
    return variables


def _read_hosts(options: argparse.Namespace) -> list[Host] | None:
    if options.hosts and options.hostfile:
        raise UsageError("give either -H/--hosts or --hostfile")
    try:
        if options.hosts:
            hosts = parse_hosts(options.hosts)
        elif options.hostfile:
            hosts = parse_hostfile(Path(options.hostfile).read_text())
        else:
            return None
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    here = {"localhost", LOOPBACK, socket.gethostname()}
    for host in hosts:
        if host.name not in here:
            raise UsageError(f"host {host.name!r}: several hosts are not supported yet")
    if not hosts:
        raise UsageError(f"{options.hostfile}: no host in it")
    return [Host("localhost", sum(host.slots for host in hosts))]


def read_programs(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.Namespace, list[Program], list[Slot]]:
    """The options, what to run how many times, and the places.

    Raises:
        UsageError: if the words are wrong in themselves; nothing is looked up or started.
    """
    first, *rest = split_programs(words)
    head, command = split_command(parser, first)
    options = parser.parse_args(head)
    if options.version or options.check_build:
        return options, [], []
    hosts = _read_hosts(options)
    count = options.num_proc
    if count is None and hosts is not None and not rest:
        count = hosts[0].slots
    programs = [_program(count, command, options.env)]
    for part in rest:
        head, command = split_command(parser, part)
        own = parser.parse_args(head)
        if set(head) & {"-H", "--hosts", "--hostfile", "--output-filename"}:
            raise UsageError("after a colon only -np and -x may be given")
        programs.append(_program(own.num_proc, command, [*options.env, *own.env]))
    size = sum(program.count for program in programs)
    try:
        slots = assign_slots(hosts or [Host("localhost", size)], size)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return options, programs, slots


def _program(count: int | None, command: list[str], variables: list[str]) -> Program:
    if count is None:
        raise UsageError("the number of processes is missing: -np N")
    if not command:
        raise UsageError("the command to run is missing")
    return Program(count, command, _read_variables(variables))


def _find_commands(programs: Sequence[Program]) -> int:
    """0, or the exit code that says what is wrong with the first command that cannot be run."""
    for program in programs:
        name = program.argv[0]
        path = program.variables.get("PATH", os.environ.get("PATH"))
        if shutil.which(name, path=path) is not None:
            continue
        if os.path.exists(name) and os.sep in name:
            _complain(f"{name}: not an executable file")
            return 126
        _complain(f"{name}: command not found")
        return 127
    return 0


def _complain(text: str) -> None:
    print(f"bagua-run: {text}", file=sys.stderr)


def _occupy_standard_descriptors() -> None:
    """Where one was closed, a file opened later would take its place and get the output."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _secret_descriptor(secret: bytes) -> int:
    fd = os.memfd_create("bagua-secret", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, secret)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def main(argv: Sequence[str] | None = None, store_factory: StoreFactory = CoreStore) -> int:
    """Runs ``bagua-run`` with ``argv`` (default: ``sys.argv[1:]``) and returns its exit code.

    To be called on the main thread of a process of its own: it takes over signals and children.
    """
    _occupy_standard_descriptors()
    parser = make_parser()
    try:
        options, programs, slots = read_programs(
            parser, sys.argv[1:] if argv is None else list(argv)
        )
    except UsageError as error:
        print(f"{parser.format_usage()}bagua-run: error: {error}", file=sys.stderr)
        return USAGE_CODE
    if options.version or options.check_build:
        from bagua_ext.runner import build_report

        print(build_report.report() if options.check_build else build_report.version())
        return 0
    code = _find_commands(programs)
    if code:
        return code
    try:
        return _run_job(options, programs, slots, store_factory)
    except KeyboardInterrupt:  # before the job took over the signals
        return 128 + signal.SIGINT


def _run_job(
    options: argparse.Namespace,
    programs: Sequence[Program],
    slots: Sequence[Slot],
    store_factory: StoreFactory,
) -> int:
    from bagua_ext.runner.job import Job, JobOptions
    from bagua_ext.runner.local_launcher import LocalLauncher

    job_id, secret = os.urandom(16).hex(), os.urandom(SECRET_BYTES)
    secret_fd = _secret_descriptor(secret)
    launcher = LocalLauncher(job_id, (secret_fd,))
    try:
        store = store_factory(len(slots), secret)
    except (ImportError, RuntimeError) as error:
        _complain(f"{error}\nbagua-run needs bagua_ext's core; see bagua-run --check-build")
        return 1
    try:
        meeting = Meeting(
            job_id=job_id,
            rendezvous=store.address,
            secret_fd=secret_fd,
            master_address=LOOPBACK,
            master_port=_free_port(),
            cores=len(os.sched_getaffinity(0)),
            start_timeout_seconds=options.start_timeout,
        )
        job_options = JobOptions(
            output_directory=Path(options.output_filename) if options.output_filename else None,
            timestamps=options.prefix_output_with_timestamp,
            grace_seconds=options.grace_period,
            verbose=options.verbose,
        )
        specs = _process_specs(programs, slots, meeting)
        code = Job(specs, launcher, store, job_options).run()
    finally:
        store.stop()
    # Not on the way of an exception: then the guard ends what still runs.
    launcher.close()
    return code


def _process_specs(
    programs: Sequence[Program], slots: Sequence[Slot], meeting: Meeting
) -> list[ProcessSpec]:
    of_rank = [program for program in programs for _ in range(program.count)]
    return [
        ProcessSpec(
            slot, program.argv, rank_environment({**os.environ, **program.variables}, slot, meeting)
        )
        for slot, program in zip(slots, of_rank, strict=True)
    ]
