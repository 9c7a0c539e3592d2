"""A Core AI asset, loaded in a separate process first: a damaged one ends the process that reads it.

Apple's local runtime aborts where bytecode is not what it expects (`trial_process.py`).
"""

from __future__ import annotations

import sys

from ss_device.bundle import Bundle, BundledAdapter
from ss_runtime.coreai.asset import OpenAsset
from ss_runtime.trial_process import tried, tried_elsewhere


def check_assets(bundle: Bundle, adapter: BundledAdapter) -> None:
    """Have another process load the adapter's functions.

    Raises UserError that names the asset where that process fails, dies or does not end.
    """
    path = bundle.path / adapter.coreai.package
    tried_elsewhere(__name__, [str(bundle.path), adapter.app], path, "as a Core AI asset")


def _load(bundle: Bundle, adapter: BundledAdapter) -> None:
    for name in adapter.coreai.packages:
        asset = OpenAsset(bundle.path / name)
        for function in (adapter.coreai.prefill, adapter.coreai.step):
            asset.function(function)


def main() -> int:
    """Body of the process."""
    return tried(_load)


if __name__ == "__main__":
    sys.exit(main())
