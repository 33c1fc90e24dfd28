"""bagua-bench: measures this library beside others, alternating in one run, results checked.

Importing this package loads nothing of it. PyTorch or TensorFlow is loaded by the processes that
measure, never both.

    cli         arguments; starts the processes; prints, saves and plots
    job         one measuring process: what every case gets
    cases/, tensorflow_cases/   one file a subcommand, for either framework
    frameworks  what a run with a framework loads
    torch_session, tensorflow_session   prepare a rank
    training    what the training steps of all frameworks have in common
    measure     rounds in which the candidates alternate, and the check of their results
    report      samples, their statistics, the table
    shared      memory that all ranks map, and a barrier in it
    engine      the core's own calls, without a framework between
    gloo, mwms, external   the libraries compared with
"""

from __future__ import annotations

__all__ = ["main_entry"]


def main_entry() -> int:
    """Runs ``bagua-bench`` with ``sys.argv`` and returns its exit code."""
    from bagua_ext.bench.cli import main

    return main()
