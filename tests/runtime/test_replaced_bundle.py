"""A bundle that another process replaces while it is read is never read half and half."""

from __future__ import annotations

import json
import shutil

import pytest

from ss_device.bundle import MANIFEST, open_bundle
from ss_device.errors import UserError
from ss_runtime.backends import open_backend
from ss_runtime.mlx.adapter_bank import AdapterBank
from ss_runtime.settings import RuntimeSettings
from tests.runtime.bundles import make_bundle
from tests.runtime.mlx_cases import CONFIGS


@pytest.fixture
def bundle(mlx_base, tmp_path):
    made = make_bundle(tmp_path / "bundle", mlx_base, {"one": CONFIGS["paper"]})
    return open_bundle(made.path)


def replace(bundle):
    """As another conversion does: the same names, another manifest."""
    file = bundle.path / MANIFEST
    raw = json.loads(file.read_text())
    raw["made"]["inputs"] = "another"
    file.write_text(json.dumps(raw))


def test_files_of_two_bundles_are_not_mixed(bundle):
    adapter = bundle.adapter("one")
    open_backend(bundle, adapter, RuntimeSettings("mlx", "float32"))
    replace(bundle)
    for read in (
        lambda: open_backend(bundle, adapter, RuntimeSettings("mlx", "float32")),
        lambda: AdapterBank(bundle, RuntimeSettings(dtype="float32")),
    ):
        with pytest.raises(UserError, match="was replaced while it was being read; run this again"):
            read()


def test_a_bundle_that_is_gone_is_named(bundle):
    shutil.rmtree(bundle.path)
    with pytest.raises(UserError, match="bundle"):
        open_backend(bundle, bundle.adapter("one"), RuntimeSettings("mlx", "float32"))
    assert not (bundle.path / MANIFEST).exists()
