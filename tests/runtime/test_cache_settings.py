"""`ss-generate` with a prompt cache in a file, without an adapter, with a quantized base."""

from __future__ import annotations

import io
import json

import mlx.core as mx
import pytest

from ss_runtime.commands.generate import main
from tests.runtime.bundles import make_bundle
from tests.runtime.mlx_cases import CONFIGS, SHARED


@pytest.fixture(scope="module")
def bundle(mlx_base, tmp_path_factory):
    configs = {"one": CONFIGS["paper"], "two": SHARED[False]}
    return make_bundle(tmp_path_factory.mktemp("cached") / "bundle", mlx_base, configs)


def run(bundle, capsys, *options, status=0):
    assert main(["--bundle", str(bundle.path), "--backend", "mlx", "--max-tokens", "8", *options]) == status
    return capsys.readouterr()


def text(bundle, capsys, *options):
    return json.loads(run(bundle, capsys, "--json", *options).out)["text"]


def cached_tokens(file):
    return mx.load(str(file))["tokens"].tolist()


def test_a_text_goes_on_from_its_file(bundle, capsys, tmp_path):
    file = tmp_path / "cache.safetensors"
    keep = ("--adapter", "one", "--prompt-cache", str(file))
    first = text(bundle, capsys, *keep, "--prompt", "Hello")
    assert first == text(bundle, capsys, "--adapter", "one", "--prompt", "Hello")
    tokens = cached_tokens(file)
    assert len(tokens) > len("Hello")
    longer = "Hello" + first + " and"
    wanted = text(bundle, capsys, "--adapter", "one", "--prompt", longer)
    assert text(bundle, capsys, *keep, "--prompt", longer) == wanted
    assert (
        cached_tokens(file)[:6] == tokens[:6]
    )  # random bytes are no text: only the prompt comes back as it was
    assert text(bundle, capsys, *keep, "--trim-cache", "3", "--prompt", "Hello") == first


def test_a_conversation_goes_on_from_its_file(bundle, capsys, tmp_path, monkeypatch):
    """Two runs with a message each say what one run with both says."""
    file, said = tmp_path / "talk.safetensors", []
    for lines, cache in ((["Hello", "and"], ()), (["Hello"], (file,)), (["and"], (file,))):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        options = [part for f in cache for part in ("--prompt-cache", str(f))]
        said.append(run(bundle, capsys, "--adapter", "one", "--chat", *options))
    assert said[1].out + said[2].out == said[0].out
    assert "continuing a conversation of 2 messages" in said[2].err


