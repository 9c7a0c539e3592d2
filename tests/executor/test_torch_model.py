"""A traced PyTorch network through coremltools' own front end, against PyTorch."""

import coremltools as ct
import numpy as np
import pytest
import torch
from torch import nn

from ss_executor import load_package


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
    for dtype, tolerance in (("float32", 2e-3 if precision == "FLOAT16" else 1e-5),
                                  ("float16", 1e-2)):  # fmt: skip
        (result,) = package.program("main", dtype).predict({"x": x.numpy()}).values()
        np.testing.assert_allclose(result, wanted, atol=tolerance, rtol=tolerance)


class Encoder(nn.Module):
    """Two pre-norm blocks around the fused attention operation, with a mask."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))

    def forward(self, x, mask):
        for norm, mixing in zip(self.norms, self.mixing, strict=True):
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in mixing(norm(x)).chunk(3, -1))
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + out.transpose(1, 2).flatten(2)
        return x


def converted(model, inputs: dict[str, torch.Tensor], path, states=()):
    """Trace, convert through coremltools' torch front end, save, load."""
    with torch.no_grad():
        traced = torch.jit.trace(model.eval(), tuple(inputs.values()))
    converted_model = ct.convert(
        traced,
        inputs=[ct.TensorType(name=name, shape=tuple(x.shape)) for name, x in inputs.items()],
        states=[ct.StateType(ct.TensorType(shape=shape), name=name) for name, shape in states] or None,
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT32 if not states else ct.precision.FLOAT16,
    )
    converted_model.save(str(path))
    return load_package(path)


def test_encoder_with_the_fused_attention_operation(tmp_path):
    torch.manual_seed(1)
    model, x = Encoder().eval(), torch.randn(2, 6, 16)
    mask = torch.where(torch.rand(6, 6) < 0.3, -1e4, 0.0).fill_diagonal_(0)
    package = converted(model, {"x": x, "mask": mask}, tmp_path / "encoder.mlpackage")
    assert package.functions["main"].op_histogram()["scaled_dot_product_attention"] == 2
    inputs = {"x": x.numpy(), "mask": mask.numpy()}
    (result,) = package.program("main", "float32").predict(inputs).values()
    with torch.no_grad():
        np.testing.assert_allclose(result, model(x, mask).numpy(), atol=1e-5)


class Accumulator(nn.Module):
    """Adds every input to a buffer and returns its running mean over the features."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3, 4, dtype=torch.float16))

    def forward(self, x):
        self.total.add_(x.to(torch.float16))
        return self.total.mean(-1)


def test_stateful_accumulator_keeps_its_buffer_between_calls(tmp_path):
    xs = [torch.full((3, 4), value) for value in (0.5, -2.0, 8.25)]
    model = Accumulator()
    path = tmp_path / "accumulator.mlpackage"
    package = converted(Accumulator(), {"x": xs[0]}, path, states=[("total", (3, 4))])
    for dtype in ("float32", "float16"):
        program = package.program("main", dtype)
        state = program.make_state()
        model.total.zero_()
        for x in xs:
            (result,) = program.predict({"x": x.numpy()}, state).values()
            with torch.no_grad():
                np.testing.assert_array_equal(result, model(x).numpy())
            np.testing.assert_array_equal(state["total"], model.total.numpy())
    assert float(state["total"][0, 0]) == 6.75
