"""Runs one `.mlpackage` or `.aimodel` for the stand-ins of the Swift tests.

Requests come on stdin, replies go to stdout:

    python model_server.py REPOSITORY PACKAGE

A message is 4 bytes little-endian length of a JSON header, the header, then the bytes of its arrays in
order. A package runs on the reference executor (`ss_executor`), float16 as it is stored; an asset on
Apple's own runtime (`coreai-core`).
"""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

import numpy as np

Reply = tuple[dict, list[tuple[str, np.ndarray]]]


class PackageServer:
    """Programs and states of one package by name and number."""

    def __init__(self, path: str) -> None:
        from ss_executor import load_package

        self.package = load_package(path)
        self.programs: dict[str, object] = {}
        self.states: dict[int, object] = {}

    def program(self, function: str):
        """The prepared function; both dtypes and weights are shared inside the package."""
        if function not in self.programs:
            self.programs[function] = self.package.program(function, os.environ.get("SS_DTYPE", "float16"))
        return self.programs[function]

    def answer(self, request: dict, inputs: dict[str, np.ndarray]) -> Reply:
        """Header and arrays of the reply."""
        operation, function = request["op"], request.get("function")
        if operation == "describe":
            described = self.program(function).function
            return {
                kind: [
                    {"name": f.name, "dtype": f.dtype, "shape": list(f.shape)}
                    for f in getattr(described, kind).values()
                ]
                for kind in ("inputs", "outputs")
            }, []
        if operation == "make_state":
            number = max(self.states, default=0) + 1
            self.states[number] = self.program(function).make_state()
            return {"state": number}, []
        if operation == "release_state":
            self.states.pop(request["state"], None)
            return {}, []
        if operation == "predict":
            outputs = self.program(function).predict(inputs, self.states[request["state"]])
            return {}, [(name, _known(value)) for name, value in outputs.items()]
        return {}, []


class AssetServer:
    """Functions of one asset by name. A call's states come with it and go back changed."""

    def __init__(self, path: str) -> None:
        from coreai.runtime import NDArray

        from ss_runtime.coreai.asset import OpenAsset

        self.asset = OpenAsset(Path(path))
        self.functions: dict[str, object] = {}
        self.array = NDArray

    def function(self, name: str):
        """A function, loaded at its first use."""
        if name not in self.functions:
            self.functions[name] = self.asset.function(name)
        return self.functions[name]

    def answer(self, request: dict, inputs: dict[str, np.ndarray]) -> Reply:
        """Header and arrays of the reply."""
        if request["op"] == "functions":
            return {"functions": list(self.asset.function_names)}, []
        if request["op"] == "describe":
            described = self.function(request["function"]).desc
            return {
                f"{kind}s": [
                    {"name": name, "dtype": str(entry.dtype), "shape": list(entry.shape)}
                    for name in getattr(described, f"{kind}_names")
                    for entry in [getattr(described, f"{kind}_descriptor")(name)]
                ]
                for kind in ("input", "state", "output")
            }, []
        if request["op"] == "run":
            return {}, self._run(request, inputs)
        return {}, []

    def _run(self, request: dict, inputs: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        from ss_device.errors import library_errors
        from ss_runtime.coreai.asset import waited_for

        states = {name: self.array(inputs.pop(name).copy()) for name in request["states"]}
        given = {name: self.array(value.copy()) for name, value in inputs.items()}
        function = self.function(request["function"])
        with library_errors(f"Core AI cannot run '{request['function']}'"):
            outputs = waited_for(function(given, states))
            return [(name, np.array(value.numpy())) for name, value in (*outputs.items(), *states.items())]


def _known(array: np.ndarray) -> np.ndarray:
    """Integers as int32, the only integer type of a Core ML multi array."""
    return array.astype(np.int32) if array.dtype.kind in "iub" else array


def main() -> int:
    repository, package = Path(sys.argv[1]), sys.argv[2]
    sys.path[:0] = [str(repository), str(repository / "convert"), str(repository / "runtime")]
    from ss_device.errors import UserError
    from ss_executor import ExecutorError

    replies, sys.stdout = sys.stdout.buffer, sys.stderr  # a stray print must not enter the protocol
    requests = sys.stdin.buffer
    try:
        kind = AssetServer if package.rstrip("/").endswith(".aimodel") else PackageServer
        server, problem = kind(package), None
    except (ExecutorError, UserError) as error:
        server, problem = None, str(error)
    while length := requests.read(4):
        request = json.loads(requests.read(struct.unpack("<I", length)[0]))
        inputs = {a["name"]: _read(requests, a) for a in request["arrays"]}
        try:
            if problem:
                raise UserError(problem)
            header, arrays = server.answer(request, inputs)
        except (ExecutorError, UserError) as error:
            header, arrays = {"error": str(error)}, []
        _write(replies, header, arrays)
    return 0


def _read(stream, array: dict) -> np.ndarray:
    dtype = np.dtype(array["dtype"])
    return np.frombuffer(stream.read(dtype.itemsize * int(np.prod(array["shape"]))), dtype).reshape(
        array["shape"]
    )


def _write(stream, header: dict, arrays: list[tuple[str, np.ndarray]]) -> None:
    described = [{"name": n, "dtype": str(a.dtype), "shape": list(a.shape)} for n, a in arrays]
    encoded = json.dumps({**header, "arrays": described}).encode()
    stream.write(struct.pack("<I", len(encoded)) + encoded)
    for _, array in arrays:
        stream.write(np.ascontiguousarray(array).tobytes())
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
