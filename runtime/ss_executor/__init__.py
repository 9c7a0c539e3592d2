"""Reference executor: runs a saved Core ML `.mlpackage` op by op in numpy.

    from ss_executor import load_package
    package = load_package("model.mlpackage")
    program = package.program("main", dtype="float16")
    state = program.make_state()
    outputs = program.predict({"x": x}, state)

It reads the saved file (never a builder's memory), so a package that gives the right numbers here
is right as saved. Operations follow the documentation of the MIL op of the same name.
"""

from .errors import ExecutorError, PackageError, UnknownOpError
from .graph import Feature, Function
from .package import Package, load_package
from .program import Program, State

__all__ = [
    "ExecutorError",
    "Feature",
    "Function",
    "Package",
    "PackageError",
    "Program",
    "State",
    "UnknownOpError",
    "load_package",
]
