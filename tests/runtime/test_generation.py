"""Streaming text, stop strings, counts: on a scripted step model and on a tiny one."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from ss_device.acceptance import walk
from ss_device.decoding import Drafter
from ss_device.step_model import Proposal, StepLimits, Verified
from ss_runtime.generation import generate, generate_steps
from ss_runtime.tokenization import BundleTokenizer
from tests.runtime.mlx_cases import CONFIGS, mlx_model
from tests.tiny_models import VOCAB, random_adapter

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(mlx_base):
    return BundleTokenizer(Tokenizer.from_file(str(mlx_base.path / "tokenizer.json")), 1, VOCAB)


class Scripted:
    """A step model that writes `text` and drafts it right, so a step yields up to 4 tokens."""

    def __init__(self, tokenizer, text, end=True):
        self.script = tokenizer.encode(text)[1:] + [EOS] * end
        self.limits = StepLimits(num_nodes=4, num_kept=4, num_streams=3, context=500)

    def _logits(self, position):
        logits = np.zeros((3, VOCAB), np.float32)
        for row, token in enumerate(self.script[position : position + 3]):
            logits[row, token] = 9
        return logits

    def prefill(self, tokens):
        self.position = 0
        return Proposal(self.script[0], self._logits(1))

    def step(self, tree):
        chosen = np.array([self._token(self.position + int(d) + 1) for d in tree.depths])
        accepted = walk(tree, np.arange(tree.num_nodes), chosen)[-1]
        position = self.position + int(tree.depths[accepted]) + 2
        return Verified(np.arange(tree.num_nodes), chosen, accepted, self._logits(position))

    def _token(self, position):
        return self.script[position] if position < len(self.script) else 7

    def commit(self, path):
        self.position += len(path)


def run(tokenizer, text, num_nodes=4, stops=(), max_tokens=100, end=True):
    model = Scripted(tokenizer, text, end)
    arguments = (Drafter(num_nodes, "chain"), [1, 50], max_tokens, frozenset([EOS]), stops, tokenizer)
    records = list(generate_steps(model, *arguments))
    return records, generate(model, *arguments)


def test_counts_and_json(tokenizer):
    records, result = run(tokenizer, "abcdefgh")
    assert result.text == "abcdefgh" == "".join(r.text for r in records)
    assert result.token_ids[-1] == EOS and result.generated_tokens == 9
    assert result.finish_reason == "stop" and result.prompt_tokens == 2
    assert result.steps == 2 and result.tokens_per_call == 4.0
    assert [r.num_drafted for r in records] == [0, 3, 3]
    assert set(result.seconds) == {"prefill", "decode"}
    assert json.loads(json.dumps(result.to_dict()))["text"] == "abcdefgh"


def test_one_token_has_no_calls(tokenizer):
    _, result = run(tokenizer, "abc", max_tokens=1)
    assert result.text == "a" and result.steps == 0 and result.tokens_per_call is None
    assert result.finish_reason == "length"


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_stop_strings_cut_text_and_tokens_alike_for_any_drafter(tokenizer, num_nodes):
    records, result = run(tokenizer, "SELECT a; -- more", num_nodes, (" --", ";"))
    assert result.text == "SELECT a" and result.finish_reason == "stop"
    assert tokenizer.decode(result.token_ids) == "SELECT a;"
    assert all(";" not in r.text for r in records)


def test_a_begun_stop_string_is_held_back_and_given_back(tokenizer):
    records, result = run(tokenizer, "ab\n\ncd\n", 1, ("\n\n\n",))
    assert result.text == "ab\n\ncd\n"
    assert [r.text for r in records] == ["a", "b", "", "", "\n\nc", "d", "", "\n"]
    _, cut = run(tokenizer, "ab\n\ncd", 1, ("\n\n\n",), max_tokens=4)
    assert cut.text == "ab\n\n" and cut.finish_reason == "length"


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_no_half_characters(tokenizer, num_nodes):
    text = "naïve 日本語 🙂!"
    records, result = run(tokenizer, text, num_nodes)
    assert result.text == text
    assert all("\ufffd" not in r.text for r in records)
    _, cut = run(tokenizer, "a🙂", num_nodes, max_tokens=3)
    assert cut.text == tokenizer.decode(cut.token_ids)


def test_prompt_starts_with_bos_once(tokenizer):
    assert tokenizer.encode("a")[0] == 1 and len(tokenizer.encode("a")) == 2
    assert tokenizer.decode(tokenizer.encode("a")) == "a"


def test_text_of_a_model_does_not_depend_on_the_drafter(mlx_base, tokenizer):
    model = mlx_model(mlx_base, random_adapter(mlx_base, CONFIGS["paper"]))
    prompt = tokenizer.encode("Hello")
    texts = {
        generate(model, Drafter(n), prompt, 40, frozenset([EOS]), ("zz",), tokenizer).text
        for n in (1, 5, 8)
    }
    assert len(texts) == 1
