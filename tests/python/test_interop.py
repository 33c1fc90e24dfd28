"""Ranks of torch and of Keras in one job. The checks are in ``checks/interop_*.py``."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagua_ext.interop import handshake, optimizers
from bagua_ext.interop.handshake import Described, Report
from bagua_ext.interop.layout import Layout
from bagua_ext.interop.listing import Layer, number_layers

RunRanks = Callable[..., Any]

CHECKS = Path(__file__).resolve().parent / "checks"
EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
DEADLINE_SECONDS = 180.0
OUTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TORCH = {"INTEROP_FRAMEWORK": "torch"}
KERAS_ON_TORCH = {"INTEROP_FRAMEWORK": "keras", "KERAS_BACKEND": "torch"}
KERAS_ON_TENSORFLOW = {"INTEROP_FRAMEWORK": "keras", "KERAS_BACKEND": "tensorflow"}


def is_installed(name: str) -> bool:
    # A folder of that name can be imported as well.
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


needs_keras = pytest.mark.skipif(not is_installed("keras"), reason="Keras is not installed")
needs_tensorflow = pytest.mark.skipif(
    not (is_installed("keras") and is_installed("tensorflow")), reason="TensorFlow is not installed"
)


def test_the_import_alone_brings_no_framework() -> None:
    script = (
        "import sys, bagua_ext.interop, bagua_ext.objects\n"
        "print({'torch', 'tensorflow', 'keras'} & set(sys.modules))"
    )
    job = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert job.stdout == "set()\n", job.stdout + job.stderr


# ---- Layouts ------------------------------------------------------------------------------------

LAYOUTS = {
    "same": Layout.same((2, 3)),
    "transposed": Layout((3, 2), (2, 3), (1, 0)),
    "kernel": Layout((5, 4, 2, 3), (2, 3, 4, 5), (3, 2, 0, 1)),
    "flattened": Layout((5, 24), (2, 3, 4, 5), (3, 2, 0, 1)),
    "gates": Layout((6, 4), (4, 3, 2), (1, 2, 0), (1, 0, 2)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_layout_is_undone_by_its_inverse(layout: Layout) -> None:
    own = np.arange(float(np.prod(layout.split)))
    canonical = layout.to_canonical(own)
    assert canonical.shape == layout.shape
    assert layout.is_same == np.array_equal(canonical.reshape(-1), own)
    np.testing.assert_array_equal(layout.from_canonical(canonical, own.shape), own)


def test_gates_change_places_as_a_gru_needs() -> None:
    # Keras keeps (in, z r h), torch (r z n, in).
    own = np.array([["z0", "z1", "r0", "r1", "h0", "h1"]])
    layout = Layout((6, 1), (1, 3, 2), (1, 2, 0), (1, 0, 2))
    assert layout.to_canonical(own).T.tolist() == [["r0", "r1", "z0", "z1", "h0", "h1"]]


# ---- Names --------------------------------------------------------------------------------------


def layer(kind: str, own: str, *holders: Any) -> Layer:
    made = Layer(kind, own)
    for name, holder in zip(("kernel", "bias"), holders, strict=False):
        made.add(name, f"{own}.{name}", holder, Layout.same(holder.shape))
    return made


def test_tensors_are_named_by_the_place_and_kind_of_their_layers() -> None:
    arrays = [np.ones(2) for _ in range(3)]
    layers = [layer("conv2d", "a", *arrays[:2]), layer("dense", "b", arrays[2])]
    names = [entry.name for entry in number_layers(layers, None).entries]
    assert names == ["000.conv2d.bias", "000.conv2d.kernel", "001.dense.kernel"]


def test_named_and_left_out_layers_are_not_counted() -> None:
    layers = [layer("dense", own, np.ones(2), np.ones(2)) for own in ("a", "b", "c", "d")]
    listing = number_layers(layers, {"a": None, "c": "head", "d.bias": "own"})
    names = [entry.name for entry in listing.entries]
    assert names == [
        *("000.dense.bias", "000.dense.kernel", "001.dense.kernel"),
        *("head.bias", "head.kernel", "own"),
    ]


def test_a_shared_tensor_is_listed_once_and_told() -> None:
    shared = np.ones(2)
    layers = [layer("embedding", "a", shared), layer("dense", "b", shared, np.ones(2))]
    listing = number_layers(layers, None)
    assert [entry.name for entry in listing.entries] == ["000.embedding.kernel", "001.dense.bias"]
    assert listing.settings == {"001.dense.kernel.shared_with": "000.embedding.kernel"}


def test_names_that_clash_or_fit_nothing_are_refused() -> None:
    layers = [layer("dense", own, np.ones(2)) for own in ("a", "b")]
    with pytest.raises(ValueError, match="'b.kernel' and 'a.kernel' are both named 'x.kernel'"):
        number_layers(layers, {"a": "x", "b": "x"})
    with pytest.raises(ValueError, match="the model has no 'c'"):
        number_layers(layers, {"c": "x"})


# ---- Optimizers ---------------------------------------------------------------------------------


class FakeKerasOptimizer:
    """As much of a Keras optimizer as is asked for."""

    def __init__(self, **config: Any) -> None:
        self.learning_rate = config["learning_rate"]
        self.get_config = lambda: config


def of_keras(kind: str, decays: bool = True, **config: Any) -> dict[str, Any]:
    made = type(kind, (FakeKerasOptimizer,), {})(**config)
    return optimizers.of_keras(made, decays)


def test_equal_optimizers_have_equal_settings_in_both_frameworks() -> None:
    torchs = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": True}
    keras = {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": None}
    assert optimizers.of_torch("SGD", torchs) == of_keras("SGD", name="sgd", clipnorm=None, **keras)
    torchs = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-7, "weight_decay": 0.01, "amsgrad": False}
    keras = {"learning_rate": 0.1, "beta_1": 0.9, "beta_2": 0.99, "epsilon": 1e-7}
    keras |= {"weight_decay": 0.01, "amsgrad": False}
    assert optimizers.of_torch("AdamW", torchs) == of_keras("AdamW", **keras)
    assert optimizers.of_torch("AdamW", torchs) == of_keras("Adam", **keras)


def test_weight_decay_that_acts_otherwise_has_another_name() -> None:
    group = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    assert optimizers.of_torch("SGD", group)["weight_decay_in_gradient"] == 0.01
    assert optimizers.of_torch("SGD", group | {"momentum": 0})["weight_decay"] == 0.01
    assert optimizers.of_torch("Adam", group)["weight_decay_in_gradient"] == 0.01
    decoupled = optimizers.of_torch("Adam", group | {"decoupled_weight_decay": True})
    assert decoupled["weight_decay"] == 0.01


def test_an_epsilon_under_the_root_is_not_one_beside_it() -> None:
    torchs = optimizers.of_torch("RMSprop", {"lr": 0.1, "alpha": 0.9, "eps": 1e-7})
    keras = of_keras("RMSprop", learning_rate=0.1, rho=0.9, epsilon=1e-7)
    assert torchs["rho"] == keras["rho"] and torchs["kind"] == keras["kind"]
    assert torchs["epsilon"] == keras["epsilon_under_root"] and "epsilon" not in keras


def test_an_unknown_optimizer_is_compared_by_its_class_and_numbers() -> None:
    settings = optimizers.of_torch("Lamb", {"params": [], "lr": 0.1, "trust": 2, "way": object})
    assert settings["kind"] == "Lamb" and settings["trust"] == 2 and "params" not in settings


def test_settings_of_single_tensors_are_told_apart() -> None:
    each = {"a": {"rate": 1, "decay": 2}, "b": {"rate": 1}}
    assert optimizers.summary(each) == {"optimizer.rate": 1, "a: decay": 2}


# ---- The handshake ------------------------------------------------------------------------------

KERNEL = Described("0.weight", "float32", (4, 1, 3, 3), (4, 1, 3, 3), True)
OF_TORCH = Report("torch", {"000.conv2d.kernel": KERNEL}, {"optimizer.learning_rate": 0.1})
OF_KERAS = Report(
    "keras on tensorflow",
    {"000.conv2d.kernel": replace(KERNEL, own="conv2d/kernel", shape=(3, 3, 1, 4))},
    {"optimizer.learning_rate": float(np.float32(0.1))},
)


def test_reports_that_differ_in_layout_and_rounding_agree() -> None:
    assert handshake.complaint([OF_TORCH, OF_KERAS], [0, 1]) == ""
    assert handshake.torch_is_canonical([OF_KERAS, OF_TORCH])
    assert not handshake.torch_is_canonical(
        [OF_KERAS, replace(OF_KERAS, framework="keras on torch")]
    )


def test_the_table_shows_each_framework_and_joins_ranks_that_agree() -> None:
    other = replace(OF_TORCH, settings={"optimizer.learning_rate": 0.2})
    text = handshake.complaint([OF_TORCH, OF_TORCH, OF_KERAS, other], [0, 1, 4, 7])
    lines = [line.split() for line in text.splitlines()]
    assert lines[1] == ["ranks", "0-1", "(torch)", "rank", "4", "(keras", "on", "tensorflow)"] + [
        *("rank", "7", "(torch)")
    ]
    assert lines[2] == ["optimizer.learning_rate", "0.1", "0.1", "0.2"]
    assert len(lines) == 4 and "names=" in text and "allow=" in text


def test_facts_are_compared_where_both_know_them() -> None:
    known = [replace(OF_TORCH, facts={"000.conv2d.padding": [(side, 1)]}) for side in (0, 1)]
    rows = handshake.differences([*known, OF_KERAS])
    assert rows == [("000.conv2d.padding", ["[(0, 1)]", "[(1, 1)]", "nothing"])]
    assert handshake.differences([known[0], OF_KERAS]) == []
    assert handshake.differences(known, ["*.padding"]) == []


def test_layers_outside_the_table_matter_in_mixed_jobs_alone() -> None:
    unknown = replace(OF_TORCH, problems=["layer 'x' is not shared"])
    assert handshake.complaint([unknown, unknown], [0, 1]) == ""
    text = handshake.complaint([OF_KERAS, unknown], [0, 1])
    assert "rank 1: layer 'x' is not shared" in text


# ---- Layers -------------------------------------------------------------------------------------


@needs_keras
def test_each_layer_is_the_same_in_torch_and_in_keras_on_torch(run_ranks: RunRanks) -> None:
    run_ranks("interop_layers.py", 1, **KERAS_ON_TORCH)


@needs_tensorflow
def test_each_layer_is_the_same_in_torch_and_in_keras_on_tensorflow(
    run_tf_ranks: RunRanks,
) -> None:
    run_tf_ranks("interop_layers.py", 1)


# ---- Jobs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_objects_travel_without_a_framework(ranks: int, run_ranks: RunRanks) -> None:
    run_ranks("interop_objects.py", ranks)


@pytest.mark.parametrize("ranks", (2, 3))
def test_torch_models_are_tied(ranks: int, run_ranks: RunRanks) -> None:
    run_ranks("interop_jobs.py", ranks, **TORCH)


@needs_tensorflow
def test_keras_models_on_tensorflow_are_tied(run_tf_ranks: RunRanks) -> None:
    run_tf_ranks("interop_jobs.py", 2, **KERAS_ON_TENSORFLOW)


def launch(folder: Path, *ranks: list[str]) -> str:
    """Runs a job of one rank for each of the commands ``ranks``; returns what it printed."""
    kept = {k: v for k, v in os.environ.items() if k not in OUTER and not k.startswith("BAGUA_")}
    command = [sys.executable, "-m", "bagua_ext.runner"]
    for number, own in enumerate(ranks):
        command += [*([":"] if number else []), "-np", "1", *own]
    job = subprocess.run(
        command,
        env={**kept, "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=DEADLINE_SECONDS,
    )
    assert job.returncode == 0, job.stdout[-8000:]
    return job.stdout


def with_checks(framework: dict[str, str], *checks: str) -> list[str]:
    """The command of a rank that runs ``interop_jobs.py``."""
    settings = [f"{name}={value}" for name, value in framework.items()]
    return ["env", *settings, sys.executable, str(CHECKS / "interop_jobs.py"), *checks]


@needs_tensorflow
def test_models_of_torch_and_of_keras_on_both_backends_are_tied(tmp_path: Path) -> None:
    launch(tmp_path, *map(with_checks, [TORCH, KERAS_ON_TENSORFLOW, KERAS_ON_TORCH]))


@needs_tensorflow
def test_keras_models_on_both_backends_are_tied_in_their_own_layout(tmp_path: Path) -> None:
    trained = ("convolutions", "recurrent_layers")
    checks = [f"check_{layers}_are_trained_as_by_one_process" for layers in trained]
    checks.append("check_several_backwards_make_one_step")
    ranks = [KERAS_ON_TENSORFLOW, KERAS_ON_TORCH, KERAS_ON_TORCH]
    launch(tmp_path, *(with_checks(framework, *checks) for framework in ranks))


@needs_tensorflow
def test_the_digits_are_learned_by_both_frameworks_with_the_same_weights(tmp_path: Path) -> None:
    scripts = [EXAMPLES / f"mixed_digits_{framework}.py" for framework in ("torch", "tf")]
    output = launch(tmp_path, *([sys.executable, str(script)] for script in scripts))
    told = re.search(r"largest difference (\S+), test accuracy (\S+) %", output)
    assert told is not None, output
    assert 0 < float(told[1]) <= 1e-6 and float(told[2]) >= 90
