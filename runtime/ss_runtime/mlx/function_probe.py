"""Exported functions, tried in a separate process: a damaged file can crash its reader.

MLX reads and runs what the file holds in C++, without checking it against anything (`trial_process.py`).
"""

from __future__ import annotations

import sys

from ss_device.bundle import Bundle, BundledAdapter
from ss_device.errors import UserError
from ss_device.files import sha256
from ss_runtime.trial_process import call_each, tried, tried_elsewhere


def check_functions(bundle: Bundle, adapter: BundledAdapter) -> None:
    """Compare the file's digest, then have another process read the functions and call each once.

    Raises UserError that names the file where they differ, or that process fails, dies or does not end.
    """
    path = bundle.path / adapter.mlxfn.file
    known = bundle.manifest.files.get(adapter.mlxfn.file)
    if known is None or sha256(path) != known.sha256:
        raise UserError(f"{path}: was changed after the conversion (sha256)")
    tried_elsewhere(__name__, [str(bundle.path), adapter.app], path, "MLX functions")


def main() -> int:
    """Body of the process."""
    from ss_runtime.mlx.function_model import open_functions

    return tried(lambda bundle, adapter: call_each(open_functions(bundle, adapter)))


if __name__ == "__main__":
    sys.exit(main())
