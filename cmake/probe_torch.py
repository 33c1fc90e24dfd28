"""Prints where the running interpreter's torch is, as JSON: {"folder", "version"} or {"reason"}.

Also given to interpreters as text (python -c): it uses the standard library alone and does not
import torch, which takes a second and needs its libraries to load.
"""

import importlib.util
import json
import os
import re

OLDEST = (2, 10)  # torch/ops.cc passes strings through the stable ABI


def probe():
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:  # a folder of that name alone has no origin
        return {"reason": "torch is not installed"}
    folder = os.path.dirname(os.path.realpath(spec.origin))
    with open(os.path.join(folder, "version.py")) as file:
        version = re.search(r"__version__ = ['\"]([^'\"]+)", file.read()).group(1)
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return {"reason": f"torch {version} is too old, {oldest} is needed"}
    return {"folder": folder, "version": version}


print(json.dumps(probe()))
