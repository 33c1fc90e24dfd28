"""``bagua_ext.run``: a function on N processes, its results by rank."""

from __future__ import annotations

import importlib.util
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

CALL_FILE = "call"
RESULT_FILE = "result"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 2,
    *,
    env: Mapping[str, str] | None = None,
    output_filename: str | None = None,
    start_timeout: float | None = None,
    verbose: bool = False,
) -> list[Any]:
    """Calls ``func(*args, **kwargs)`` in ``np`` new processes; returns their results by rank.

    Where cloudpickle is installed, any function can be sent; otherwise one that can be imported by
    its module and name, which excludes those of ``__main__``. Arguments and results are pickled.
    They travel through files that only this user can read and that are removed at the end.
    Output appears as that of ``bagua-run``; its launcher is a child of this process.

    Raises:
        ValueError: if ``np`` is below 1, or ``func`` or an argument cannot be sent.
        RuntimeError: if a rank fails; the text has its traceback where it raised.
    """
    if np < 1:
        raise ValueError(f"np must be at least 1, not {np}")
    call = _dump_call(func, args, kwargs)
    # mkdtemp gives 0700, so nobody else reads or plants a file in it.
    with tempfile.TemporaryDirectory(prefix="bagua-run-") as name:
        directory = Path(name)
        (directory / CALL_FILE).write_bytes(call)
        command = [sys.executable, "-m", "bagua_ext.runner", "-np", str(np)]
        for key, value in (env or {}).items():
            command += ["-x", f"{key}={value}"]
        if output_filename is not None:
            command += ["--output-filename", output_filename]
        if start_timeout is not None:
            command += ["--start-timeout", f"{start_timeout:g}"]
        if verbose:
            command.append("--verbose")
        command += [sys.executable, "-m", "bagua_ext.runner.callee", name]
        code = _launch(command)
        return _collect(directory, np, code)


def _dump_call(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bytes:
    dumps: Callable[[Any], bytes] = pickle.dumps
    advice = "install cloudpickle to send functions that cannot be imported"
    if importlib.util.find_spec("cloudpickle") is not None:
        import cloudpickle

        dumps, advice = cloudpickle.dumps, "pass what can be pickled"
    elif getattr(func, "__module__", None) == "__main__":
        raise ValueError(f"{func!r} is defined in __main__: put it into a module, or {advice}")
    try:
        return dumps((list(sys.path), dumps((func, tuple(args), dict(kwargs or {})))))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{func!r} or an argument cannot be sent: {error}; {advice}") from error


def _launch(command: Sequence[str]) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        return process.wait()
    except BaseException:  # KeyboardInterrupt above all: nothing may stay behind
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise


def _collect(directory: Path, np: int, code: int) -> list[Any]:
    results: list[Any] = []
    errors: list[str] = []
    for rank in range(np):
        path = directory / f"{RESULT_FILE}.{rank}"
        if not path.exists():
            continue
        succeeded, value = pickle.loads(path.read_bytes())
        if succeeded:
            results.append(value)
        else:
            errors.append(f"rank {rank} raised\n{value}")
    if code != 0 or errors or len(results) != np:
        # A rank that lost another one tells less than the one that was lost.
        errors.sort(key=lambda text: "PeerLostError" in text)
        told = errors[0] if errors else "see the output above"
        raise RuntimeError(f"the job of {np} ranks failed with exit code {code}: {told}")
    return results
