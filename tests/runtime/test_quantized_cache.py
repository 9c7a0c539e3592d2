"""Keys and values in 8 and 4 bits: against rounding by hand, drafts against plain, files, commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import httpx
import mlx.core as mx
import numpy as np
import pytest
import torch

from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_device.sampling import Sampler, Sampling
from ss_device.tree import root_only, tree_from_parents
from ss_runtime.backends import open_backend
from ss_runtime.commands.bench import main as ss_bench
from ss_runtime.commands.generate import main as ss_generate
from ss_runtime.commands.serve import main as ss_serve
from ss_runtime.mlx import kv_cache
from ss_runtime.mlx.adapter_bank import AdapterBank
from ss_runtime.mlx.cached_text import CachedText
from ss_runtime.mlx.kv_cache import KVCache, read_keys_values, write_keys_values
from ss_runtime.mlx.layers import attend
from ss_runtime.mlx.packed_rows import BITS
from ss_runtime.reused_text import ReusingModel, cache_content
from ss_runtime.settings import KV_BITS, RuntimeSettings
from tests.runtime.bundles import make_bundle
from tests.runtime.mlx_cases import CONFIGS, PROMPT, SHARED, mlx_model, random_tree
from tests.tiny_models import VOCAB, make_tiny_base, random_adapter

TOP_KEYS = type(CONFIGS["rich"])(**{**CONFIGS["rich"].to_dict(), "stream_top_keys": 4})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_base(tmp_path_factory.mktemp("heads_of_32") / "base", head_dim=32)


@pytest.fixture(scope="module")
def bundle(base, tmp_path_factory):
    configs = {"one": CONFIGS["rich"], "two": SHARED[False]}
    return make_bundle(tmp_path_factory.mktemp("quantized_cache") / "bundle", base, configs)


def rounded(rows: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Float32 rows [..., D] as affine groups keep them, in numpy alone.

    Codes 0 … 2^bits − 1 lie evenly between a group's least and largest value. As MLX has it the end that is
    farther from zero is kept as it is, and the distance of codes moves until one of them is zero.
    """
    x = rows.astype(np.float32).reshape(*rows.shape[:-1], -1, group)
    least, largest, last = x.min(-1, keepdims=True), x.max(-1, keepdims=True), np.float32(2**bits - 1)
    step = (largest - least) / last
    from_least = np.abs(least) > np.abs(largest)
    step, end = np.where(from_least, step, -step), np.where(from_least, least, largest)
    codes_to_zero = np.rint(end / step)
    step = end / codes_to_zero
    codes = np.clip(np.rint((x - end) / step), 0, last)
    return (codes * step + end).reshape(rows.shape)


