"""TensorFlow's operations, graphs, tapes and optimizers. The checks are in ``checks/``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., Any]


@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_operations_give_the_values_of_their_definition(run_tf_ranks: RunRanks, ranks: int) -> None:
    run_tf_ranks("tensorflow_operations.py", ranks)


def test_operations_over_sockets(run_tf_ranks: RunRanks) -> None:
    run_tf_ranks("tensorflow_operations.py", 2, BAGUA_TRANSPORT="tcp")


@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_graphs_and_gradients(run_tf_ranks: RunRanks, ranks: int) -> None:
    run_tf_ranks("tensorflow_graphs.py", ranks)


@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_training_equals_one_process_on_the_joined_batch(
    run_tf_ranks: RunRanks, ranks: int
) -> None:
    run_tf_ranks("tensorflow_tape.py", ranks)


def test_process_sets_and_join(run_tf_ranks: RunRanks) -> None:
    run_tf_ranks("tensorflow_sets.py", 3)
