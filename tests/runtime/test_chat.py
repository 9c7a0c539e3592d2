"""Chat prompts from templates, and conversations on standard input."""

from __future__ import annotations

import io
import json

import pytest

from ss_device.errors import UserError
from ss_runtime.chat_prompt import ChatPrompt
from ss_runtime.generate_command import main
from ss_runtime.tokenization import load_tokenizer
from tests.runtime.bundles import make_bundle
from tests.runtime.mlx_cases import CONFIGS

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]


@pytest.fixture
def bundle(mlx_base, tmp_path):
    return make_bundle(tmp_path / "bundle", mlx_base, {"one": CONFIGS["paper"]})


def write_template(bundle, template):
    config = {"chat_template": template, "bos_token": {"content": "<|bos|>"}}
    (bundle.path / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatPrompt(bundle.path, load_tokenizer(bundle))


def test_template_is_filled_and_bos_stands_once(bundle):
    chat = write_template(bundle, TEMPLATE)
    assert chat.text(MESSAGES) == "<|bos|>[user]Hi[assistant]Yes?[assistant]"
    ids = chat.ids(MESSAGES)
    assert ids.count(1) == 1 and ids[0] == 1
    assert load_tokenizer(bundle).decode(ids) == "[user]Hi[assistant]Yes?[assistant]"
    named = write_template(bundle, [{"name": "default", "template": "{{ messages[0].content }}"}])
    assert named.text(MESSAGES) == "Hi"


def test_without_a_template_contents_are_joined(bundle):
    assert ChatPrompt(bundle.path, load_tokenizer(bundle)).text(MESSAGES) == "Hi\nYes?"


def test_templates_can_refuse_and_cannot_reach_out(bundle):
    for template, says in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", "refuses"),
    ):
        with pytest.raises(UserError, match=says):
            write_template(bundle, template).text(MESSAGES)


def test_conversation_holds_what_was_said(bundle, monkeypatch, capsys):
    """The second answer is that of one prompt with the whole conversation; a long message is left out."""
    options = ["--bundle", str(bundle.path), "--backend", "mlx", "--max-tokens", "8"]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"Hello\n\n{'x' * 300}\nand\n"))
    assert main([*options, "--chat"]) == 0
    output = capsys.readouterr()
    assert "the context holds 256" in output.err and "no chat template" in output.err
    answers = []
    for said in ("Hello", "and"):
        prompt = "\n".join([*(["Hello", answers[0]] if answers else []), said])
        assert main([*options, "--json", "--prompt", prompt]) == 0
        answers.append(json.loads(capsys.readouterr().out)["text"])
    assert output.out == "".join(answer + "\n" for answer in answers)


def test_chat_writes_text_only(bundle, capsys):
    assert main(["--bundle", str(bundle.path), "--chat", "--json"]) == 2
    assert "leave --json" in capsys.readouterr().err
