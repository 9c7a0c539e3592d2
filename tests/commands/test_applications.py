"""A new application is a new app.toml: pair and chat kinds, files and a data set, through ss-train."""

from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ss_device.application import load_application
from ss_device.conversation import Message
from ss_device.errors import UserError
from ss_device.training.chat_template import with_tokenizer_template
from ss_device.training.command import main
from ss_device.training.examples import encode_examples, encode_prompts, load_prompts
from tests.commands.test_train_command import SETTINGS
from tests.tiny_models import make_tiny_base

PAIR = """
name = "capitals"
[prompt]
template = "{{country}}:"
completion = " {{capital}}"
[data]
hub = "{hub}"
columns = {{ country = "land", capital = "city" }}
[metric]
name = "rouge"
reference = "capital"
[stop]
strings = [";"]
max_tokens = 8
"""
CHAT = """
name = "talk"
kind = "chat"
[chat]
user = ["U: ", "\\n"]
assistant = ["A:", "\\n"]
[stop]
max_tokens = 6
"""
TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m['role'] }}\n{{ m['content'] }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("applications")
    make_tiny_base(root / "base")
    for name, text in (("capitals", PAIR.format(hub=root / "hub")), ("talk", CHAT)):
        (root / "apps" / name).mkdir(parents=True)
        (root / "apps" / name / "app.toml").write_text(text)
    (root / "hub").mkdir()
    write_rows(root / "hub/train.jsonl", [{"land": f"L{i}", "city": f"C{i}"} for i in range(12)])
    write_rows(root / "hub/test.jsonl", [{"land": f"L{i % 3}", "city": f"C{i}"} for i in range(6)])
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    write_rows(root / "talk.jsonl", [{"conversations": turns * (1 + i % 2)} for i in range(10)])
    return root


@pytest.fixture(autouse=True)
def offline(folder, monkeypatch):
    monkeypatch.setenv("SS_APPS", str(folder / "apps"))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache"))


def run(*arguments) -> None:
    assert main([str(a) for a in arguments]) == 0


@pytest.mark.parametrize(("app", "data", "test"), [("capitals", "hub", "hub:test"), ("talk", None, None)])
def test_distill_adapter_evaluate_of_a_new_application(folder, tmp_path, capsys, app, data, test):
    data, test = data or folder / "talk.jsonl", test or folder / "talk.jsonl"
    base = ("--base", folder / "base")
    sampled = ("--temp", "0.7", "--samples", "2", "--max-tokens", "6")
    run("distill", app, *base, "--data", data, "--output", tmp_path / "own.jsonl", *sampled)
    rows = [json.loads(line) for line in (tmp_path / "own.jsonl").open()]
    # 12 countries twice; the conversations have two different histories before an assistant turn.
    assert len(rows) == (24 if app == "capitals" else 4)
    run("adapter", app, *base, "--data", tmp_path / "own.jsonl", "--settings", SETTINGS, "--loss", "kl",
        "--epochs", "1", "--output", tmp_path / "adapter")  # fmt: skip
    capsys.readouterr()
    run("evaluate", tmp_path / "adapter", *base, "--data", test, "--nodes", "5", "--limit", "3", "--json")
    result = json.loads(capsys.readouterr().out)
    run("score", app, *base, "--data", test, "--limit", "3", "--json")
    plain = json.loads(capsys.readouterr().out)
    assert result["prompts"] == plain["prompts"] == (3 if app == "capitals" else 2)
    if app == "capitals":
        # A lossless adapter answers what the base answers.
        for figure in ("rouge1", "rouge2", "rougeLsum", "rouge1_interval"):
            assert result[figure] == plain[figure]
    else:
        assert "exact_match" not in result


def test_lora_is_a_peft_folder_that_score_reads(folder, tmp_path, capsys):
    base = ("--base", folder / "base")
    common = ("lora", "capitals", *base, "--data", "hub", "--rank", "2", "--epochs", "4",
              "--learning-rate", "0.02")  # fmt: skip
    run(*common, "--output", tmp_path / "lora")
    raw = json.loads((tmp_path / "lora/finetune.json").read_text())
    assert raw["app"] == "capitals" and raw["parameters"] == 3 * 2 * (2 * 64 + 2 * 48 + 3 * 80)
    lines = [json.loads(line) for line in (tmp_path / "lora.run/log.jsonl").open()]
    assert lines[-1]["step"] == lines[-1]["steps"]
    capsys.readouterr()
    run("score", "capitals", *base, "--lora", tmp_path / "lora", "--data", "hub", "--limit", "2", "--json")
    result = json.loads(capsys.readouterr().out)
    low, high = result["rouge1_interval"]
    assert low <= result["rouge1"] <= high and result["prompts"] == 2


def test_chat_documents_learn_assistant_turns_only(folder):
    app, tokenizer = load_application("talk"), Tokenizer.from_file(str(folder / "base/tokenizer.json"))
    pairs = [p for p in load_prompts(app, folder / "talk.jsonl") if len(p[1]["conversations"]) == 4]
    document = encode_examples(app, pairs, tokenizer, 1, 2, 200)[0]
    texts = [tokenizer.decode(document.ids[a:b].tolist(), skip_special_tokens=False)
             for a, b in document.generated]  # fmt: skip
    assert texts == ["yes<|eos|>", "yes<|eos|>"]
    whole = tokenizer.decode(document.ids.tolist(), skip_special_tokens=False)
    assert whole == "<|bos|>U: hi\nA:yes<|eos|>\nU: hi\nA:yes<|eos|>"
    prompt = encode_prompts(app, pairs[:1], tokenizer, 1, 2)[0]
    assert prompt == document.ids[: document.generated[-1][0]].tolist()
    # A conversation that is too long keeps its first whole turns.
    short = encode_examples(app, pairs, tokenizer, 1, 2, len(document.ids) - 1)[0]
    assert short.generated == document.generated[:1]


def test_the_tokenizers_own_chat_template(folder, tmp_path, capfd):
    base = make_tiny_base(tmp_path / "base").path
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "app.toml").write_text('name = "t"\nkind = "chat"\n[chat]\ntemplate = "tokenizer"\n')
    app = load_application(str(tmp_path / "app.toml"))
    with pytest.raises(UserError, match="no chat template"):
        with_tokenizer_template(app, folder / "base")
    raw = json.loads((base / "tokenizer.json").read_text())
    raw["added_tokens"][0]["unknown"] = True  # of which native code tells on stdout
    (base / "tokenizer.json").write_text(json.dumps(raw))
    app = with_tokenizer_template(app, base)
    printed = capfd.readouterr()
    assert printed.out == ""
    turns = [("user", "hi"), ("assistant", "yes"), ("user", "so"), ("assistant", "no")]
    write_rows(tmp_path / "m.jsonl", [{"messages": [{"role": r, "content": c} for r, c in turns]}])
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    document = encode_examples(app, load_prompts(app, tmp_path / "m.jsonl"), tokenizer, 1, 2, 200)[0]
    pieces = [tokenizer.decode(document.ids[a:b].tolist(), skip_special_tokens=False)
              for a, b in document.generated]  # fmt: skip
    assert pieces == ["yes<|eos|>", "no<|eos|>"]


