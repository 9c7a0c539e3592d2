"""Converter: base and adapter folders to a bundle for Core ML and MLX.

from ss_convert import convert

bundle = convert("sqlctx", output="build/sqlctx", targets=("mlx",))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ss_convert.settings import ConversionSettings
    from ss_device.bundle import Bundle

__all__ = ["convert"]


def convert(
    adapters: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    *,
    targets: Sequence[str] | None = None,
    settings: ConversionSettings | None = None,
    force: bool = False,
    report: Callable[[str], None] | None = None,
    **changes: Any,
) -> Bundle:
    """Convert adapters and their base to one bundle, as `ss-convert` does, and open it.

        convert("sqlctx", output="build/sqlctx", targets=("mlx",))
        convert(["sqlctx", "models/adapters/mine"], output="build/two", weights="int8", num_nodes=16)
        convert("dialogsum", into="build/sqlctx")

    adapters: folders, or their names under models/adapters; output: bundle folder (None: `build/<app>`);
    targets: of `coreml`, `mlx` and `mlxfn` (None: the first two); settings: what the changes start from
    (None: the defaults); force: convert although the bundle is up to date, and replace another one;
    report: is told of each stage when it begins; changes: fields of
    `ss_convert.settings.ConversionSettings` by name.

    A bundle that was made from the same inputs is opened as it is; stages that an interrupted call has
    finished are not repeated. Raises UserError for a name that is no setting, for input that does not fit,
    for an output that holds another bundle (without `force`) or that another process is writing.
    """
    from contextlib import nullcontext

    from ss_convert.conversion import make_bundle
    from ss_convert.settings import ConversionSettings
    from ss_device.command_line import quiet_libraries
    from ss_device.settings import changed

    quiet_libraries(warnings_too=False)
    names = (adapters,) if isinstance(adapters, str | Path) else adapters
    changes["adapters"] = tuple(map(str, names))
    if output is not None:
        changes["output"] = output
    if targets is not None:
        changes["targets"] = (targets,) if isinstance(targets, str) else tuple(targets)
    wanted = changed(settings or ConversionSettings(), **changes)
    reporting = nullcontext(report or (lambda stage: None))
    _, outcome = make_bundle(wanted, force, lambda stages: reporting)
    return outcome.bundle
