"""Generating with MLX must not need, or load, the libraries of training and conversion."""

import subprocess
import sys

HEAVY = ("torch", "coremltools", "transformers", "mlx_lm", "peft", "ss_convert")


def test_generation_loads_no_heavy_library():
    program = (
        "import sys, ss_runtime.generation, ss_runtime.mlx.loading, ss_runtime.mlx.step_model\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
