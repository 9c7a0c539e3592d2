"""Whatever a file holds, its reader returns or raises UserError: nothing else, and no endless work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ss_device.errors import UserError
from tests.fuzz.inputs import WORK
from tests.fuzz.kinds import KINDS
from tests.fuzz.sealing import seal
from tests.fuzz.strategies import (
    damaged_bytes,
    damaged_json,
    damaged_lines,
    damaged_tensors,
    damaged_toml,
    damaged_values,
)

STRATEGIES = {
    "json": damaged_json,
    "jsonl": damaged_lines,
    "toml": damaged_toml,
    "tensors": damaged_tensors,
    "gzip": damaged_bytes,
    "proto": damaged_bytes,
    "bytes": damaged_bytes,
}
# The same examples in every run: what fails here fails everywhere.
SETTINGS = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def _bundle(verify: bool = False) -> Callable:
    def read(work: Path) -> None:
        from ss_device.bundle import open_bundle

        opened = open_bundle(work / "bundle", verify=verify)
        for adapter in opened.manifest.adapters.values():
            opened.bigram_bias(adapter)

    return read


def _adapter(name: str) -> Callable:
    def read(work: Path) -> None:
        from ss_device.adapter import load_adapter
        from ss_device.base_model import open_base

        adapter = load_adapter(work / "models/adapters" / name)
        adapter.check_base(open_base(work / "models/base/tiny-base"))

    return read


def _base(name: str) -> Callable:
    def read(work: Path) -> None:
        from ss_device.base_model import open_base

        open_base(work / "models/base" / name).weights()

    return read


def _traces(stem: str) -> Callable[[Path], None]:
    def read(work: Path) -> None:
        from ss_device.trace import load_traces, trace_record

        load_traces(work / stem)
        trace_record(work / stem)

    return read


def _tokenizer(work: Path) -> None:
    from ss_device.bundle import open_bundle
    from ss_runtime.tokenization import load_tokenizer

    load_tokenizer(open_bundle(work / "bundle")).encode("SELECT a")


def _chat_prompt(work: Path) -> None:
    from ss_device.bundle import open_bundle
    from ss_runtime.chat_prompt import ChatPrompt
    from ss_runtime.tokenization import load_tokenizer

    bundle = open_bundle(work / "bundle")
    ChatPrompt(bundle.path, load_tokenizer(bundle)).ids([{"role": "user", "content": "hello"}])


def _tuning(work: Path) -> None:
    from ss_device.bundle import open_bundle
    from ss_runtime.tuning import read_tuning

    bundle = open_bundle(work / "bundle")
    for app in ("tiny", "shared"):
        read_tuning(bundle, app, "float32")


def _package(work: Path) -> None:
    from ss_executor import ExecutorError, load_package

    try:
        load_package(work / "bundle/coreml/tiny-base.mlpackage")
    except ExecutorError as error:
        raise UserError(str(error)) from error


def _application(name: str) -> Callable:
    def read(work: Path) -> None:
        from ss_device.application import load_application

        app = load_application(str(work / "apps" / name / "app.toml"))
        row = {"context": "CREATE TABLE t (a INTEGER)", "question": "q?", "answer": "SELECT a"}
        row["messages"] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
        app.pieces(row)
        app.references(row)

    return read


def _recipe(work: Path) -> None:
    from ss_device.training.recipe import load_recipe

    load_recipe(work / "recipe.toml").on("cuda")


def _rows(name: str, app: str | None = None) -> Callable:
    def read(work: Path) -> None:
        from ss_device.application import load_application
        from ss_device.json_lines import read_json_lines

        known = load_application(str(work / "apps" / app / "app.toml")) if app else None
        for row in read_json_lines(work / "data" / name):
            if known and known.kind == "pair":
                known.pieces(row)
                known.references(row)

    return read


def _bench_result(work: Path) -> None:
    from ss_runtime.bench import report

    before, after = (report.read_result(work / f"results/{name}.json") for name in ("before", "after"))
    report.comparison_markdown(report.compare(before, after))


READERS: dict[str, Callable[[Path], None]] = {
    "manifest": _bundle(),
    "bundle adapter": _bundle(),
    "adapter config": _adapter("tiny"),
    "shared adapter config": _adapter("shared"),
    "adapter tensors": _adapter("tiny"),
    "peft tensors": _adapter("shared"),
    "base config": _base("tiny-base"),
    "base weights": _base("tiny-base"),
    "shards": _base("sharded-base"),
    "shard index": _base("sharded-base"),
    "golden traces": _traces("bundle/golden/tiny"),
    "golden tensors": _traces("bundle/golden/tiny"),
    "recorded traces": _traces("traces/tiny"),
    "recorded tensors": _traces("traces/tiny"),
    "bundle tokenizer": _tokenizer,
    "bundle tokenizer config": _chat_prompt,
    "tuning": _tuning,
    "package manifest": _package,
    "package model": _package,
    "package weights": _package,
    "application": _application("pair"),
    "chat application": _application("talk"),
    "recipe": _recipe,
    "training rows": _rows("rows.jsonl", "pair"),
    "zipped rows": _rows("rows.jsonl.gz", "pair"),
    "bench result": _bench_result,
}


@pytest.fixture(scope="module")
def work(inputs, tmp_path_factory) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(inputs / WORK, tmp_path_factory.mktemp("readers") / WORK))


@pytest.mark.parametrize("kind", READERS)
def test_readers_return_or_raise_user_errors(work, kind):
    about = KINDS[kind]
    file = work / about.paths[0]
    sound, listed = file.read_bytes(), {p: p.read_bytes() for p in _digests(work)}

    @SETTINGS
    @given(STRATEGIES[about.format](sound))
    def check(damaged: bytes) -> None:
        try:
            file.write_bytes(damaged)
            seal(work, about.paths[0])
            READERS[kind](work)
        except UserError as error:
            assert str(error)
        finally:
            for path, content in listed.items():
                path.write_bytes(content)

    try:
        check()
    finally:
        file.write_bytes(sound)


def _digests(work: Path) -> list[Path]:
    """Files that `seal` rewrites."""
    return [
        work / "bundle/manifest.json",
        *sorted((work / "models/adapters").glob("*/speculative_config.json")),
    ]


@pytest.mark.parametrize("chat", [False, True])
def test_requests_are_parsed_or_refused(work, chat):
    from ss_runtime.serve.requests import RequestError, RequestLimits, parse_request

    sound = json.loads((work / "data" / ("chat.json" if chat else "text.json")).read_text())

    @SETTINGS
    @given(damaged_values(sound))
    def check(body: object) -> None:
        try:
            parse_request(body, chat, RequestLimits(259, 128, 16))
        except RequestError as error:
            assert 400 <= error.status < 500 and error.message

    check()


def test_settings_are_read_or_refused():
    from ss_device.config import SpeculativeConfig, plus_config

    @SETTINGS
    @given(damaged_values(plus_config().to_dict()))
    def check(raw: object) -> None:
        try:
            SpeculativeConfig.from_dict(raw)
        except UserError as error:
            assert str(error)

    check()


@SETTINGS
@given(st.text(max_size=40))
def test_templates_are_filled_or_refused(template):
    from ss_device.application import fill_template

    try:
        fill_template(template, {"a": "b", "0": "c"}, "app")
    except UserError as error:
        assert str(error)
