"""The message classes of the Core ML model file, without importing all of coremltools.

`import coremltools` also imports every front end it finds installed (seconds, and gigabytes of
torch), while only its generated protobuf modules are needed to read a file.
"""

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

_PACKAGE = "_ss_convert_coremltools_proto"


@cache
def model_messages() -> ModuleType:
    """The module `Model_pb2` of the installed coremltools."""
    loaded = sys.modules.get("coremltools.proto.Model_pb2")
    if loaded is not None:
        return loaded
    found = importlib.util.find_spec("coremltools")
    if found is None or found.origin is None:
        raise ImportError("coremltools is needed to read Core ML packages: pip install coremltools")
    folder = Path(found.origin).parent / "proto"
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)
    return importlib.import_module(f"{_PACKAGE}.Model_pb2")
