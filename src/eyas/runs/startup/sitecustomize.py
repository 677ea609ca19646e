"""Python imports this at start-up in every child of a run, because the run puts this folder on PYTHONPATH.

It joins the child to the run's logs, then hands on to the sitecustomize that this one stands in front of, if there is one.
"""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_root = os.path.dirname(os.path.dirname(os.path.dirname(_here)))

if os.environ.get("EYAS_RUN_DIR") and "EYAS_KEEPER_OF" not in os.environ:
    _added = _root not in sys.path
    if _added:
        sys.path.append(_root)
    try:
        from eyas.runs.logs import auto_attach

        auto_attach()
    except Exception as _error:  # noqa: BLE001 - a child must start even where its log cannot be kept; it says so
        sys.stderr.write(f"eyas: this process could not join its run's logs: {_error!r}\n")

_others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