MORE_OF_JINJA = (
    "{{ bos_token }}{%- for m in messages %}{% if loop.index > 4 %}{% break %}{% endif %}\n"
    "    {%- if m.role == 'assistant' %}<{% generation %}{{ m.content | trim }}{% endgeneration %}>\n"
    "    {%- else %}{{ {'é': m.content, 'n': [1]} | tojson }}{{ eos_token }}{% endif %}\n"
    "{% endfor %}{{ strftime_now('%Y') | length }}{% if add_generation_prompt %}[next]{% endif %}"
)


def template_app(folder, base, template, tmp_path):
    """An application whose conversations are rendered by `template`, in a copy of the base."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template,
              "bos_token": "<|bos|>", "eos_token": "<|eos|>"}  # fmt: skip
    shutil.copytree(folder / "base", base)
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "app.toml").write_text('name = "t"\nkind = "chat"\n[chat]\ntemplate = "tokenizer"\n')
    return with_tokenizer_template(load_application(str(tmp_path / "app.toml")), base)


@pytest.mark.parametrize("template", [TEMPLATE, MORE_OF_JINJA])
def test_a_template_is_rendered_as_transformers_does(folder, tmp_path, template):
    app = template_app(folder, tmp_path / "base", template, tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "base")
    turns = [Message(("user", "assistant")[i % 2], f" <turn> {i} ") for i in range(6)]
    for count in range(1, 7):
        raw = [{"role": m.role, "content": m.content} for m in turns[:count]]
        for open_next in (False, True):
            wanted = theirs.apply_chat_template(raw, tokenize=False, add_generation_prompt=open_next)
            assert app.chat.render(turns[:count], open_next) == wanted


def test_a_template_that_takes_too_much_is_ended(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("ss_device.template_process.SECONDS", 1.0)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    app = template_app(folder, tmp_path / "base", endless, tmp_path)
    with pytest.raises(UserError, match="chat template took more than"):
        app.chat.render([Message("user", "hi")], True)
    app = template_app(folder, tmp_path / "filling", "{{ 'a' * 10**9 }}", tmp_path)
    with pytest.raises(UserError, match="chat template (refuses|took)"):
        app.chat.render([Message("user", "hi")], True)


@pytest.mark.parametrize(
    ("app", "rows", "line", "says"),
    [
        (
            "capitals",
            '\n{"country": "a", "capital": "b"}\n{"country": "a"}\n',
            ":3: ",
            "no field 'capital'",
        ),
        ("capitals", '{"country": null, "capital": "b"}\n', ":1: ", "'country' is NoneType"),
        ("capitals", '{"country"\n', ":1: ", "not valid JSON"),
        ("capitals", "", "", "no rows"),
        ("capitals", '{"country": "' + "a" * 400 + '", "capital": "b"}\n', "", "fits into 256 tokens"),
        ("talk", '{"conversations": []}\n', ":1: ", "at least one"),
        ("talk", '{"conversations": [{"from": "dog", "value": "x"}]}\n', ":1: ", "role 'dog'"),
        ("talk", '{"conversations": [{"from": "human", "value": 3}]}\n', ":1: ", "no text 'value'"),
        ("talk", '{"conversations": [{"from": "human", "value": "x"}]}\n', ":1: ", "no assistant turn"),
        ("talk", '{"text": "x"}\n', ":1: ", "no field 'conversations' or 'messages'"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(refuses, folder, tmp_path, app, rows, line, says):
    data = tmp_path / "rows.jsonl"
    data.write_text(rows)
    arguments = ("adapter", app, "--base", folder / "base", "--data", data, "--settings", SETTINGS)
    where = f"{data}{line}" if line else ""
    refuses(main, *arguments, "--output", tmp_path / "never", says=(where, says))
    assert not (tmp_path / "never").exists()


def test_bad_data_sets_and_descriptions_are_named(refuses, folder, tmp_path):
    common = ("score", "--base", folder / "base")
    refuses(main, *common, "capitals", "--data", "hub:nosuch", says=("split 'nosuch'", str(folder / "hub")))
    refuses(main, *common, "talk", "--data", "hub", says=("names no hub data set",))
    for text, says in (
        (PAIR.replace("city", "town").replace("{hub}", str(folder / "hub")), "no column 'town'"),
        (PAIR.replace('"rouge"', '"bleu"'), "metric.name 'bleu'"),
        (CHAT.replace('user = ["U: ", "\\n"]', ""), "chat.user"),
        (PAIR.replace('name = "capitals"', ""), "'name' is missing"),
    ):
        file = tmp_path / "app.toml"
        file.write_text(text.replace("{{", "{").replace("}}", "}"))
        refuses(main, *common, file, "--data", "hub", says=(says,))
