"""Nothing that a file says leads out of its folder, runs code, or costs a user's folder."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from ss_convert.command import main as ss_convert
from ss_device.training.command import main as ss_train
from ss_runtime.commands.bench import main as ss_bench
from ss_runtime.commands.generate import main as ss_generate
from tests.commands.conftest import SIZES
from tests.tiny_models import TINY_RECIPE

SMALL = ("--target", "mlx", "--no-golden")


@pytest.fixture
def own_models(models, tmp_path):
    """A copy of the models folder, to be damaged."""
    shutil.copytree(models, tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
def victim(tmp_path):
    """A file of the user's beside everything, that must stay as it is."""
    file = tmp_path / "victim" / "model.safetensors"
    file.parent.mkdir()
    file.write_text("mine")
    yield file
    assert file.read_text() == "mine"
    assert sorted(p.name for p in file.parent.iterdir()) == ["model.safetensors"]


def edit(path, change):
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def convert(models, *words):
    return ss_convert(["--models", str(models), *map(str, words)])


@pytest.fixture
def bundle(own_models, tmp_path):
    assert convert(own_models, "--adapter", "tiny", "--output", tmp_path / "bundle", *SMALL, *SIZES) == 0
    return tmp_path / "bundle"


@pytest.mark.parametrize("name", ["../../../victim/model", "/tmp/model", "a/b", "..", "x\u001b[2J", ""])
def test_an_adapters_name_is_a_name(own_models, tmp_path, victim, capsys, name):
    edit(own_models / "adapters/tiny/speculative_config.json", lambda raw: raw.update(app=name))
    for output in (("--output", tmp_path / "out"), ()):
        assert convert(own_models, "--adapter", "tiny", *output, *SMALL) == 2
        error = capsys.readouterr().err
        assert "application" in error and "is no name" in error and error.strip().isprintable()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../base/tiny-base", "a/b/c", "/etc"])
def test_a_base_is_named_not_located(own_models, tmp_path, capsys, name):
    config = own_models / "adapters/tiny/speculative_config.json"
    edit(config, lambda raw: raw["base"].update(name=name))
    assert convert(own_models, "--adapter", "tiny", "--output", tmp_path / "out", *SMALL) == 2
    assert "base" in capsys.readouterr().err


PATHS = ("tensor_file", "bigram_bias_file", "golden")


@pytest.mark.parametrize("path", ["../victim/model.safetensors", "/etc/passwd", "mlx/../../victim/model"])
@pytest.mark.parametrize("entry", PATHS)
def test_paths_of_a_manifest_stay_in_the_bundle(bundle, victim, capsys, entry, path):
    edit(bundle / "manifest.json", lambda raw: raw["adapters"]["tiny"].update({entry: path}))
    assert ss_generate(["--bundle", str(bundle), "--prompt", "Hi"]) == 2
    assert "leads out of the folder" in capsys.readouterr().err


def test_an_adapter_of_a_bundle_is_called_as_its_entry_says(bundle, rows_file, tmp_path, victim, capsys):
    """`{app}` in --output of ss-bench becomes part of a path."""

    def rename(raw):
        raw["adapters"] = {"../victim/model": raw["adapters"]["tiny"] | {"app": "../victim/model"}}

    edit(bundle / "manifest.json", rename)
    output = tmp_path / "in" / "{app}.safetensors"
    words = ["run", bundle, "--input", tmp_path / "{app}.jsonl", "--output", output]
    assert ss_bench([str(word) for word in words]) == 2
    assert "is no name" in capsys.readouterr().err


@pytest.fixture
def rows_file(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hi"}\n')
    return tmp_path / "rows.jsonl"


def test_only_plain_files_are_copied_into_an_extended_bundle(bundle, own_models, tmp_path, victim, capsys):
    """A link in a bundle: neither is what it leads to copied, nor is it written through."""
    tensors = bundle / "mlx/adapters/tiny.safetensors"
    size = tensors.stat().st_size
    tensors.unlink()
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * size)
    tensors.symlink_to(secret)
    before = sorted(p.name for p in bundle.rglob("*"))
    assert convert(own_models, "--adapter", "tiny", "--into", bundle) == 2
    assert "symbolic link" in capsys.readouterr().err
    assert sorted(p.name for p in bundle.rglob("*")) == before and secret.read_bytes() == b"s" * size


def test_a_tuning_is_not_written_through_a_link(bundle, rows_file, victim, capsys):
    content = victim.read_bytes()
    (bundle / "tuning.json").symlink_to(victim)
    assert ss_bench(["tune", str(bundle), "--input", str(rows_file), "--rounds", "1"]) == 2
    assert "tuning.json: is a symbolic link" in capsys.readouterr().err
    assert victim.read_bytes() == content


