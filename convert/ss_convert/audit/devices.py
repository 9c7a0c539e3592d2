"""Device figures that a step time is estimated from: the maker's own, upper bounds, none measured here."""

from __future__ import annotations

from dataclasses import dataclass

from ss_device.errors import UserError


@dataclass(frozen=True)
class Device:
    """bandwidth in GB/s, compute in fp16 TFLOP/s, overhead in ms per call; source of the figures."""

    name: str
    engine: str
    bandwidth: float
    compute: float
    overhead: float
    source: str


_ANE = "half of the quoted 8-bit operations per second as fp16 FLOP/s (Apple does not state fp16)"
DEVICES = {
    device.name: device
    for device in (
        Device(
            "iphone-15-pro-ane", "ane", 51.2, 17.5, 0.0,
            f"A17 Pro: 35 TOPS (Apple, September 2023), {_ANE}; 64-bit LPDDR5-6400 = 51.2 GB/s",
        ),
        Device(
            "m1-ane", "ane", 68.25, 5.5, 0.0,
            f"M1: 11 TOPS (Apple, November 2020), {_ANE}; 128-bit LPDDR4X-4266 = 68.25 GB/s",
        ),
        Device(
            "m4-ane", "ane", 120.0, 19.0, 0.0,
            f"M4: 38 TOPS and 120 GB/s (Apple, May 2024), {_ANE}",
        ),
        Device(
            "m1-gpu", "gpu", 68.25, 2.6, 0.0,
            "M1: 2.6 TFLOP/s (Apple, November 2020, 8 cores, fp32; fp16 taken as equal); 68.25 GB/s",
        ),
        Device(
            "m2-gpu", "gpu", 100.0, 3.6, 0.0,
            "M2: 3.6 TFLOP/s and 100 GB/s (Apple, June 2022, 10 cores, fp32; fp16 taken as equal)",
        ),
    )
}  # fmt: skip
DEFAULTS = {"ane": "iphone-15-pro-ane", "gpu": "m2-gpu"}


def device_named(name: str) -> Device:
    """A preset; UserError lists those there are."""
    if name not in DEVICES:
        raise UserError(f"unknown device '{name}' (known: {', '.join(sorted(DEVICES))})")
    return DEVICES[name]
