"""MLX in lossless mode against the untouched base model in Hugging Face (docs/method.md, Invariants)."""

import mlx.core as mx
import numpy as np
import pytest
import torch

from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_device.tree import root_only, tree_from_parents
from tests.runtime.mlx_cases import CONFIGS, PROMPT, SHARED, adapter_arrays, mlx_model, random_tree
from tests.tiny_models import VOCAB, make_tiny_base, random_adapter

NEW_TOKENS = 40


@pytest.fixture(scope="module")
def expected(hugging_face):
    return greedy(hugging_face, PROMPT)


def greedy(model, prompt):
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


def text(model, drafter, prompt=PROMPT):
    return [token for step in decode(model, drafter, prompt, NEW_TOKENS) for token in step.tokens]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_kept": 3},
        {"num_kept": 5, "prune_over": "vocabulary"},
        {"stream_rows": "accepted", "num_kept": 6},
        {"stream_rows": "none"},
    ],
    ids=str,
)
def test_greedy_output_is_the_base_models(mlx_base, expected, name, settings):
    model = mlx_model(mlx_base, random_adapter(mlx_base, CONFIGS[name]), **settings)
    for drafter in (Drafter(8), Drafter(7, "chain"), Drafter(8, "k-ary", 2), Drafter(1)):
        assert text(model, drafter) == expected


def test_good_drafts_are_accepted(mlx_base, expected):
    """With the right draft a step yields its whole depth, by one call and one commit."""
    model = mlx_model(mlx_base, random_adapter(mlx_base, CONFIGS["paper"]))
    root = model.prefill(PROMPT).root
    emitted = [root]
    while len(emitted) < 30:
        draft = expected[len(emitted) : len(emitted) + 3]
        tokens = [root, 7, 9, draft[0], 11, draft[1], 13, draft[2]]
        verified = model.step(tree_from_parents(tokens, [-1, 0, 0, 0, 1, 3, 3, 5]))
        assert verified.accepted_node == 7
        model.commit([0, 3, 5, 7])
        root = int(verified.chosen[7])
        emitted += [*draft, root]
    assert emitted == expected[: len(emitted)]


@pytest.mark.parametrize("num_kept", [9, 4])
def test_every_node_chooses_as_its_path_alone(mlx_base, hugging_face, num_kept):
    model = mlx_model(mlx_base, random_adapter(mlx_base, CONFIGS["rich"]), num_nodes=9, num_kept=num_kept)
    rng = np.random.default_rng(0)
    for num_nodes in (9, 6, 1):
        model.prefill(PROMPT)
        tree = random_tree(rng, num_nodes, 50, VOCAB)
        verified = model.step(tree)
        assert len(verified.kept) == min(num_nodes, num_kept) and verified.kept[0] == 0
        for node, chosen in zip(verified.kept, verified.chosen, strict=True):
            path = tree.path(node)
            assert set(path) <= set(verified.kept)
            sequence = torch.tensor([PROMPT + tree.tokens[path].tolist()])
            assert hugging_face(sequence).logits[0, -1].argmax() == chosen


def test_untied_head(tmp_path):
    from transformers import LlamaForCausalLM

    base = make_tiny_base(tmp_path / "untied", seed=3, tie_word_embeddings=False)
    expected = greedy(LlamaForCausalLM.from_pretrained(base.path).eval(), PROMPT)
    model = mlx_model(base, random_adapter(base, CONFIGS["paper"]), num_kept=4)
    assert text(model, Drafter(8)) == expected


def test_long_prompts_and_growing_buffers(mlx_base, hugging_face):
    """Prompts around the chunk size; buffers that grow several times while generating."""
    rng = np.random.default_rng(1)
    adapter = random_adapter(mlx_base, CONFIGS["paper"])
    model = mlx_model(mlx_base, adapter, bucket=8, context=512)
    for length in (300, 257, 1, 2):
        prompt = rng.integers(3, VOCAB, length).tolist()
        assert text(model, Drafter(8), prompt) == greedy(hugging_face, prompt)


