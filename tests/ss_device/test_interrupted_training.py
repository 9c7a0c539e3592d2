"""What a killed training run leaves, and how the next one takes it up."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from ss_device.errors import UserError
from ss_device.training import pretrain as module
from ss_device.training.budget import Budget
from ss_device.training.log import open_log
from ss_device.training.pretrain import pretrain, trained_time
from ss_device.training.run_folder import open_run
from ss_device.training.settings import RunOptions
from tests.ss_device.test_pretrain import OFTEN, RESUME, recipe, weights  # noqa: F401


def test_a_log_with_half_a_line_goes_on(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    with open_log(path, 2) as log:
        log.write('{"step": 3}\n')
    assert [json.loads(line)["step"] for line in path.open()] == [1, 2, 3]


def test_half_the_settings_of_a_run_are_named(tmp_path):
    folder = tmp_path / "out.run"
    open_run(folder, {"rank": 2}, resume=False)
    (folder / "settings.json").write_text('{"ra')
    with pytest.raises(UserError, match="settings.json"):
        open_run(folder, {"rank": 2}, resume=True)


def test_an_optimizers_state_that_does_not_fit_is_named(recipe, tmp_path):  # noqa: F811
    pretrain(recipe, tmp_path, tmp_path / "base", Budget(steps=2))
    file = tmp_path / "base.run/checkpoint/optimizer.safetensors"
    whole = load_file(file)
    misnamed = {name.replace("0.exp_avg", "0.exq_avg"): tensor for name, tensor in whole.items()}
    misshapen = {**whole, "0.exp_avg": whole["0.exp_avg"][:1]}
    for damaged, says in ((misnamed, "other states than"), (misshapen, "'0.exp_avg' has shape")):
        save_file({name: tensor.contiguous() for name, tensor in damaged.items()}, file)
        with pytest.raises(UserError, match=f"optimizer.safetensors: not the optimizer's state .*{says}"):
            pretrain(recipe, tmp_path, tmp_path / "base", Budget(steps=1), run=RESUME)


def fail(*arguments):
    raise KeyboardInterrupt


@pytest.mark.parametrize("further", [False, True])
def test_a_model_that_was_not_written_is_all_that_a_resumed_run_makes(
    recipe,  # noqa: F811
    tmp_path,
    monkeypatch,
    further,
):
    """No further stretch is trained in its place, and the earlier model does not pass for it."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    stretches = [Budget(steps=5), *([Budget(steps=4)] if further else [])]
    for number, budget in enumerate(stretches):
        pretrain(recipe, tmp_path, whole, budget, run=RunOptions(resume=number > 0))
        with monkeypatch.context() as patched:
            if budget is stretches[-1]:
                patched.setattr(module, "save_base", fail)
                with pytest.raises(KeyboardInterrupt):
                    pretrain(recipe, tmp_path, cut, budget, run=RunOptions(resume=number > 0))
            else:
                pretrain(recipe, tmp_path, cut, budget, run=RunOptions(resume=number > 0))
    assert cut.exists() == further and not trained_time(cut).ended
    pretrain(recipe, tmp_path, cut, run=RESUME)
    assert trained_time(cut).ended and trained_time(cut).minutes > 0
    expected = weights(whole)
    assert all(tensor.equal(expected[name]) for name, tensor in weights(cut).items())
    steps = json.loads((tmp_path / "cut.run/checkpoint/record.json").read_text())["step"]
    assert steps == json.loads((tmp_path / "whole.run/checkpoint/record.json").read_text())["step"]


def test_a_held_stretch_killed_between_its_two_states_is_finished(recipe, tmp_path, monkeypatch):  # noqa: F811
    from ss_device.training import base_run

    original, budget = base_run.save_checkpoint, Budget(steps=4, hold=True)

    def killed(folder, *more):
        if folder.name == "held":
            fail()
        original(folder, *more)

    monkeypatch.setattr(base_run, "save_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        pretrain(recipe, tmp_path, tmp_path / "out", budget, settings=OFTEN)
    monkeypatch.undo()
    pretrain(recipe, tmp_path, tmp_path / "out", budget, run=RESUME)
    held = json.loads((tmp_path / "out.run/held/record.json").read_text())
    assert held["step"] == 4 and not (tmp_path / "out").exists()


def test_a_model_that_no_mark_stands_for_is_written_again(recipe, tmp_path):  # noqa: F811
    """Without `written.json` nobody knows whether the output is this run's: no further stretch begins."""
    pretrain(recipe, tmp_path, tmp_path / "base", Budget(steps=2))
    before = weights(tmp_path / "base")
    (tmp_path / "base.run/written.json").unlink()
    pretrain(recipe, tmp_path, tmp_path / "base", run=RESUME)
    assert json.loads((tmp_path / "base.run/written.json").read_text()) == {"step": 2}
    assert all((tensor == before[name]).all() for name, tensor in weights(tmp_path / "base").items())
    pretrain(recipe, tmp_path, tmp_path / "base", Budget(steps=1), run=RESUME)
    assert json.loads((tmp_path / "base.run/written.json").read_text()) == {"step": 3}
