"""The Keras layer and its example on 1 to 3 ranks, on TensorFlow and on PyTorch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., Any]

RANKS = (1, 2, 3)


@pytest.mark.parametrize("ranks", RANKS)
def test_training_equals_one_process_on_the_joined_batch(
    run_tf_ranks: RunRanks, ranks: int
) -> None:
    run_tf_ranks("keras_optimizer.py", ranks)


def test_compiled_training_equals_one_process(run_tf_ranks: RunRanks) -> None:
    run_tf_ranks("keras_fit.py", 2)


@pytest.mark.parametrize("ranks", RANKS)
def test_layers_see_the_joined_batch(run_tf_ranks: RunRanks, ranks: int) -> None:
    run_tf_ranks("keras_layers.py", ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_callbacks_do_what_their_names_say(run_tf_ranks: RunRanks, ranks: int) -> None:
    run_tf_ranks("keras_callbacks.py", ranks)


@pytest.mark.parametrize("ranks", (1, 2))
def test_saved_models_go_on_training(run_tf_ranks: RunRanks, ranks: int) -> None:
    run_tf_ranks("keras_saving.py", ranks)


@pytest.mark.parametrize("ranks", (1, 2))
def test_digits_reach_97_percent(run_tf_ranks: RunRanks, ranks: int, tmp_path: Path) -> None:
    curve = tmp_path / "curve.json"
    arguments = ("--epochs", "8", "--json", str(curve))
    outcome = run_tf_ranks("../../../examples/keras_digits.py", ranks, *arguments)
    learned = json.loads(curve.read_text())
    assert learned["accuracy"] >= 0.97
    assert len(learned["loss"]) == 8 and learned["loss"][-1] < 0.1 < learned["loss"][0]
    text = rf"\[0\] test accuracy {100 * learned['accuracy']:.1f} %, \d+ samples/s"
    assert any(re.fullmatch(text, line) for line in outcome.output.splitlines()), outcome.output


def test_all_of_it_on_pytorch(run_ranks: RunRanks) -> None:
    pytest.importorskip("keras")
    run_ranks("keras_on_torch.py", 2, KERAS_BACKEND="torch")