@pytest.mark.parametrize("stream_rows", ["kept", "accepted"])
def test_fewer_streams_give_the_first_drafts(mlx_base, stream_rows):
    """Invariant 6: streams see no later stream, so γ' < γ drafts are a prefix."""
    config = CONFIGS["rich"]
    adapter = random_adapter(mlx_base, config)
    one = type(config)(**{**config.to_dict(), "num_streams": 1})
    tensors = {**adapter.tensors, "stream_embeddings": adapter.tensors["stream_embeddings"][:1]}
    fewer = type(adapter)(**{**vars(adapter), "config": one, "tensors": tensors})
    tree = random_tree(np.random.default_rng(2), 8, 50, VOCAB)
    drafts = []
    for each in (adapter, fewer):
        model = mlx_model(mlx_base, each, stream_rows=stream_rows)
        drafts.append(
            np.stack([model.prefill(PROMPT).stream_logits[:1], model.step(tree).stream_logits[:1]])
        )
    np.testing.assert_allclose(drafts[0], drafts[1], atol=1e-5)


def test_stream_embeddings_change_drafts_only(mlx_base):
    adapter = random_adapter(mlx_base, CONFIGS["paper"])
    moved = {**adapter.tensors, "stream_embeddings": adapter.tensors["stream_embeddings"] + 1}
    tree = random_tree(np.random.default_rng(3), 8, 50, VOCAB)
    outcomes = []
    for tensors in (adapter.tensors, moved):
        model = mlx_model(mlx_base, type(adapter)(**{**vars(adapter), "tensors": tensors}))
        model.prefill(PROMPT)
        outcomes.append(model.step(tree))
    assert np.array_equal(outcomes[0].chosen, outcomes[1].chosen)
    assert np.abs(outcomes[0].stream_logits - outcomes[1].stream_logits).max() > 0.1


def test_separate_pass_drafts_as_the_joint_one(mlx_base):
    tree = random_tree(np.random.default_rng(4), 8, 50, VOCAB)
    adapter = random_adapter(mlx_base, CONFIGS["rich"])
    outcomes = []
    for stream_rows in ("kept", "accepted"):
        model = mlx_model(mlx_base, adapter, stream_rows=stream_rows, num_kept=5)
        model.prefill(PROMPT)
        outcomes.append(model.step(tree))
    assert np.array_equal(outcomes[0].chosen, outcomes[1].chosen)
    np.testing.assert_allclose(outcomes[0].stream_logits, outcomes[1].stream_logits, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_runs(mlx_base, dtype):
    model = mlx_model(mlx_base, random_adapter(mlx_base, CONFIGS["rich"]), num_kept=4, dtype=dtype)
    assert model.cache.layers[0][0].dtype == getattr(mx, dtype)
    assert text(model, Drafter(8))[:4] == text(model, Drafter(1))[:4]


@pytest.mark.heavy
def test_compiled_step(mlx_base, expected):
    """Compiled: same text, and a weight changed later is not ignored. Heavy: MLX compiles C++ on a CPU."""
    adapter = random_adapter(mlx_base, CONFIGS["bare"])
    model = mlx_model(mlx_base, adapter, num_nodes=3, bucket=32, compiled=True)
    assert text(model, Drafter(3)) == expected
    before = model.prefill(PROMPT).stream_logits
    model.decoder.stream_embeddings = model.decoder.stream_embeddings + 1
    assert np.abs(model.prefill(PROMPT).stream_logits - before).max() > 0.1


def test_wrong_settings_and_arrays_are_refused_by_name(mlx_base):
    adapter = random_adapter(mlx_base, CONFIGS["paper"])
    for settings, words in (
        ({"num_kept": 9}, "kept nodes 9"),
        ({"prune_over": "all"}, "prune_over 'all'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"stream_rows": "some"}, "stream_rows 'some'"),
    ):
        with pytest.raises(UserError, match=words):
            mlx_model(mlx_base, adapter, **settings)
    attends = random_adapter(mlx_base, SHARED[True])
    with pytest.raises(UserError, match="attends to streams"):
        mlx_model(mlx_base, attends, stream_rows="none")
    short = {n: t for n, t in adapter_arrays(adapter).items() if n != "pruning.a"}
    with pytest.raises(UserError, match="'pruning.a' is missing"):
        mlx_model(mlx_base, type(adapter)(**{**vars(adapter), "tensors": short}))


def test_misuse_raises(mlx_base):
    model = mlx_model(mlx_base, random_adapter(mlx_base, CONFIGS["paper"]), context=len(PROMPT) + 1)
    with pytest.raises(RuntimeError, match="commit follows"):
        model.commit([0])
    model.prefill(PROMPT)
    model.step(root_only(5))
    with pytest.raises(UserError, match="context"):
        model.step(tree_from_parents([5, 6], [-1, 0]))
    with pytest.raises(UserError, match="9 nodes"):
        model.step(random_tree(np.random.default_rng(0), 9, 5, VOCAB))
