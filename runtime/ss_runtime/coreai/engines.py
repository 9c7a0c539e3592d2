"""A Core AI asset's functions as engines of the step model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

import numpy as np

from ss_device.architecture import Architecture
from ss_device.bundle import Bundle, BundledAdapter, StepFunctions
from ss_device.config import SpeculativeConfig
from ss_device.errors import UserError, library_errors
from ss_device.files import sha256
from ss_runtime.coreai.asset import OpenAsset, waited_for
from ss_runtime.coreai.asset_probe import check_assets
from ss_runtime.coreai.host_cache import HostCache
from ss_runtime.function_step_model import Engine, FunctionStepModel, chained, open_step_model


def open_coreai_model(
    bundle: Bundle, adapter: BundledAdapter, dtype: str = "float16", compute_units: str = "all"
) -> FunctionStepModel:
    """The adapter's functions of the bundle's asset, on Apple's runtime.

    dtype, compute_units: as in `OpenAsset`. UserError where the bundle has no asset, Core AI is not to be
    had, or an asset is not what was converted: a damaged one could end the process.
    """
    functions = adapter.coreai
    if functions is None:
        raise UserError(f"{bundle.path}: adapter '{adapter.app}' has no Core AI asset in this bundle")
    with _opening:
        _try_once(bundle, adapter)
        assets = [_opened(bundle, name, dtype, compute_units) for name in functions.packages]
    engines = _engines(assets, functions, adapter.config, bundle.manifest.architecture)
    return open_step_model(bundle, adapter, functions, engines)


def asset_engines(
    folder: Path,
    functions: StepFunctions,
    config: SpeculativeConfig,
    architecture: Architecture,
    dtype: str = "float16",
    compute_units: str = "all",
) -> tuple[Engine, Engine]:
    """Engines of the prefill and the step function, of assets opened for them alone.

    folder: what paths of assets are relative to.
    """
    assets = [OpenAsset(folder / name, dtype, compute_units) for name in functions.packages]
    return _engines(assets, functions, config, architecture)


def _engines(
    assets: Sequence[OpenAsset],
    functions: StepFunctions,
    config: SpeculativeConfig,
    architecture: Architecture,
) -> tuple[Engine, Engine]:
    """Engines over opened assets, one per part."""
    first_msa_layer = architecture.num_layers - config.num_msa_layers

    def engine(part: int, name: str) -> Engine:
        function = AssetFunction(assets[part], name)
        if functions.graph.get("cache") != "inputs":
            return function
        layers = functions.chain[part].layers if functions.chain else (0, architecture.num_layers)
        return HostCache(function, range(*layers), first_msa_layer)

    return chained(functions, engine)


# Assets in use, by path, digests of their files, dtype and units: all adapters of a bundle, and all models
# of an adapter, run on one.
_in_use: WeakValueDictionary[tuple, OpenAsset] = WeakValueDictionary()
_tried: set[tuple] = set()
_opening = Lock()


def _opened(bundle: Bundle, name: str, dtype: str, units: str) -> OpenAsset:
    """The asset, opened where this process does not use it already."""
    files, path = _files(bundle, name), bundle.path / name
    key = (path.resolve(), tuple(sorted(files.items())), dtype, units)
    asset = _in_use.get(key)
    if asset is None:
        _check_unchanged(bundle, files)
        asset = _in_use[key] = OpenAsset(path, dtype, units)
    return asset


def _try_once(bundle: Bundle, adapter: BundledAdapter) -> None:
    """Files by their digests, and the adapter's functions in a process of their own, the first time."""
    for name in adapter.coreai.packages:
        files = _files(bundle, name)
        key = (bundle.path.resolve(), adapter.app, tuple(sorted(files.items())))
        if key not in _tried:
            _check_unchanged(bundle, files)
            check_assets(bundle, adapter)
            _tried.add(key)


def _files(bundle: Bundle, asset: str) -> dict[str, str]:
    """Digests of an asset's files by name."""
    files = {n: f.sha256 for n, f in bundle.manifest.files.items() if n.startswith(f"{asset}/")}
    if not files:
        raise UserError(f"{bundle.path}: the manifest names no files of '{asset}'")
    return files


def _check_unchanged(bundle: Bundle, files: Mapping[str, str]) -> None:
    """UserError unless these files are those of the conversion, by digest."""
    for name, digest in files.items():
        if sha256(bundle.path / name) != digest:
            raise UserError(f"{bundle.path}: file '{name}' was changed after the conversion (sha256)")


class AssetFunction:
    """A function of an asset. Inputs are given in any dtype that holds them."""

    def __init__(self, asset: OpenAsset, name: str) -> None:
        from coreai.runtime import NDArray

        self._asset = asset  # which stays open for others that use it
        self._path, self._name = asset.path, name
        self._function = asset.function(name)
        self._array = NDArray
        described = self._function.desc
        self.dtypes = {n: str(described.input_descriptor(n).dtype) for n in described.input_names}
        self._states = {n: described.state_descriptor(n) for n in described.state_names}
        self.shapes = {n: tuple(described.input_descriptor(n).shape) for n in described.input_names}

    def make_state(self) -> dict:
        """States of zeros: masks add to what lies in unused slots, and NaN would stay NaN."""
        return {
            name: self._array(np.zeros(tuple(entry.shape), str(entry.dtype)))
            for name, entry in self._states.items()
        }

    def predict(self, inputs: Mapping[str, np.ndarray], state: dict) -> dict[str, np.ndarray]:
        """Run the function once; changes `state`. Raises UserError for what the runtime refuses."""
        if missing := self.dtypes.keys() - inputs.keys():
            raise UserError(f"{self._path}: '{self._name}' needs the input '{min(missing)}'")
        for name, shape in self.shapes.items():
            if inputs[name].shape != shape:
                found = inputs[name].shape
                raise UserError(
                    f"{self._path}: '{self._name}': '{name}' has the shape {found}, expected {shape}"
                )
        given = {
            name: self._array(np.ascontiguousarray(inputs[name], dtype))
            for name, dtype in self.dtypes.items()
        }
        with library_errors(f"{self._path}: Core AI cannot run '{self._name}'"):
            outputs = waited_for(self._function(given, state))
            return {name: np.array(value.numpy()) for name, value in outputs.items()}
