"""Chat prompts from templates, and conversations on standard input."""

from __future__ import annotations

import io
import json
import time

import pytest

from ss_device.errors import UserError
from ss_runtime.chat_prompt import ChatPrompt
from ss_runtime.commands.generate import main
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


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{{ c }}"
FILLING = [
    ENDLESS + "{% endfor %}" * 3,
    "{{ ('a' * 99999) * 99999 }}",
    "{{ 'a'.center(9999999999) }}",
    "{{ '%9999999999d' % 1 }}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{{ range(99999) | join('a' * 99999) }}",
    "{{ (messages | length) ** 99999999999 }}",
]


@pytest.mark.parametrize("template", FILLING, ids=range(len(FILLING)))
def test_a_template_that_takes_too_much_is_ended(bundle, monkeypatch, template):
    """Time and memory are bounded, nothing is left running, and the next conversation is answered."""
    monkeypatch.setattr("ss_device.template_process.SECONDS", 1.0)
    chat = write_template(bundle, "{% if messages | length > 1 %}" + template + "{% else %}fine{% endif %}")
    started = time.monotonic()
    with pytest.raises(UserError, match="chat template (took more than|refuses)"):
        chat.text(MESSAGES)
    assert time.monotonic() - started < 10
    assert chat.text(MESSAGES[:1]) == "fine"


@pytest.mark.parametrize("template", [3, {"a": 1}, [3]])
def test_a_template_that_is_no_text_is_named(bundle, template):
    if template == [3]:
        assert write_template(bundle, template).text(MESSAGES) == "Hi\nYes?"
    else:
        with pytest.raises(UserError, match="chat_template is (int|dict), expected text"):
            write_template(bundle, template)


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
