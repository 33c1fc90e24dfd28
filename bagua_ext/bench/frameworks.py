"""The frameworks whose binding can be measured, found without importing them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import bagua_ext


@dataclass(frozen=True)
class Framework:
    """What a run with this framework loads and compares with.

    ``libraries`` can be compared with, the first one by default. ``session`` is the module that
    prepares a rank, ``cases`` the package with one module a case. ``environment`` is what a run
    sets where the user has not, before anything loads the framework.
    """

    title: str
    libraries: tuple[str, ...]
    session: str
    cases: str
    environment: Mapping[str, str]


FRAMEWORKS: Mapping[str, Framework] = {
    "torch": Framework(
        title="PyTorch",
        libraries=("gloo", "mpi", "horovod"),
        session="bagua_ext.bench.torch_session",
        cases="bagua_ext.bench.cases",
        environment={},
    ),
    "tensorflow": Framework(
        title="TensorFlow",
        libraries=("mwms",),
        session="bagua_ext.bench.tensorflow_session",
        cases="bagua_ext.bench.tensorflow_cases",
        environment={"TF_CPP_MIN_LOG_LEVEL": "2"},
    ),
}


def require(name: str) -> None:
    """Raises ValueError unless the framework is installed and the binding for it is built.

    A folder of the framework's name can be imported without being the framework, so the package's
    file is looked for.
    """
    title = FRAMEWORKS[name].title
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"--framework {name}: {title} is not installed for {sys.executable}")
    library = Path(bagua_ext.__file__).parent / f"libbagua_{name}.so"
    if not library.exists():
        raise ValueError(
            f"--framework {name}: bagua_ext was built without {title} ({library} is missing). "
            f"Reinstall it beside {title}, from its sources: pip install --force-reinstall "
            "--no-deps ."
        )
