"""Runs one `.mlpackage` for the Core ML stand-in of the Swift tests: requests on stdin, replies on stdout.

    python executor_server.py REPOSITORY PACKAGE

A message is 4 bytes little-endian length of a JSON header, the header, then the bytes of its arrays in
order. float16 as the package stores it (`ss_executor`).
"""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

import numpy as np


class Server:
    """Programs and states of one package by name and number."""

    def __init__(self, package) -> None:
        self.package = package
        self.programs: dict[str, object] = {}
        self.states: dict[int, object] = {}

    def program(self, function: str):
        """The prepared function; both dtypes and weights are shared inside the package."""
        if function not in self.programs:
            self.programs[function] = self.package.program(
                function, os.environ.get("SS_DTYPE", "float16")
            )
        return self.programs[function]

    def answer(self, request: dict, inputs: dict[str, np.ndarray]) -> tuple[dict, list[np.ndarray]]:
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
            arrays = [np.ascontiguousarray(_known(value)) for value in outputs.values()]
            described = [
                {"name": name, "dtype": str(array.dtype), "shape": list(array.shape)}
                for name, array in zip(outputs, arrays, strict=True)
            ]
            return {"arrays": described}, arrays
        return {}, []


def _known(array: np.ndarray) -> np.ndarray:
    """Integers as int32, the only integer type of a Core ML multi array."""
    return array.astype(np.int32) if array.dtype.kind in "iub" else array


def main() -> int:
    repository, package = Path(sys.argv[1]), sys.argv[2]
    sys.path[:0] = [str(repository), str(repository / "convert")]
    from ss_executor import ExecutorError, load_package

    replies, sys.stdout = sys.stdout.buffer, sys.stderr  # a stray print must not enter the protocol
    requests = sys.stdin.buffer
    try:
        server, problem = Server(load_package(package)), None
    except ExecutorError as error:
        server, problem = None, str(error)
    while length := requests.read(4):
        request = json.loads(requests.read(struct.unpack("<I", length)[0]))
        inputs = {a["name"]: _read(requests, a) for a in request["arrays"]}
        try:
            if problem:
                raise ExecutorError(problem)
            header, arrays = server.answer(request, inputs)
        except ExecutorError as error:
            header, arrays = {"error": str(error)}, []
        encoded = json.dumps(header).encode()
        replies.write(struct.pack("<I", len(encoded)) + encoded + b"".join(a.tobytes() for a in arrays))
        replies.flush()
    return 0


def _read(stream, array: dict) -> np.ndarray:
    dtype = np.dtype(array["dtype"])
    return np.frombuffer(stream.read(dtype.itemsize * int(np.prod(array["shape"]))), dtype).reshape(
        array["shape"]
    )


if __name__ == "__main__":
    sys.exit(main())
