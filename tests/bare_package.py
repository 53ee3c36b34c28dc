"""Imported first in a helper process: the package without what its __init__ imports.

The processes that only need the kernel cache would spend seconds each on importing torch.
"""

import importlib.util
import sys
import types

if "cutegemm" not in sys.modules:
    spec = importlib.util.find_spec("cutegemm")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("cutegemm is not on the path of this process")
    package = types.ModuleType("cutegemm")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["cutegemm"] = package
