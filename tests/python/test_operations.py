"""Operations and DistributedOptimizer on 1 to 4 ranks. The checks are in ``checks/``."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., Any]
LaunchRanks = Callable[..., "subprocess.CompletedProcess[str]"]

RANKS = (1, 2, 3, 4)


@pytest.mark.parametrize("ranks", RANKS)
def test_operations_give_the_values_of_their_definition(run_ranks: RunRanks, ranks: int) -> None:
    run_ranks("operations.py", ranks)


def test_operations_over_sockets(run_ranks: RunRanks) -> None:
    run_ranks("operations.py", 3, BAGUA_TRANSPORT="tcp")


@pytest.mark.parametrize("ranks", RANKS)
def test_training_equals_one_process_on_the_joined_batch(run_ranks: RunRanks, ranks: int) -> None:
    run_ranks("optimizer.py", ranks)


def test_training_over_sockets(run_ranks: RunRanks) -> None:
    run_ranks("optimizer.py", 2, BAGUA_TRANSPORT="tcp")


@pytest.mark.parametrize("ranks", RANKS)
def test_the_wrapper_is_an_optimizer_for_all_its_life(run_ranks: RunRanks, ranks: int) -> None:
    run_ranks("lifecycle.py", ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_process_sets_communicate_among_themselves(run_ranks: RunRanks, ranks: int) -> None:
    run_ranks("process_sets.py", ranks)


def test_process_sets_over_sockets(run_ranks: RunRanks) -> None:
    run_ranks("process_sets.py", 4, BAGUA_TRANSPORT="tcp")


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_with_uneven_data_join(run_ranks: RunRanks, ranks: int) -> None:
    run_ranks("join.py", ranks)


def test_ranks_with_uneven_data_join_over_sockets(run_ranks: RunRanks) -> None:
    run_ranks("join.py", 3, BAGUA_TRANSPORT="tcp")


@pytest.mark.parametrize("ranks", (2, 3))
def test_ranks_that_disagree_are_told_how_and_go_on(run_ranks: RunRanks, ranks: int) -> None:
    run_ranks("mismatches.py", ranks)


def test_compiled_graphs_and_modules(run_ranks: RunRanks) -> None:
    run_ranks("compiled.py", 2)


def test_the_launcher_starts_all_of_it(launch_ranks: LaunchRanks) -> None:
    job = launch_ranks("lifecycle.py", 2)
    assert "check_it_is_an_optimizer" in job.stdout
