"""One tiny base for all MLX tests."""

import pytest

from tests.tiny_models import make_tiny_base


@pytest.fixture(scope="session")
def mlx_base(tmp_path_factory):
    return make_tiny_base(tmp_path_factory.mktemp("mlx") / "base")


@pytest.fixture(scope="session")
def hugging_face(mlx_base):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(mlx_base.path).eval()
