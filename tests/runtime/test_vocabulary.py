"""Every back end and every reader refuses a token id that the embedding has no row for."""

from __future__ import annotations

import mlx.core as mx
import pytest
from tokenizers import AddedToken, Tokenizer

from ss_device.bundle import open_bundle
from ss_device.errors import UserError
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import load_stream_model
from ss_device.tree import root_only, tree_from_parents
from ss_runtime.mlx.cached_text import CachedText
from ss_runtime.mlx.function_export import export_functions, functions_of
from ss_runtime.mlx.function_model import FunctionModel
from ss_runtime.reused_text import ReusingModel
from ss_runtime.tokenization import BundleTokenizer, load_tokenizer
from tests.runtime.bundles import make_bundle
from tests.runtime.mlx_cases import CONFIGS, PROMPT, mlx_model
from tests.runtime.test_coreml_model import make_model
from tests.tiny_models import VOCAB, random_adapter


def exported(base, adapter, folder):
    model = mlx_model(base, adapter, num_kept=8, context=64, stream_rows="kept")
    sizes = {"num_nodes": 8, "num_kept": 8, "prune_over": "draft", "context": 64, "chunk": 4}
    functions = functions_of("tiny", adapter.config, **sizes, dtype="float32")
    export_functions(model.decoder, functions, mx.float32, folder / "tiny.mlxfn")
    a = base.architecture
    shape = a.num_layers, a.num_kv_heads, a.head_dim
    return FunctionModel(folder / "tiny.mlxfn", functions, adapter.config, shape, a.vocab_size)


@pytest.fixture(params=["mlx", "reference", "mlxfn", "coreml"])
def model(request, mlx_base, tmp_path):
    adapter = random_adapter(mlx_base, CONFIGS["bare"])
    if request.param == "mlx":
        return mlx_model(mlx_base, adapter)
    if request.param == "reference":
        return ReferenceStepModel(load_stream_model(mlx_base, adapter, "float32"), 8)
    if request.param == "mlxfn":
        return exported(mlx_base, adapter, tmp_path)
    return make_model()[0]


def test_prompts_and_trees_with_foreign_ids_are_refused(model):
    vocab = model.limits.vocab_size
    for bad in (vocab, -1, 2**40):
        with pytest.raises(UserError, match=f"the prompt: token id {bad} lies outside"):
            model.prefill([1, bad, 5])
    model.prefill([1, 5])
    for bad in (vocab, -1, 40_000_000):
        with pytest.raises(UserError, match=f"the draft tree: token id {bad} lies outside"):
            model.step(tree_from_parents([5, bad], [-1, 0]))
    model.prefill([1] * model.limits.context)
    with pytest.raises(UserError, match="past the context"):
        model.step(root_only(5))
    model.prefill([1, 5])
    verified = model.step(root_only(5))
    with pytest.raises(ValueError, match="not kept"):
        model.commit([0, len(verified.kept)])


def with_token(base, text: str, count: int = 1) -> Tokenizer:
    """The base's tokenizer with so many tokens behind the embedding's last row."""
    tokenizer = Tokenizer.from_file(str(base.path / "tokenizer.json"))
    missing = VOCAB - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<filler{i}>", normalized=False) for i in range(missing)])
    tokenizer.add_tokens([AddedToken(f"{text}{i or ''}", normalized=False) for i in range(count)])
    return tokenizer


def test_a_prompt_that_needs_a_token_beyond_the_embedding(mlx_base):
    tokenizer = BundleTokenizer(with_token(mlx_base, "<extra>"), 1, VOCAB)
    assert tokenizer.encode("plain")[0] == 1
    with pytest.raises(UserError, match=r"token id 300 \('<extra>'\) lies outside .* 300 tokens"):
        tokenizer.encode("an <extra> token")


def test_ids_that_the_tokenizer_does_not_know_are_no_text(mlx_base):
    """The embedding may have more rows than the tokenizer has tokens, and a model may choose them."""
    tokenizer = BundleTokenizer(Tokenizer.from_file(str(mlx_base.path / "tokenizer.json")), 1, VOCAB)
    known = tokenizer.encode("ab")[1:]
    assert tokenizer.tokenizer.id_to_token(VOCAB - 1) is None
    assert tokenizer.decode([known[0], VOCAB - 1, known[1]]) == "ab"
    writer = tokenizer.detokenizer()
    texts = [writer.add(token) for token in (known[0], VOCAB - 1, known[1], VOCAB - 1)]
    assert "".join(texts) + writer.finish() == "ab"


def test_a_manifest_whose_bos_lies_outside(mlx_base, tmp_path):
    bundle = make_bundle(tmp_path / "bundle", mlx_base, {"a": CONFIGS["bare"]})
    assert load_tokenizer(bundle).encode("a")[0] == 1
    file = bundle.path / "manifest.json"
    file.write_text(file.read_text().replace('"bos_id": 1', f'"bos_id": {2**40}'))
    with pytest.raises(UserError, match=f"manifest.json: bos_id: token id {2**40} lies outside"):
        open_bundle(bundle.path)


@pytest.mark.parametrize("tokens", [[1, 300, 5], [1, -1, 5], [1.0, 2.0, 3.0], [[1, 2, 3]]])
def test_a_prompt_cache_with_foreign_ids(mlx_base, tmp_path, tokens):
    def reusing():
        model = mlx_model(mlx_base, random_adapter(mlx_base, CONFIGS["bare"]))
        return ReusingModel(model, CachedText("same", model.cache))

    model = reusing()
    model.prefill(PROMPT)
    model.text.save(tmp_path / "cache.safetensors")
    arrays, about = mx.load(str(tmp_path / "cache.safetensors"), return_metadata=True)
    arrays = {name: array if name == "tokens" else array[:, :, :3] for name, array in arrays.items()}
    kind = mx.float32 if isinstance(tokens[0], float) else mx.int32
    arrays["tokens"] = mx.array(tokens, kind)
    mx.save_safetensors(str(tmp_path / "bad.safetensors"), arrays, about)
    other = reusing()
    other.prefill(PROMPT)
    with pytest.raises(UserError, match="bad.safetensors: (its text: token id|'tokens' is)"):
        other.text.load(tmp_path / "bad.safetensors", 128, VOCAB)
    assert other.text.tokens == PROMPT