def test_bad_caches_and_options_are_one_line(bundle, capsys, tmp_path):
    file = tmp_path / "cache.safetensors"
    text(bundle, capsys, "--adapter", "one", "--prompt-cache", str(file), "--prompt", "Hello")
    content = file.read_bytes()
    damaged, other = tmp_path / "damaged", tmp_path / "other.safetensors"
    damaged.write_bytes(content[:60])
    other.write_bytes((bundle.path / "mlx/base.safetensors").read_bytes())
    (tmp_path / "broken").mkdir()
    arrays, about = mx.load(str(file), return_metadata=True)
    talks = []
    for number, messages in enumerate(("{", '{"role": "user"}', "[3]", '[{"role": "user"}]')):
        talk = str(tmp_path / f"broken/{number}.safetensors")
        mx.save_safetensors(talk, arrays, {**about, "messages": messages})
        talks.append((("--adapter", "one", "--prompt-cache", talk), "conversation"))
    cases = [
        *talks,
        (("--adapter", "two", "--prompt-cache", str(file)), "another base, dtype or adapter"),
        (("--adapter", "one", "--dtype", "float16", "--prompt-cache", str(file)), "another base"),
        (("--adapter", "one", "--quantize", "8", "--prompt-cache", str(file)), "its rows of"),
        (("--adapter", "one", "--prompt-cache", str(damaged)), "not a readable safetensors"),
        (("--adapter", "one", "--prompt-cache", str(other)), "not a prompt cache"),
        (("--adapter", "one", "--prompt-cache", str(tmp_path)), "is a folder"),
        (("--adapter", "one", "--prompt-cache", str(tmp_path / "no" / "file")), "no such folder"),
        (("--adapter", "one", "--trim-cache", "3"), "needs --prompt-cache"),
        (("--adapter", "one", "--prompt-cache", str(tmp_path / "no"), "--trim-cache", "3"), "to trim"),
        (("--adapter", "one", "--prompt-cache", str(file), "--trim-cache", "999"), "cannot be trimmed"),
        (("--no-adapter", "--adapter", "one"), "leave --adapter"),
        (("--adapter", "one", "--prompt-cache", "/proc/cache"), "/proc/cache: cannot be written"),
        (("--adapter", "one", "--seed", "-5"), "seed -5"),
        (("--adapter", "one", "--temp", "nan"), "temperature nan"),
        (("--adapter", "one", "--repetition-penalty", "inf"), "repetition penalty inf"),
        (("--adapter", "one", "--stop-it"), "--stop-it"),
        (("--no-adapter", "--nodes", "4"), "without --lookup"),
    ]
    for options, says in cases:
        output = run(bundle, capsys, *options, "--prompt", "Hello", status=2)
        assert says in output.err and output.err.count("\n") == 1 and output.out == "", output.err
        assert file.read_bytes() == content
    for options in (("--prompt-cache", str(file)), ("--quantize", "8"), ("--no-adapter",)):
        arguments = ["--bundle", str(bundle.path), "--adapter", "one", "--prompt", "a", *options]
        if "--no-adapter" in options:
            arguments = ["--bundle", str(bundle.path), "--prompt", "a", *options]
        assert main([*arguments, "--backend", "reference"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_cache_that_cannot_be_written_in_the_end(bundle, capsys, tmp_path, monkeypatch):
    """One line; the earlier file is as it was, and nothing else is left."""
    file = tmp_path / "cache.safetensors"
    keep = ("--adapter", "one", "--prompt-cache", str(file))
    text(bundle, capsys, *keep, "--prompt", "Hello")
    content = file.read_bytes()

    def refuse(*arguments):
        raise RuntimeError("[save_safetensors] Failed to open file")

    monkeypatch.setattr(mx, "save_safetensors", refuse)
    output = run(bundle, capsys, *keep, "--plain", "--prompt", "Hello", status=2)
    assert "cannot be written" in output.err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == [file.name] and file.read_bytes() == content


def test_drafts_that_were_not_chosen_for_this_cpu_are_named(bundle, capsys, monkeypatch):
    for on_a_cpu, options, hint in (
        (True, (), True),
        (True, ("--json",), True),
        (True, ("--plain",), False),
        (True, ("--nodes", "4"), False),
        (False, (), False),
    ):
        monkeypatch.setattr("ss_runtime.drafts.drafts_need_tuning", lambda: on_a_cpu)  # noqa: B023
        shown = run(bundle, capsys, "--adapter", "one", "--prompt", "Hello", "--dtype", "float32", *options)
        assert ("one: not tuned for this device" in shown.err) == hint
        assert "tuned" not in shown.out


def test_a_prompt_that_is_no_text(bundle, capsys, tmp_path):
    """Bytes of a shell that are not UTF-8, half a surrogate pair in a file."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "\\ud800"}\n')
    for options in (("--prompt", "a\udcff"), ("--input", str(rows))):
        output = run(bundle, capsys, "--adapter", "one", *options, status=2)
        assert "not Unicode text" in output.err or "rows.jsonl:1: not valid JSON" in output.err
        assert output.err.count("\n") == 1


def test_the_base_alone_says_what_a_lossless_adapter_says(bundle, capsys):
    wanted = text(bundle, capsys, "--adapter", "one", "--prompt", "Hello")
    assert text(bundle, capsys, "--no-adapter", "--prompt", "Hello") == wanted
    assert text(bundle, capsys, "--no-adapter", "--lookup", "--nodes", "6", "--prompt", "Hello") == wanted
    assert text(bundle, capsys, "--adapter", "two", "--prompt", "Hello") != wanted
