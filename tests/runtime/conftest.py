"""One tiny base for all MLX tests, and one bundle with functions of its adapters."""

import pytest

from tests.runtime.bundles import FUNCTION_TARGETS, convert_bundle
from tests.runtime.mlx_cases import CONFIGS, SHARED
from tests.tiny_models import make_tiny_base


@pytest.fixture(scope="session")
def mlx_base(tmp_path_factory):
    return make_tiny_base(tmp_path_factory.mktemp("mlx") / "base")


@pytest.fixture(scope="session")
def hugging_face(mlx_base):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(mlx_base.path).eval()


@pytest.fixture(scope="session")
def half_base(tmp_path_factory):
    """A base whose weights float16 holds: functions in float32 then compute with the very same."""
    return make_tiny_base(tmp_path_factory.mktemp("functions") / "tiny-base", dtype="float16")


@pytest.fixture(scope="session")
def function_bundle(half_base, tmp_path_factory):
    """Two lossless and two shared adapters: MLX weights, a package, and an asset where Core AI is there."""
    configs = {"one": CONFIGS["paper"], "two": CONFIGS["rich"], "v1": SHARED[False], "v2": SHARED[True]}
    folder = tmp_path_factory.mktemp("functions") / "bundle"
    return convert_bundle(folder, half_base, configs, "--target", FUNCTION_TARGETS)
