"""Exported functions, tried in a separate process: a damaged file can crash its reader.

MLX reads and runs what the file holds in C++, without checking it against anything. What a damaged file
does there (an endless loop, a segmentation fault, a buffer of terabytes) it does not do to its user, as far
as a try shows it. A file that was made to do harm, in a bundle whose digests agree, is a program like any
other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ss_device.bundle import Bundle, BundledAdapter
from ss_device.errors import UserError, one_line
from ss_device.files import sha256

SECONDS = 600.0
"""For reading the weights and three calls: minutes only where a file is damaged, or a disk is very slow."""


def check_functions(bundle: Bundle, adapter: BundledAdapter) -> None:
    """Compare the file's digest, then have another process read the functions and call each once.

    Raises UserError that names the file where they differ, or that process fails, dies or does not end.
    """
    path = bundle.path / adapter.mlxfn.file
    known = bundle.manifest.files.get(adapter.mlxfn.file)
    if known is None or sha256(path) != known.sha256:
        raise UserError(f"{path}: was changed after the conversion (sha256)")
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", __name__, str(bundle.path), adapter.app]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, env=paths)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{path}: not usable MLX functions (a call does not end)") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        said = json.loads(done.stdout) if done.returncode == 1 and done.stdout else None
        ended = "they end the process that runs them"
        reason = said or (lines[-1] if done.returncode > 0 and lines else ended)
        raise UserError(f"{path}: not usable MLX functions ({one_line(UserError(reason)):.300})")


def main() -> int:
    """Body of the process: 0, or 1 and why as a JSON text on stdout."""
    from ss_device.bundle import open_bundle
    from ss_device.tree import tree_from_parents
    from ss_runtime.mlx.function_model import open_functions

    try:
        bundle = open_bundle(Path(sys.argv[1]))
        model = open_functions(bundle, bundle.adapter(sys.argv[2]))
        model.prefill([0, 0])
        nodes = min(2, model.limits.num_nodes)
        verified = model.step(tree_from_parents([0] * nodes, [-1, 0][:nodes]))
        model.commit([int(verified.kept[0])])
    except Exception as error:
        print(json.dumps(one_line(error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