def numpy_attention(q, keys, values, mask, scale):
    """[H, R, D] at [n_kv, S, D], softmax in float64."""
    keys, values = (np.repeat(a.astype(np.float64), len(q) // len(a), axis=0) for a in (keys, values))
    scores = np.where(mask, (q.astype(np.float64) * scale) @ keys.swapaxes(1, 2), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ values


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "products with codes"])
@pytest.mark.parametrize(
    ("bits", "head_dim", "group"), [(8, 32, 32), (4, 64, 64), (8, 96, 32), (4, 128, 64)]
)
def test_attention_is_that_over_rows_rounded_by_hand(bits, head_dim, group, packed, monkeypatch):
    monkeypatch.setattr(kv_cache, "reads_packed", lambda: packed)
    rng = np.random.default_rng(bits + head_dim)
    keys, values = rng.normal(size=(2, 2, 45, head_dim)).astype(np.float32) * [[[[3]]], [[[0.2]]]]
    keys, values, q = keys.astype("f"), values.astype("f"), rng.normal(size=(6, 7, head_dim)).astype("f")
    cache = KVCache(1, 2, head_dim, mx.float32, 16, bits)
    cache.reserve(45)
    for first, last in ((30, 45), (0, 30)):  # in any order and number
        rows = (mx.array(a[None, :, first:last]) for a in (keys, values))
        cache.layers[0] = write_keys_values(cache.layers[0], *rows, mx.array([first]))
    mask = np.arange(48) <= np.arange(38, 45)[:, None]
    read = read_keys_values(cache.layers[0], 48, head_dim)
    ours = np.array(attend(mx.array(q[None]), *read, mx.array(mask), head_dim**-0.5, None))[0]
    kept = [rounded(a, bits, group) for a in (keys, values)]
    wanted, exact = (numpy_attention(q, *kv, mask[:, :45], head_dim**-0.5) for kv in (kept, (keys, values)))
    scale = np.abs(exact).max()
    assert np.abs(ours - wanted).max() <= 1e-5 * scale
    assert np.abs(ours - exact).max() >= 1e-3 * scale  # it is really quantized
    for a, b in zip(kept, (keys, values), strict=True):  # half a step, and what moving it to zero adds
        spread = np.ptp(b.reshape(-1, group), axis=-1).max()
        assert np.abs(a - b).max() <= 1.2 * spread / (2**bits - 1)


def next_logits(model, tokens):
    seen = []
    model.prefill(tokens, lambda kept, logits: seen.append(np.array(logits[0])) or np.zeros(1, np.int32))
    return seen[0]


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "products with codes"])
def test_four_bits_are_hugging_faces_model_over_rounded_keys_and_values(base, packed, monkeypatch):
    """Every row sees rounded keys and values, its own too: Hugging Face with a cache that rounds."""
    from transformers import DynamicCache, LlamaForCausalLM

    class RoundingCache(DynamicCache):
        def update(self, keys, values, *arguments, **options):
            kept = (torch.from_numpy(rounded(a.numpy(), 4, 32)) for a in (keys, values))
            return super().update(*kept, *arguments, **options)

    monkeypatch.setattr(kv_cache, "reads_packed", lambda: packed)
    reference = LlamaForCausalLM.from_pretrained(base.path).eval()
    adapter = random_adapter(base, CONFIGS["paper"])
    models = [mlx_model(base, adapter, kv_bits=bits, bucket=16) for bits in (4, None)]
    tokens = np.random.default_rng(3).integers(3, VOCAB, 40).tolist()
    for length in (1, 17, 40):
        with torch.no_grad():
            out = reference(torch.tensor([tokens[:length]]), past_key_values=RoundingCache())
        wanted = out.logits[0, -1].numpy()
        ours, exact = (next_logits(model, tokens[:length]) for model in models)
        scale = np.abs(wanted).max()
        # A value within rounding of the middle between two codes may take the other one: 1/15 of its group.
        assert np.abs(ours - wanted).max() <= 1e-2 * scale
        assert np.abs(exact - wanted).max() >= 4e-2 * scale


