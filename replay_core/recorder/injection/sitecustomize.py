"""Put first on PYTHONPATH by `rldbg record`: starts the recorder in a Python that knows nothing of it.

Python imports a module of this name when it starts. One that the environment has of its own is run as well.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_environments_own() -> None:
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _start() -> None:
    # By its path: what else lies beside rldbg is not put before the script's own libraries.
    root = os.path.dirname(os.path.dirname(_HERE))
    if "replay_core" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "replay_core", os.path.join(root, "__init__.py"), submodule_search_locations=[root]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"rldbg is gone from {root}")
        package = importlib.util.module_from_spec(spec)
        sys.modules["replay_core"] = package
        spec.loader.exec_module(package)
    from replay_core.recorder.watching import start

    start()


_run_the_environments_own()
if os.environ.get("RLDBG_RECORD"):
    try:
        _start()
    except Exception as error:
        sys.stderr.write(f"rldbg: nothing is recorded: {error}\n")
