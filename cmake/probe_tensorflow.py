"""Prints where the running interpreter's TensorFlow is, as JSON: {"folder", "version"} or
{"reason"}.

Also given to interpreters as text (python -c): it uses the standard library alone and does not
import TensorFlow, which takes seconds and needs its libraries to load.
"""

import importlib.metadata
import importlib.util
import json
import os
import re

OLDEST = (2, 16)  # the first with Keras 3


def probe():
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:  # a folder of that name alone has no origin
        return {"reason": "tensorflow is not installed"}
    folder = os.path.dirname(os.path.realpath(spec.origin))
    # The distribution may be called tensorflow, tensorflow-cpu, tf-nightly, ...
    version = version_beside(os.path.dirname(folder))
    if version is None:
        return {"reason": f"{spec.origin} belongs to no installed distribution"}
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return {"reason": f"tensorflow {version} is too old, {oldest} is needed"}
    header = os.path.join(folder, "include/tensorflow/core/framework/op_kernel.h")
    if not os.path.exists(header):
        return {"reason": f"tensorflow {version} came without its headers ({header})"}
    return {"folder": folder, "version": version}


def version_beside(site):
    """The version of the distribution in folder ``site`` that holds tensorflow/__init__.py."""
    for distribution in importlib.metadata.distributions(path=[site]):
        files = distribution.read_text("RECORD") or distribution.read_text("top_level.txt") or ""
        if re.search(r"^tensorflow(/__init__\.py,|$)", files, re.MULTILINE):
            return distribution.version
    return None


print(json.dumps(probe()))