class Oracle:
    """Drafts that know the next tokens of a text, each with a wrong sibling; in some steps none."""

    num_nodes, defers_streams = 8, True

    def __init__(self, text):
        self.text, self.rng = text, np.random.default_rng(0)

    def start(self, prompt):
        return []

    def grow(self, proposal, stop_ids, max_depth, history):
        ahead = self.text[len(history) : len(history) + min(3, max_depth)]
        if not ahead or self.rng.random() < 0.3:
            return root_only(proposal.root)
        tokens, parents, parent = [proposal.root], [-1], 0
        for token in ahead:
            wrong = next(t for t in self.rng.integers(3, VOCAB, 9).tolist() if t != token)
            tokens += [wrong, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return tree_from_parents(tokens, parents)


def windowed(base):
    """The same weights with windows of 6 in two layers and capped scores."""
    shape = replace(base.architecture, windows=(6, None, 6), attention_softcap=20.0)
    return replace(base, architecture=shape)


CASES = {
    "all rows carry streams": (CONFIGS["paper"], {"num_kept": 7}, False),
    "a pass of their own": (CONFIGS["rich"], {"stream_rows": "accepted"}, False),
    "top keys": (TOP_KEYS, {"stream_rows": "accepted"}, False),
    "shared": (SHARED[False], {}, False),
    "main attends to streams": (SHARED[True], {}, False),
    "windows": (CONFIGS["paper"], {"stream_rows": "accepted"}, True),
    "products with codes": (TOP_KEYS, {"num_kept": 7}, True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bits", KV_BITS)
def test_drafted_text_is_the_plain_one(base, case, bits, monkeypatch):
    """Token for token, greedily and with a seed; prompt and text cross buckets of 16 slots."""
    config, settings, windows = CASES[case]
    monkeypatch.setattr(kv_cache, "reads_packed", lambda: case == "products with codes")
    folder = windowed(base) if windows else base
    adapter = random_adapter(folder, config)
    model = mlx_model(folder, adapter, kv_bits=bits, bucket=16, **settings)
    prompt = np.random.default_rng(7).integers(3, VOCAB, 21).tolist()
    for sampler in (None, Sampler(Sampling(temperature=0.9, seed=5))):

        def text(drafter, sampler=sampler):
            steps = list(decode(model, drafter, prompt, 30, sampler=sampler))
            return [token for step in steps for token in step.tokens], len(steps)

        plain, calls = text(Drafter(1))
        assert calls == 30
        drafted, calls = text(Oracle(plain))
        assert drafted == plain and calls < 25
        assert text(Drafter(8))[0] == plain
    assert model.cache.capacity % 16 == 0


@pytest.mark.heavy
def test_compiled_steps(base, monkeypatch):
    """What runs on a GPU, as far as a CPU can: a compiled graph that multiplies with the codes."""
    monkeypatch.setattr(kv_cache, "reads_packed", lambda: True)
    adapter = random_adapter(base, CONFIGS["bare"])
    texts = []
    for compiled, nodes in ((False, 1), (True, 3)):
        model = mlx_model(base, adapter, num_nodes=3, bucket=32, compiled=compiled, kv_bits=8)
        texts.append([t for step in decode(model, Drafter(nodes), PROMPT, 30) for t in step.tokens])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("config", [CONFIGS["rich"], TOP_KEYS], ids=["rich", "top keys"])
def test_streams_are_the_same_in_every_pass(base, config):
    """In one pass with all rows, alone, and put off until after the commit."""
    adapter = random_adapter(base, config)
    joint, apart = (
        mlx_model(base, adapter, kv_bits=8, stream_rows=rows, num_kept=5) for rows in ("kept", "accepted")
    )
    tree = random_tree(np.random.default_rng(4), 8, 50, VOCAB)
    for model in (joint, apart):
        model.prefill(PROMPT)
    wanted, alone = joint.step(tree), apart.step(tree)
    later = apart.step(tree, defer=True)
    apart.commit(tree.path(later.accepted_node))
    scale = np.abs(wanted.stream_logits).max()
    for streams in (alone.stream_logits, apart.streams()):
        assert np.abs(streams - wanted.stream_logits).max() <= 1e-2 * scale


def test_size_and_distance_from_float(base):
    """Bytes exactly: per value bits / 8, and a scale and a bias of the model's dtype per 32."""
    adapter = random_adapter(base, CONFIGS["paper"])
    found = {
        (bits, dtype): mlx_model(base, adapter, kv_bits=bits, dtype=dtype)
        for bits, dtype in ((None, "float32"), (8, "float32"), (4, "float32"), (4, "float16"))
    }
    logits = {key: next_logits(model, PROMPT) for key, model in found.items()}
    a, size = base.architecture, {key: model.cache.num_bytes for key, model in found.items()}
    values = a.num_layers * 2 * a.num_kv_heads * a.head_dim * found[8, "float32"].cache.capacity
    assert size == {
        (None, "float32"): 4 * values,
        (8, "float32"): values + 2 * 4 * values // 32,  # 0.3125 of float32
        (4, "float32"): values // 2 + 2 * 4 * values // 32,
        (4, "float16"): values // 2 + 2 * 2 * values // 32,
    }
    exact = logits[None, "float32"]
    errors = {bits: np.abs(logits[bits, "float32"] - exact).max() / np.abs(exact).max() for bits in KV_BITS}
    assert 0 < errors[8] <= 0.04 and errors[8] < errors[4] <= 0.8


def test_reset_after_an_interrupt(base):
    model = mlx_model(base, random_adapter(base, CONFIGS["paper"]), kv_bits=4)
    first = model.prefill(PROMPT)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(model.decoder, "logits", _interrupt)
        model.step(root_only(5))
    assert model.cache.layers == []
    again = model.prefill(PROMPT)
    assert again.root == first.root and np.array_equal(again.stream_logits, first.stream_logits)


def _interrupt(*arguments):
    raise KeyboardInterrupt


def test_a_saved_text_goes_on(bundle, tmp_path):
    """Saved, loaded, trimmed and continued: what a new prefill says, and the very same codes."""
    file = tmp_path / "cache.safetensors"

    settings = RuntimeSettings("mlx", "float32", stream_rows="accepted", kv_bits=8)

    def opened():
        model = open_backend(
            bundle,
            bundle.adapter("one"),
            RuntimeSettings("mlx", "float32", stream_rows="accepted", kv_bits=8),
        )
        content = cache_content(bundle, bundle.adapter("one"), settings)
        return ReusingModel(model, CachedText(content, model.cache))

    first = opened()
    list(decode(first, Drafter(6), PROMPT, 12))
    first.text.save(file)
    arrays = mx.load(str(file))
    assert arrays["keys"].dtype == mx.uint32 and arrays["value_scales"].shape[2] == len(arrays["tokens"])
    second = opened()
    second.text.load(file, 256)
    text = second.text.tokens[:]
    assert text == first.text.tokens[: len(text)] and len(text) > len(PROMPT)
    for a, b in zip(first.text.kv.layers, second.text.kv.layers, strict=True):
        for x, y in zip(a, b, strict=True):
            assert np.array_equal(np.array(x[:, :, : len(text)]), np.array(y[:, :, : len(text)]))
    second.text.trim(len(PROMPT) + 2)
    longer = [*text[: len(PROMPT) + 4], 60, 61, 62]
    went_on = [s.tokens for s in decode(second, Drafter(6), longer, 12)]
    assert second.reused == len(PROMPT) + 2
    assert went_on == [s.tokens for s in decode(opened(), Drafter(6), longer, 12)]


def generate(bundle, capsys, *options, status=0):
    arguments = ["--bundle", str(bundle.path), "--prompt", "Hello", "--max-tokens", "8", *options]
    assert ss_generate(arguments) == status
    return capsys.readouterr()


def test_ss_generate_and_its_cache_files(bundle, capsys, tmp_path):
    files = {bits: tmp_path / f"{bits}.safetensors" for bits in ("8", "4", None)}
    texts = {}
    for bits, file in files.items():
        options = ("--adapter", "one", "--json", *(("--kv-bits", bits) if bits else ()))
        plain = json.loads(generate(bundle, capsys, *options, "--plain").out)
        for _ in range(2):  # the second one takes up the file
            drafted = generate(bundle, capsys, *options, "--prompt-cache", str(file)).out
            assert json.loads(drafted)["token_ids"] == plain["token_ids"]
        texts[bits] = file.read_bytes()
    assert len(texts["4"]) < len(texts["8"]) < len(texts[None])
    for bits, file in files.items():
        for other in files.keys() - {bits}:
            options = ("--adapter", "one", *(("--kv-bits", other) if other else ()))
            output = generate(bundle, capsys, *options, "--prompt-cache", str(file), status=2)
            says = f"are {f'in {bits} bits' if bits else 'not quantized'}, here they are"
            assert says in output.err and output.err.count("\n") == 1 and not output.out
        assert file.read_bytes() == texts[bits]
    output = generate(
        bundle, capsys, "--adapter", "two", "--kv-bits", "8", "--prompt-cache", str(files["8"]), status=2
    )
    assert "another base, dtype or adapter" in output.err and output.err.count("\n") == 1


def test_a_damaged_file_is_one_line(bundle, capsys, tmp_path):
    file = tmp_path / "cache.safetensors"
    options = ("--adapter", "one", "--kv-bits", "8", "--prompt-cache", str(file))
    generate(bundle, capsys, *options)
    arrays, about = mx.load(str(file), return_metadata=True)
    for broken, says in (
        ({n: a for n, a in arrays.items() if n != "key_scales"}, "'key_scales' is missing"),
        ({**arrays, "keys": arrays["keys"].astype(mx.float32)}, "'keys' is mlx.core.float32"),
        ({**arrays, "value_biases": arrays["value_biases"][:, :, 1:]}, "'value_biases' is"),
    ):
        mx.save_safetensors(str(file), broken, about)
        output = generate(bundle, capsys, *options, status=2)
        assert says in output.err and output.err.count("\n") == 1, output.err


def test_bad_bits_heads_and_back_ends_are_one_line(bundle, mlx_base, capsys, tmp_path):
    assert set(BITS) == set(KV_BITS)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Hello"}\n')
    small = make_bundle(tmp_path / "small", mlx_base, {"one": CONFIGS["paper"]})  # head_dim 8
    bench = ["run", str(bundle.path), "--adapter", "one", "--input", str(rows)]
    ask = ["--adapter", "one", "--prompt", "a"]
    for main, arguments, says in (
        (ss_generate, ["--bundle", str(bundle.path), *ask, "--kv-bits", "5"], "--kv-bits"),
        (ss_generate, ["--bundle", str(bundle.path), *ask, "--kv-bits", "x"], "--kv-bits"),
        (ss_generate, ["--bundle", str(small.path), *ask, "--kv-bits", "8"], "head_dim of 8"),
        (ss_serve, ["--bundle", str(small.path), "--port", "0", "--kv-bits", "8"], "head_dim of 8"),
        (ss_serve, ["--bundle", str(bundle.path), "--kv-bits", "16"], "--kv-bits"),
        (ss_bench, [*bench, "--kv-bits", "2"], "--kv-bits"),
        (ss_bench, [*bench, "--kv-bits", "8", "--methods", "mlx-lm"], "leave 'mlx-lm' out"),
        *(
            (ss_generate, ["--bundle", str(bundle.path), *ask, "--kv-bits", "8", "--backend", name], says)
            for name, says in (("reference", "leave --kv-bits out"), ("mlxfn", "back end 'mlxfn'"))
        ),
    ):
        assert main(arguments) == 2
        output = capsys.readouterr()
        assert says in output.err and output.err.count("\n") == 1 and output.out == "", output.err
    with pytest.raises(UserError, match="3 bits are not one of 4, 8"):
        open_backend(bundle, bundle.adapter("one"), RuntimeSettings("mlx", "float32", kv_bits=3))


def test_ss_bench_runs_with_it(bundle, capsys, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Hello"}\n')
    options = ["--methods", "plain,ss", "--max-tokens", "8", "--kv-bits", "8", "--json"]
    arguments = ["run", str(bundle.path), "--adapter", "one", "--input", str(rows), *options]
    assert ss_bench([*arguments, "--output", str(tmp_path / "bench.json")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["kv_bits"] == 8
    assert result["methods"]["ss"]["token_exact"] == len(result["methods"]["ss"]["runs"]) == 1
    assert "keys and values in 8 bits" in (tmp_path / "bench.md").read_text()


def test_the_bank_tells_the_smaller_size(bundle):
    caches = []
    for bits in (None, 8):
        bank = AdapterBank(bundle, RuntimeSettings(dtype="float32", kv_bits=bits), ["one"])
        list(decode(bank.activate("one").model, Drafter(6), PROMPT, 4))
        caches.append(max(entry["bytes"] for entry in bank.prompt_caches()))
    assert caches[1] == 0.3125 * caches[0] > 0


def test_ss_serve_answers_with_it(bundle):
    code = "import sys; from ss_runtime.commands.serve import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--bundle", str(bundle.path), "--port", "0", "--kv-bits", "8"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
    try:
        url = process.stderr.readline().split(" at ")[1].split()[0]
        ask = {"model": "one", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/completions", json=ask, timeout=60).json()
        bank = AdapterBank(bundle, RuntimeSettings(dtype="float32", kv_bits=8), ["one"])
        held = httpx.get(url.replace("/v1", "/health"), timeout=60).json()["memory"]["prompt_caches"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
    from ss_runtime.generation import generate as answer_of
    from ss_runtime.tokenization import load_tokenizer

    tokenizer, resident = load_tokenizer(bundle), bank.activate("one")
    ids, stop = tokenizer.encode("Hello"), frozenset(bundle.manifest.architecture.eos_ids)
    plain = answer_of(resident.model, Drafter(1), ids, 8, stop, (), tokenizer)
    assert answer["choices"][0]["text"] == plain.text
    assert max(entry["bytes"] for entry in held) == resident.model.text.kv.num_bytes
