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
    # The distribution may be called tensorflow, tensorflow-cpu, tf-nightly, ...
    names = importlib.metadata.packages_distributions().get("tensorflow", [])
    if not names:
        return {"reason": f"{spec.origin} belongs to no installed distribution"}
    version = importlib.metadata.version(names[0])
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return {"reason": f"tensorflow {version} is too old, {oldest} is needed"}
    return {"folder": os.path.dirname(os.path.realpath(spec.origin)), "version": version}


print(json.dumps(probe()))
