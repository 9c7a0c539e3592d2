"""Convert an adapter and its base to a bundle for Core ML and MLX.

python examples/convert.py                       # sqlctx → build/sqlctx
python examples/convert.py dialogsum build/talk
"""

import sys

from ss_convert import convert

adapter = sys.argv[1] if len(sys.argv) > 1 else "sqlctx"
output = sys.argv[2] if len(sys.argv) > 2 else f"build/{adapter}"

# MLX weights alone take seconds; leave `targets` out to get a Core ML package as well.
bundle = convert(adapter, output=output, targets=("mlx",), report=print)

print(f"{bundle.path}: {', '.join(bundle.manifest.adapters)}")
for name, file in bundle.manifest.files.items():
    print(f"{file.bytes / 1e6:8.2f} MB  {name}")
