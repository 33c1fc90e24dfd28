"""bagua-bench measures every case, checks what it measured, and saves it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua_ext
from bagua_ext.bench import frameworks
from bagua_ext.bench.arguments import make_options, make_parser
from bagua_ext.bench.measure import Candidate, Pattern, WrongResultError, alternate, repeats_within
from bagua_ext.bench.report import Report, Row
from bagua_ext.bench.sizes import format_size, parse_size, parse_sizes

DEADLINE_SECONDS = 120.0
OUTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in OUTER and not k.startswith("BAGUA_")}
    return subprocess.run(
        [sys.executable, "-m", "bagua_ext.bench", *arguments],
        env={**kept, "XDG_CONFIG_HOME": str(folder / "config")},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECONDS,
    )


def measured(folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """The output of a run that must succeed, and the content of its --json file."""
    done = bench(folder, *arguments, "--json", "bench.json")
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout, json.loads((folder / "bench.json").read_text())


def forbid(folder: Path, module: str) -> None:
    """Makes importing ``module`` fail in what is run in ``folder``."""
    (folder / module).mkdir()
    (folder / module / "__init__.py").write_text(f"raise RuntimeError('{module} was imported')\n")


def has(framework: str) -> bool:
    spec = importlib.util.find_spec(framework)  # a folder of that name can be imported as well
    return spec is not None and spec.origin is not None


needs_tensorflow = pytest.mark.skipif(not has("tensorflow"), reason="TensorFlow is not installed")


def names(content: dict[str, Any]) -> list[str]:
    return [row["candidate"] for row in content["rows"]]


# ---- Whole runs ----------------------------------------------------------------------------------


def test_allreduce_is_measured_beside_gloo_and_a_bare_loop(tmp_path: Path) -> None:
    sizes = ["--sizes", "4,4004,256K", "--rounds", "2", "--warmup", "1"]
    text, content = measured(tmp_path, "allreduce", *sizes, "--plot", "bench.png")
    ways = ["bagua, flat bucket", "bagua, tensor", "bare loop", "gloo"]
    assert names(content) == ways * 3
    for title in ("machine", "build", "configuration", "measured"):
        assert f"\n# {title}: " in f"\n{text}"
        assert content["header"][title]
    row = content["rows"][-4]
    assert row["bytes"] == 256 << 10 and len(row["samples_ms"]) == 2 * 16
    assert row["algorithm_GBps"] == pytest.approx(row["bytes"] / row["median_ms"] / 1e6)
    assert row["bus_GBps"] == pytest.approx(row["algorithm_GBps"])  # 2 (n - 1) / n of two ranks
    assert set(row["speed"]) == {"gloo", "bare loop"}
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_latency_is_measured_on_three_ranks_and_without_peers(tmp_path: Path) -> None:
    forbid(tmp_path, "tensorflow")
    sizes = ["--sizes", "4K", "--rounds", "1", "--warmup", "0", "--compare", "none", "--bind"]
    text, content = measured(tmp_path, "latency", "-np", "3", *sizes)
    assert content["size"] == 3
    assert names(content) == ["bagua, Python", "bagua, C call", "bagua, flat bucket"]
    assert "3 ranks, one thread each, bound to cores" in text


def test_many_tensors_are_measured_by_themselves_grouped_and_packed(tmp_path: Path) -> None:
    sizes = ["--tensors", "7", "--numel", "11", "--rounds", "2", "--warmup", "1"]
    _, content = measured(tmp_path, "many", *sizes)
    assert names(content) == [
        "bagua, one by one",
        "bagua, grouped",
        "gloo, one by one",
        "gloo, coalesced",
        "gloo, packed by hand",
    ]


def test_training_is_measured_beside_ddp(tmp_path: Path) -> None:
    sizes = ["--parameters", "20000", "--batches", "1,3", "--rounds", "3", "--warmup", "1"]
    text, content = measured(tmp_path, "train", *sizes)
    assert names(content) == ["no exchange", "bagua", "gloo, DDP"] * 2
    assert "of bytes before backward ended" in text


@needs_tensorflow
def test_tensorflows_allreduce_is_measured_beside_the_c_call_without_torch(tmp_path: Path) -> None:
    forbid(tmp_path, "torch")
    sizes = ["--sizes", "4,4004", "--rounds", "2", "--warmup", "1", "--compare", "none"]
    text, content = measured(tmp_path, "allreduce", "--framework", "tensorflow", *sizes)
    assert names(content) == ["bagua, eager", "bagua, tf.function", "bagua, C call"] * 2
    assert [len(row["samples_ms"]) for row in content["rows"]] == [2 * 16] * 6
    assert "32 operations in one traced function" in text
    assert "Over the C call at 4 B: bagua, eager " in text
    assert "tensorflow" in content["header"]["versions"]


@needs_tensorflow
def test_tensorflows_many_tensors_are_measured_beside_its_own_strategy(tmp_path: Path) -> None:
    sizes = ["--tensors", "7", "--numel", "11", "--rounds", "2", "--warmup", "0"]
    _, content = measured(tmp_path, "many", "--framework", "tensorflow", *sizes)
    assert names(content) == [
        "bagua, one by one",
        "bagua, one by one in a tf.function",
        "bagua, grouped",
        "bagua, grouped in a tf.function",
        "mwms",
    ]
    assert content["rows"][2]["speed"].keys() == {"mwms"}


@needs_tensorflow
def test_tensorflows_training_is_measured_beside_a_step_without_exchange(tmp_path: Path) -> None:
    sizes = ["--parameters", "20000", "--batches", "3", "--rounds", "3", "--warmup", "1"]
    arguments = ["--framework", "tensorflow", "--compare", "none", *sizes]
    text, content = measured(tmp_path, "train", *arguments)
    assert names(content) == ["no exchange", "bagua"]
    assert ", floor " in content["rows"][1]["note"]


def test_idle_and_waiting_ranks_are_measured(tmp_path: Path) -> None:
    _, content = measured(tmp_path, "idle", "--seconds", "0.05", "--rounds", "2")
    assert names(content) == ["idle", "waiting for a late rank"]


def test_start_up_is_measured(tmp_path: Path) -> None:
    _, content = measured(tmp_path, "startup", "--rounds", "1", "--compare", "none")
    assert names(content)[-1] == "bagua, both"


def test_a_library_that_is_not_there_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    done = bench(tmp_path, "latency", "--compare", "mpi", "--mpi-python", sys.executable + "-none")
    assert done.returncode == 1
    assert "mpi4py is not installed for " in done.stdout and "--mpi-python" in done.stdout


# ---- Parts ---------------------------------------------------------------------------------------


def test_candidates_take_turns_and_each_begins_a_round() -> None:
    turns: list[str] = []

    def candidate(name: str) -> Candidate:
        return Candidate(name, lambda: None, lambda: turns.append(name), lambda _: None)

    seconds = alternate(
        [candidate(name) for name in "abc"], lambda: None, rounds=2, warmup=1, repeats=1
    )
    assert "".join(turns) == "abc" + "bca" + "cab"
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 2, "b": 2, "c": 2}


def test_a_wrong_result_ends_the_run_even_in_warm_up() -> None:
    pattern, data = Pattern(1000, rank=0, size=2), np.empty(1000, np.float32)
    forgetful = Candidate(
        "forgetful",
        prepare=lambda: np.copyto(data, pattern.input),
        run=lambda: np.multiply(data[:-1], 1.5, out=data[:-1]),
        check=lambda _: pattern.check_average("forgetful", data),
    )
    with pytest.raises(WrongResultError, match="forgetful: 1 of 1000 .* element 999 is 1000.0"):
        alternate([forgetful], lambda: None, rounds=1, warmup=1)


def test_what_is_no_number_is_no_result() -> None:
    pattern = Pattern(10, rank=0, size=1)
    data = pattern.input.copy()
    data[3] = np.nan
    with pytest.raises(WrongResultError, match="broken: 1 of 10 .* element 3 is nan, not 4.0"):
        pattern.check_average("broken", data)


def test_operations_of_one_run_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter((10.0, 18.0, 20.0, 20.5))
    monkeypatch.setattr("bagua_ext.bench.measure.time.perf_counter", lambda: next(ticks))
    chained = Candidate("chained", lambda: None, lambda: None, lambda _: None, operations=4)
    seconds = alternate([chained], lambda: None, rounds=2, warmup=0)
    assert seconds == {"chained": [2.0, 0.125]}


@pytest.mark.parametrize("size", (1, 2, 3, 1000))
def test_repeated_sums_stay_finite(size: int) -> None:
    repeats = repeats_within(64, size)
    assert 1 <= repeats <= 64
    pattern = Pattern(9000, rank=size - 1, size=size)
    pattern.check_sum(
        "sums", pattern.input * ((size + 1) / 2 / size * float(size) ** repeats), repeats
    )


def test_figures_are_those_of_their_definitions() -> None:
    row = Row("1 MiB", "fast", [0.004, 0.001, 0.002, 0.003], bytes=1 << 20)
    slow = Row("1 MiB", "slow", [0.01], bytes=1 << 20)
    report = Report("allreduce", 4, ("slow",), [row, slow])
    assert (row.median, row.p90) == (0.0025, 0.004)
    assert row.bus_bandwidth(4) == pytest.approx(1.5 * (1 << 20) / 0.0025)
    assert report.speed(row, "slow") == pytest.approx(4)
    assert report.speed(row, "absent") is None
    header, first, second = report.table().splitlines()
    assert header.split() == [
        *("allreduce", "candidate", "median", "ms", "p90", "ms"),
        *("alg", "GB/s", "bus", "GB/s", "x", "slow", "rounds"),
    ]
    assert first.split() == ["1", "MiB", "fast", "2.5", "4", "0.419", "0.629", "4", "4"]
    assert second.split()[-2:] == ["1", "1"]


@pytest.mark.parametrize(
    ("text", "size"), (("512", 512), ("4K", 4096), ("64M", 64 << 20), ("1GiB", 1 << 30))
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_sizes(f"{text},4") == (size, 4)
    assert parse_size(format_size(size).replace(" ", "")) == size


@pytest.mark.parametrize("text", ("", "0", "-4", "6", "4T", "K", "1.5M"))
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="'"):
        parse_size(text)


@pytest.mark.parametrize(
    "arguments", (["many", "--compare", "mpi"], ["allreduce", "--rounds", "0"], [])
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(arguments)
    assert "bagua-bench" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("framework", "compared", "known"),
    (("torch", "mwms", "gloo"), ("tensorflow", "gloo", "mwms")),
)
def test_each_framework_is_compared_with_its_own_libraries(
    framework: str, compared: str, known: str
) -> None:
    arguments = ["many", "--framework", framework]
    assert make_options(make_parser().parse_args(arguments)).compare == (known,)
    wrong = make_parser().parse_args([*arguments, "--compare", compared])
    with pytest.raises(
        ValueError, match=f"'{compared}' .* under --framework {framework}; .*{known}"
    ):
        make_options(wrong)


@pytest.mark.parametrize("framework", ("torch", "tensorflow"))
def test_a_framework_that_is_not_there_is_named(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / framework).mkdir()  # can be imported, but is not the framework
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, framework, raising=False)
    with pytest.raises(ValueError, match=f"--framework {framework}: .* is not installed for"):
        frameworks.require(framework)


@pytest.mark.parametrize("framework", ("torch", "tensorflow"))
def test_a_binding_that_was_not_built_is_named(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(tmp_path, framework)  # found without being imported
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, framework, raising=False)
    monkeypatch.setattr(bagua_ext, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(ValueError, match=f"built without .*libbagua_{framework}.so is missing"):
        frameworks.require(framework)
