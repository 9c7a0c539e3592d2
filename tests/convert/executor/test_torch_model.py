"""A traced PyTorch network through coremltools' own front end, against PyTorch."""

import coremltools as ct
import numpy as np
import pytest
import torch
from torch import nn

from ss_convert.coreml.executor import load_package


class Network(nn.Module):
    """Convolutions, normalisation, pooling, attention-like products and a classifier."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2), nn.SiLU(),
            nn.ConvTranspose2d(16, 8, 2, stride=2), nn.LeakyReLU(0.1),
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        y = self.features(x).flatten(2).transpose(1, 2)
        y = self.norm(y)
        weights = torch.softmax(y @ y.transpose(1, 2) / 8**0.5, dim=-1)
        return self.head((weights @ y).mean(1))


@pytest.mark.parametrize("precision", ["FLOAT32", "FLOAT16"])
def test_network_gives_the_same_numbers(tmp_path, precision):
    torch.manual_seed(0)
    network = Network().eval()
    x = torch.randn(2, 3, 16, 16)
    model = ct.convert(
        torch.jit.trace(network, x),
        inputs=[ct.TensorType(name="x", shape=x.shape)],
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=getattr(ct.precision, precision),
    )
    path = tmp_path / "network.mlpackage"
    model.save(str(path))
    with torch.no_grad():
        wanted = network(x).numpy()
    package = load_package(path)
    for arithmetic, tolerance in (("float32", 2e-3 if precision == "FLOAT16" else 1e-5),
                                  ("float16", 1e-2)):  # fmt: skip
        (result,) = package.program("main", arithmetic).predict({"x": x.numpy()}).values()
        np.testing.assert_allclose(result, wanted, atol=tolerance, rtol=tolerance)
