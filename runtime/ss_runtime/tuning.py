"""`tuning.json` in a bundle: which draft pays on a device, with the measurements that say so."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass

from ss_device.bundle import Bundle
from ss_device.draft_choice import DraftChoice
from ss_device.draft_policy import KINDS, AdaptiveDrafter, Experience, StepCosts
from ss_device.errors import UserError
from ss_device.old_names import EXPERIENCE, renamed
from ss_device.outputs import WAIT_SECONDS, output_lock, write_text
from ss_device.strict_json import read_json
from ss_device.tree import BigramBias

FORMAT_VERSION = 2
FILE = "tuning.json"


@dataclass(frozen=True)
class AdaptiveChoice:
    """Nodes and streams of every step chosen while decoding, at most `num_nodes` (`AdaptiveDrafter`)."""

    num_nodes: int
    costs: StepCosts
    experience: Experience
    num_kept = None  # it draws smaller trees instead

    def drafter(self, bigram_bias: BigramBias | None) -> AdaptiveDrafter:
        return AdaptiveDrafter(self.num_nodes, self.costs, self.experience, bigram_bias)

    def label(self) -> str:
        return f"adaptive, up to {self.num_nodes} nodes"


def device_name() -> str:
    """What a tuning holds for: system, machine and processor."""
    name = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            found = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
            name = next(found, name)
    return " / ".join(part for part in (platform.system(), platform.machine(), name) if part)


def read_tuning(bundle: Bundle, app: str, dtype: str) -> DraftChoice | AdaptiveChoice | None:
    """The choice for an adapter, dtype and this device; None where nothing was measured.

    Raises UserError for a damaged file, or for more nodes than the adapter takes by now.
    """
    path = bundle.path / FILE
    if not path.is_file():
        return None
    raw = read_json(path)
    if raw.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path}: format version {raw.get('format_version')}, this program reads {FORMAT_VERSION}; "
            "run ss-bench tune again"
        )
    try:
        entry = raw["devices"].get(device_name(), {}).get(f"{app}:{dtype}")
        return _choice(entry["choice"], bundle.adapter(app).num_nodes) if entry else None
    except (KeyError, TypeError, AttributeError, ValueError, UserError) as error:
        raise UserError(f"{path}: missing or wrong entry ({error}); run ss-bench tune again") from error


def _choice(raw: dict, most_nodes: int) -> DraftChoice | AdaptiveChoice:
    """A choice that was read and makes a drafter."""
    choice = DraftChoice(**raw) if "costs" not in raw else _adaptive(raw)
    for name in ("num_nodes", "max_streams", "num_kept"):
        value = getattr(choice, name, None)
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f"{name} is {value!r}")
    if max(choice.num_nodes, choice.num_kept or 1) > most_nodes:
        raise UserError(f"tuned for {choice.num_nodes} nodes, the bundle takes {most_nodes}")
    choice.drafter(None)
    return choice


def _adaptive(raw: dict) -> AdaptiveChoice:
    costs = {k: tuple(v) if isinstance(v, list) else v for k, v in raw["costs"].items()}
    experience = dict(renamed(raw["experience"], EXPERIENCE))
    for name in ("gains", "trust"):
        experience[name] = tuple(tuple(pair) for pair in experience[name])
    for name in KINDS:
        experience[name] = tuple(experience[name])
    return AdaptiveChoice(raw["num_nodes"], StepCosts(**costs), Experience(**experience))


def drafts_need_tuning() -> bool:
    """Whether MLX computes on a CPU here, where every drafted row costs: drafts that were not chosen for
    the device can be slower than none."""
    return sys.platform != "darwin"


def untuned_hint(bundle: Bundle, apps: list[str]) -> str:
    """One line for those who run adapters without a choice for this device."""
    return (
        f"{', '.join(apps)}: not tuned for this device, drafts may be slower than none: "
        f"run ss-bench tune {bundle.path} --input FILE --adapter {apps[0]}"
    )


def write_tuning(
    bundle: Bundle, app: str, dtype: str, choice: DraftChoice | AdaptiveChoice, evidence: dict
) -> None:
    """Add or replace one entry, in one go. A file of another format version is replaced.

    evidence: as `bench.tuner.tune` returns it.
    """
    path = bundle.path / FILE
    with output_lock(path, WAIT_SECONDS):  # of two entries that are added at once none may be lost
        raw = read_json(path) if path.is_file() else {}
        if raw.get("format_version") != FORMAT_VERSION:
            raw = {"format_version": FORMAT_VERSION, "devices": {}}
        devices = raw.get("devices")
        entries = devices.setdefault(device_name(), {}) if isinstance(devices, dict) else None
        if not isinstance(entries, dict):
            raise UserError(f"{path}: 'devices' is no table of tables; remove the file and tune again")
        entries[f"{app}:{dtype}"] = {"choice": asdict(choice), "evidence": evidence}
        write_text(path, json.dumps(raw, indent=1) + "\n")
