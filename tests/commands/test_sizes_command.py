"""`ss-convert sizes`: packages of one and of two adapters beside what base and adapters take."""

from __future__ import annotations

import json

from ss_convert.command import main as ss_convert
from ss_device.adapter import save_adapter
from ss_device.base_model import open_base
from tests.commands.conftest import CONFIG
from tests.tiny_models import random_adapter


def test_two_adapters_and_two_weight_formats(models, tmp_path, capsys):
    base = open_base(models / "base" / "tiny-base")
    save_adapter(random_adapter(base, CONFIG, 2, "other"), base.architecture, tmp_path / "other")
    names = ["--adapter", "tiny", "--adapter", str(tmp_path / "other"), "--models", str(models)]
    assert ss_convert(["sizes", *names, "--weights", "int8", "--weights", "fp16", "--json"]) == 0
    int8, fp16 = json.loads(capsys.readouterr().out)["rows"]
    assert (int8["weights"], int8["embedding_weights"]) == ("int8", "int8")
    assert (fp16["weights"], fp16["embedding_weights"]) == ("fp16", "fp16")
    assert fp16["base"] == 2 * base.architecture.num_parameters() > int8["base"]
    for row in (int8, fp16):
        assert list(row["own"]) == ["tiny", "other"] and row["own"]["tiny"] == row["own"]["other"] > 0
        one, two = row["merged"]
        assert row["base"] + row["own"]["tiny"] <= one and one + row["own"]["other"] <= two < 2 * one


def test_what_does_not_fit_is_refused(refuses, models):
    where = ("sizes", "--models", models)
    refuses(ss_convert, *where, says=("the following arguments are required: --adapter",))
    refuses(ss_convert, *where, "--adapter", "tiny", "--weights", "int9", says=("--weights", "'int9'"))
