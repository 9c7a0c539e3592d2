"""A try in a process of its own, for files whose readers a damaged one can crash.

What such a file does there (an endless loop, a segmentation fault, a buffer of terabytes) it does not do to
its user, as far as a try shows it. A file that was made to do harm, in a bundle whose digests agree, is a
program like any other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ss_device.bundle import Bundle, BundledAdapter, open_bundle
from ss_device.errors import UserError, one_line
from ss_device.step_model import StepModel
from ss_device.tree import tree_from_parents

SECONDS = 600.0
"""For reading the weights and three calls: minutes only where a file is damaged, or a disk is very slow."""


def tried_elsewhere(module: str, arguments: Sequence[str], path: Path, what: str) -> None:
    """Run `python -m module` with `arguments`; UserError "path: not usable `what`" unless it ends well."""
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, env=paths)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{path}: not usable {what} (a call does not end)") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        said = json.loads(done.stdout) if done.returncode == 1 and done.stdout else None
        ended = "it ends the process that runs it"
        reason = said or (lines[-1] if done.returncode > 0 and lines else ended)
        raise UserError(f"{path}: not usable {what} ({one_line(UserError(reason)):.300})")


def tried(body: Callable[[Bundle, BundledAdapter], None]) -> int:
    """Body of such a process, of a bundle and an adapter by the command line.

    → 0, or 1 and why as a JSON text on stdout.
    """
    try:
        bundle = open_bundle(Path(sys.argv[1]))
        body(bundle, bundle.adapter(sys.argv[2]))
    except Exception as error:
        print(json.dumps(one_line(error)))
        return 1
    return 0


def call_each(model: StepModel) -> None:
    """A prefill, a step and a commit."""
    model.prefill([0, 0])
    nodes = min(2, model.limits.num_nodes)
    verified = model.step(tree_from_parents([0] * nodes, [-1, 0][:nodes]))
    model.commit([int(verified.kept[0])])