def test_a_pipe_in_a_run_is_not_waited_for(own_models, tmp_path, capsys):
    (tmp_path / "new.run").mkdir()
    os.mkfifo(tmp_path / "new.run" / "log.jsonl")
    words = training(own_models, tmp_path, "base")
    assert ss_train([*words, "--output", str(tmp_path / "new"), "--resume"]) == 2
    assert "log.jsonl: is not a plain file" in capsys.readouterr().err


def test_a_pipe_in_a_models_folder_is_not_waited_for(own_models, tmp_path, capsys):
    """Libraries open files that no command of ours names, the tokenizer's settings among them."""
    base = own_models / "base" / "tiny-base"
    os.mkfifo(base / "special_tokens_map.json")
    for words in (training(own_models, tmp_path, "adapter"), training(own_models, tmp_path, "lora")):
        assert ss_train([*words, "--output", str(tmp_path / "new")]) == 2
        assert "special_tokens_map.json: not a plain file" in capsys.readouterr().err
    assert convert(own_models, "--adapter", "tiny", "--output", tmp_path / "out", *SMALL) == 2
    assert "special_tokens_map.json: not a plain file" in capsys.readouterr().err


def test_a_bundles_form_that_contradicts_itself_is_named(bundle, own_models, capsys):
    edit(bundle / "manifest.json", lambda raw: raw["made"]["package"].update(lora_rank=8))
    assert convert(own_models, "--adapter", "tiny", "--into", bundle) == 2
    assert f"{bundle}: package: lora 'baked' and lora_rank 8" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["base", "adapter", "lora"])
@pytest.mark.parametrize("name", ["log.jsonl", "checkpoint"])
def test_a_run_is_not_written_through_a_link(own_models, tmp_path, capsys, kind, name):
    words = training(own_models, tmp_path, kind)
    (tmp_path / "new.run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "record.json").write_text("mine")
    target = "elsewhere" if name == "checkpoint" else "elsewhere/record.json"
    (tmp_path / "new.run" / name).symlink_to(tmp_path / target)
    assert ss_train([*words, "--output", str(tmp_path / "new"), "--resume"]) == 2
    assert f"new.run/{name}: is a symbolic link" in capsys.readouterr().err
    assert (tmp_path / "elsewhere" / "record.json").read_text() == "mine"


def test_files_of_the_users_are_never_replaced(bundle, own_models, tmp_path, capsys):
    """A bundle with a foreign file is not even replaced with --force; another bundle needs --force."""
    words = ("--adapter", "tiny", "--output", bundle, *SMALL)
    assert convert(own_models, *words) == 2
    assert "--force replaces it" in capsys.readouterr().err
    (bundle / "notes.txt").write_text("mine")
    assert convert(own_models, *words, "--force") == 2
    assert "is not a bundle of this command" in capsys.readouterr().err
    assert (bundle / "notes.txt").read_text() == "mine"
    (bundle / "notes.txt").unlink()
    assert convert(own_models, *words, "--force") == 0


@pytest.mark.parametrize("kind", ["lora", "adapter", "base"])
def test_a_folder_of_the_users_is_not_trained_over(own_models, tmp_path, capsys, kind):
    """Neither the output nor `<output>.run` is touched where the command did not write them."""
    words = training(own_models, tmp_path, kind)
    for name in ("mine", "mine.run"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "thesis.txt").write_text("mine")
        for more in ((), ("--force",), ("--resume",)):
            output = tmp_path / ("mine" if name == "mine" else name.removesuffix(".run"))
            status = ss_train([*words, "--output", str(output), *more])
            error = capsys.readouterr().err
            assert status == 2 and "choose another --output" in error, (name, more, error)
            assert (folder / "thesis.txt").read_text() == "mine"
        shutil.rmtree(folder)


def training(models, folder, kind):
    """The command line of a short training on rows in `folder`, without --output."""
    row = {"question": "q", "context": "CREATE TABLE t (a INT)", "answer": "SELECT a FROM t"}
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 12)
    (folder / "recipe.toml").write_text(TINY_RECIPE)
    if kind == "base":
        return ["base", str(folder / "recipe.toml"), "--data", str(folder), "--steps", "1"]
    base = models / "base" / "tiny-base"
    words = [kind, "sqlctx", "--base", str(base), "--data", str(folder / "rows.jsonl")]
    return words + (["--set", "num_msa_layers=2"] if kind == "adapter" else [])


def test_python_in_a_models_folder_is_not_run(own_models, tmp_path, capsys, monkeypatch):
    """`auto_map` names a class in a file of the folder; nobody is asked, and nothing is imported."""
    base = own_models / "base" / "tiny-base"
    (base / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('ran')\n")
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit(base / "config.json", lambda raw: raw.update(auto_map=names))
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "context": "c", "answer": "a"}\n')
    words = ["score", "sqlctx", "--base", base, "--data", tmp_path / "rows.jsonl", "--limit", 1]
    assert ss_train([str(word) for word in [*words, "--max-tokens", 2]]) in (0, 2)
    assert not (tmp_path / "ran").exists()
