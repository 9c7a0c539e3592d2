"""Writes what the Swift tests compare with: recorded steps of the Python side.

    python -m tests.swift.export_traces traces    the committed test resources (small, made by us)
    python -m tests.swift.export_traces bundle    build/swift-tiny: a tiny random bundle and its answers

Trees, masks and walks: `recorded_trees`. Noise, draws and generations: `recorded_decoding`. Inputs of the
step function: `recorded_inputs`. The bundle: `tiny_bundle`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.swift.recorded_columns import INPUT_RESOURCES, RESOURCES, ROOT
from tests.swift.recorded_decoding import export_decoding, export_noise, export_reference
from tests.swift.recorded_inputs import export_inputs
from tests.swift.recorded_trees import export_trees
from tests.swift.tiny_bundle import write_bundle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("traces", "bundle"))
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build/swift-tiny", help="folder of the bundle"
    )
    arguments = parser.parse_args()
    if arguments.what == "bundle":
        write_bundle(arguments.output)
        return 0
    for folder in (RESOURCES, INPUT_RESOURCES):
        folder.mkdir(parents=True, exist_ok=True)
    export_trees(RESOURCES / "trees.safetensors")
    export_noise(RESOURCES / "noise.safetensors")
    export_decoding(RESOURCES / "decoding.safetensors")
    export_reference(RESOURCES / "reference.safetensors")
    export_inputs(INPUT_RESOURCES / "inputs.safetensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
