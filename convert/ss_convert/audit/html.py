"""The audit as one HTML file that needs nothing else: tables and bars drawn as inline SVG."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from ss_convert.audit.report import Audit, FunctionAudit, PackageAudit
from ss_device.command_line import size_text

STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2.2rem}h3{font-size:1rem}
table{border-collapse:collapse;margin:.6rem 0}td,th{padding:.2rem .8rem .2rem 0;text-align:left;
vertical-align:top;border-bottom:1px solid #ddd}td.n{text-align:right;font-variant-numeric:tabular-nums}
.fails{color:#a40000;font-weight:600}.leaves{color:#a05a00}.slower{color:#555}small{color:#666}
"""
BAR, LABEL, VALUE, LINE = 420, 190, 110, 22
COLOURS = {"weights": "#3465a4", "operations": "#75507b", "time": "#4e9a06"}


def to_html(audit: Audit) -> str:
    """A complete document: title, assumptions, then every package."""
    device = audit.device
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>Audit of {escape(audit.source)}</title><style>{STYLE}</style>",
        f"<h1>Audit of {escape(audit.source)}</h1>",
        f"<p>Engine <b>{escape(audit.engine)}</b>; estimates from {device.bandwidth:g} GB/s, "
        f"{device.compute:g} TFLOP/s, {device.overhead:g} ms per call ({escape(device.name)}: "
        f"{escape(device.source)}). {_measured(audit)}</p>",
    ]
    return "".join(parts + [_package(package) for package in audit.packages]) + "</html>\n"


def _measured(audit: Audit) -> str:
    if any(package.placement for package in audit.packages):
        return "Only what stands under 'On this Mac' was measured."
    return "Nothing here was measured on a device."


def bars(values: Mapping[str, float], colour: str, text) -> str:
    """Horizontal bars, one per entry, as an SVG element; `text` writes a value."""
    largest = max(values.values(), default=0) or 1
    width, height = LABEL + BAR + VALUE, LINE * len(values) + 4
    rows = []
    for index, (name, value) in enumerate(values.items()):
        y, length = index * LINE, max(1.0, BAR * value / largest)
        rows.append(
            f"<text x='{LABEL - 8}' y='{y + 15}' text-anchor='end'>{escape(str(name))}</text>"
            f"<rect x='{LABEL}' y='{y + 3}' width='{length:.1f}' height='{LINE - 6}' fill='{colour}'/>"
            f"<text x='{LABEL + length + 6:.1f}' y='{y + 15}'>{escape(text(value))}</text>"
        )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"font-size='12' font-family='sans-serif'>{''.join(rows)}</svg>"
    )


def _package(package: PackageAudit) -> str:
    return "".join(
        (
            f"<h2>{escape(package.path)}</h2>",
            f"<p>{size_text(package.weight_bytes)} of weights, {size_text(package.state_bytes)} of state, "
            f"{len(package.functions)} functions.</p>",
            "<h3>Weights by kind</h3>",
            bars(package.kinds, COLOURS["weights"], lambda v: size_text(int(v))),
            "<h3>Weights by adapter</h3>",
            bars(
                {"base and tables": package.shared_bytes, **package.own_bytes},
                COLOURS["weights"],
                lambda v: size_text(int(v)),
            ),
            _hazards(package),
            *(_function(function) for function in package.functions),
            _placement(package),
        )
    )


def _hazards(package: PackageAudit) -> str:
    if not package.hazards:
        return "<h3>Hazards</h3><p>No rule applies.</p>"
    rows = "".join(
        f"<tr><td class='{escape(h.effect.split()[0])}'>{escape(h.effect)}</td>"
        f"<td>{escape(h.function)}</td><td>{escape(h.operation)}<br><small>{escape(h.where)}</small></td>"
        f"<td>{escape(h.detail)}<br><small>{escape(h.rule)}: {escape(h.source)}</small></td></tr>"
        for h in package.hazards
    )
    head = "<tr><th>effect<th>function<th>operation<th>what</tr>"
    return f"<h3>Hazards ({len(package.hazards)})</h3><table>{head}{rows}</table>"


def _function(function: FunctionAudit) -> str:
    costs = function.costs
    facts = {
        "FLOPs": f"{costs.flops:,}",
        "weight bytes": f"{costs.weight_bytes:,}",
        "state bytes": f"{costs.state_bytes:,}",
        "activation bytes": f"{costs.activation_bytes:,}",
        "FLOPs per byte": f"{costs.intensity:.1f}",
        **{f"rows, {group}": str(rows) for group, rows in costs.rows.items()},
    }
    table = "".join(f"<tr><td>{escape(n)}<td class='n'>{v}</tr>" for n, v in facts.items())
    milliseconds = {name: 1e3 * value for name, value in function.seconds.items()}
    return (
        f"<h3>{escape(function.name)}</h3><table>{table}</table>"
        + bars(milliseconds, COLOURS["time"], lambda v: f"{v:.3f} ms")
        + bars(function.operations, COLOURS["operations"], lambda v: f"{v:.0f}")
    )


def _placement(package: PackageAudit) -> str:
    if not package.placement:
        return ""
    parts = ["<h3>On this Mac: Core ML's compute plan, and the median time of a call on zeros</h3>"]
    for name, found in package.placement.items():
        moved = ", ".join(f"{escape(op)} {count}" for op, count in found["on_cpu"].items()) or "none"
        parts.append(
            f"<h3>{escape(name)}: {1e3 * found['seconds']:.3f} ms</h3>"
            f"<table><tr><th>device<th>operations<th>share of the estimated cost</tr>"
        )
        parts += [
            f"<tr><td>{escape(device)}<td class='n'>{count}"
            f"<td class='n'>{found['cost_shares'].get(device, 0.0):.1%}</tr>"
            for device, count in found["devices"].items()
        ]
        parts.append(f"</table><p>Operations on the CPU: {moved}.</p>")
    return "".join(parts)
