"""ss-bench: figures from scripted runs, exactness of real methods, tuning, comparison, bad input."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace

import mlx.core as mx
import pytest

from ss_device.bundle import write_manifest
from ss_device.draft_choice import DraftChoice
from ss_device.draft_policy import NUM_CELLS, Experience, StepCosts
from ss_device.errors import UserError
from ss_runtime.bench import report
from ss_runtime.bench.cost_table import tuning_costs
from ss_runtime.bench.device_memory import MemoryLedger
from ss_runtime.bench.measurement import RUN_COLUMNS, Series, interleave, summarize
from ss_runtime.bench.methods import Run
from ss_runtime.bench.tuner import candidates
from ss_runtime.commands.bench import main
from ss_runtime.commands.generate import main as ss_generate
from ss_runtime.tuning import AdaptiveChoice, device_name, read_tuning, write_tuning
from tests.runtime.bundles import make_bundle
from tests.runtime.mlx_cases import CONFIGS


@pytest.fixture(scope="module")
def bundle(mlx_base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "bundle"
    return make_bundle(folder, mlx_base, {"one": CONFIGS["rich"]})


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text('{"prompt": "Hello"}\n{"prompt": "the same, the same"}\n')
    return file


def test_methods_take_turns_after_a_warm_up():
    order = []

    def method(name):
        return lambda prompt, limit: order.append((name, prompt[0])) or Run([1, 2], 1.0)

    series = interleave({"hf": method("a"), "hf-assisted": method("b")}, [[1], [2]], 5)
    assert order == [("a", 1), ("b", 1), ("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    assert [len(s.runs) for s in series.values()] == [2, 2]
    assert series["hf"].held_bytes is series["hf"].peak_bytes is None


class Learner:
    """A method that knows which prompts it has seen since it last forgot."""

    def __init__(self):
        self.seen = []

    def forget(self):
        self.seen = []

    def __call__(self, prompt, limit):
        known, self.seen = prompt in self.seen, [*self.seen, prompt]
        return Run([int(known)], 1.0)


def test_no_counted_prompt_was_seen_before():
    """Neither in the warm-up nor in an earlier repeat."""
    series = interleave({"hf": Learner()}, [[1], [2]], 5, repeats=3)
    assert [run.tokens for run in series["hf"].runs] == [[0]] * 6


def test_memory_of_a_method_is_its_own():
    """Two methods that hold 4 and 1 MB and take 2 and 3 MB on top in a run, freed afterwards."""
    mx.clear_cache()
    held, memory = {}, MemoryLedger(("a", "b"))

    def method(name, on_top):
        def run(prompt, limit):
            extra = mx.ones((on_top, 1 << 18))
            mx.eval(extra)
            return Run([1], 1.0)

        return run

    methods = {}
    for name, size, on_top in (("a", 4, 2), ("b", 1, 3)):
        with memory.account(name, counted=False):
            held[name] = mx.ones((size, 1 << 18))
            mx.eval(held[name])
            methods[name] = method(name, on_top)
    series = interleave(methods, [[1], [2]], 5, memory=memory)
    assert {n: s.held_bytes / 2**20 for n, s in series.items()} == pytest.approx({"a": 4, "b": 1}, abs=0.1)
    assert {n: s.peak_bytes / 2**20 for n, s in series.items()} == pytest.approx({"a": 6, "b": 4}, abs=0.1)


def test_figures_by_hand():
    plain = Series([Run([5, 6, 7], 2.5, 0.5, [1.0, 1.0]), Run([5, 2], 1.25, 0.25, [1.0])])
    fast = Series([Run([5, 6, 7], 1.5, 0.5, [1.0]), Run([5, 3], 0.75, 0.25, [0.5])], peak_bytes=10)
    found = summarize({"plain": plain, "fast": fast})["fast"]
    assert found["runs"] == [[3, 1.5, 0.5, 1, 1.0, True], [2, 0.75, 0.25, 1, 0.5, False]]
    assert len(found["runs"][0]) == len(RUN_COLUMNS) and found["token_exact"] == 1
    totals = found["totals"]
    assert totals["tokens"] == 5 and totals["seconds"] == 2.25 and totals["calls"] == 2
    assert totals["tokens_per_second"] == pytest.approx(5 / 2.25, abs=1e-4)
    assert totals["decode_tokens_per_second"] == 2.0 and totals["mean_step_seconds"] == 0.75
    assert totals["host_seconds_per_call"] == 0.0
    assert found["total_speedup_end_to_end"] == pytest.approx(3.75 / 2.25, abs=1e-4)
    assert found["total_speedup_decode"] == 2.0 and found["mean_step_cost_ratio"] == 0.75
    assert found["decode_tokens_per_second"]["median"] == 2.0
    assert found["speedup_decode"] == {"median": 2.0, "p10": 2.0, "p90": 2.0}
    assert found["speedup_end_to_end"]["median"] == pytest.approx(5 / 3)
    assert found["step_cost_ratio"] == 0.75 and found["peak_bytes"] == 10
    assert found["first_token_seconds"]["median"] == 0.375


def test_run_measures_exact_methods_and_compare_reads_them(bundle, rows, mlx_base, tmp_path, capsys):
    write_tuning(bundle, "one", "float32", DraftChoice(4, "chain", True), {})
    names = "plain,ss,ss-lookup,ss-tuned,prompt-lookup,mlx-lm,mlx-lm-draft,hf,hf-prompt-lookup,hf-assisted"
    output = tmp_path / "out" / "a.json"
    folders = ["--base", mlx_base.path, "--draft", mlx_base.path]
    options = ["--methods", names, "--max-tokens", 9, "--output", output, "--plot", tmp_path / "a.png"]
    command = ["run", bundle.path, "--input", rows, "--dtype", "float32", *options, *folders]
    assert main([str(part) for part in command]) == 0
    printed = capsys.readouterr().out
    result = json.loads(output.read_text())
    assert set(result["methods"]) == set(names.split(","))
    for name, found in result["methods"].items():
        assert found["token_exact"] == len(found["runs"]) == 2, name
        assert found["totals"]["tokens"] == sum(run[0] for run in found["runs"])
        assert (found["peak_bytes"] is None) == name.startswith("hf")
        assert (found["peak_bytes"] or 1) >= (found["held_bytes"] or 0)
    lines = output.read_text().splitlines()
    assert sum(line.endswith(("true],", "true]")) for line in lines) == 2 * len(result["methods"])
    assert result["blas_threads"] is None or result["blas_threads"] >= 1
    assert "not measured" in printed
    assert result["methods"]["plain"]["acceptance"]["tokens_per_call"] == 1.0
    assert result["methods"]["ss-lookup"]["acceptance"]["rows_per_call"] > 1
    assert "| ss-tuned |" in printed and output.with_suffix(".md").read_text() in printed
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert main(["compare", str(output), str(output)]) == 0
    assert "| plain |" in (table := capsys.readouterr().out) and "| 1.000 |" in table
    assert main(["compare", str(output), str(output), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["methods"]["hf"]["rate"] == "end_to_end_tokens_per_second"
    assert compared["methods"]["ss"]["ratio"] == 1.0 and compared["differences"] == {}


def figures(**changed):
    """One method's figures of format version 1, as far as others read them."""
    spread = {"median": 2.0, "p10": 1.0, "p90": 3.0}
    rates = {"decode_tokens_per_second": spread, "end_to_end_tokens_per_second": spread}
    return {**rates, "speedup_end_to_end": spread, **changed}


def write_result_file(path, methods, version=1):
    path.write_text(json.dumps({"format_version": version, "methods": methods}))
    return str(path)


def test_results_are_compared_by_a_rate_that_both_have(tmp_path, capsys):
    no_decoding = figures(decode_tokens_per_second=None)
    neither = figures(decode_tokens_per_second=None, end_to_end_tokens_per_second=None)
    a = write_result_file(tmp_path / "a.json", {"plain": figures(), "hf": no_decoding, "x": neither})
    b = write_result_file(tmp_path / "b.json", {"plain": no_decoding, "hf": no_decoding, "x": figures()}, 2)
    assert main(["compare", a, b, "--json"]) == 0
    methods = json.loads(capsys.readouterr().out)["methods"]
    assert [found["ratio"] for found in methods.values()] == [1.0, 1.0, None]
    assert methods["plain"]["rate"] == "end_to_end_tokens_per_second"
    assert main(["compare", a, b]) == 0 and "| x | – | – |" in capsys.readouterr().out


def test_plots_of_several_applications(tmp_path, capsys):
    a = write_result_file(tmp_path / "benchmark_a.json", {"plain": figures(), "ss": figures()})
    b = write_result_file(tmp_path / "b.json", {"plain": figures(), "hf": figures()})
    costs = {"sizes": [1, 4], "seconds": [0.01, 0.02], "streams": 0.005, "pruned": []}
    entry = {"choice": {}, "evidence": {"costs": costs}}
    tuning = tmp_path / "tuning.json"
    tuning.write_text(json.dumps({"devices": {"x": {"a:float32": entry}}}))
    picture = tmp_path / "all.png"
    assert main(["plot", a, b, "--tuning", str(tuning), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    both = picture.stat().st_size
    assert main(["plot", a, b, "--output", str(picture)]) == 2 and picture.stat().st_size == both
    assert "exists already; --force replaces it" in capsys.readouterr().err
    assert main(["plot", a, b, "--output", str(picture), "--force"]) == 0
    assert picture.stat().st_size != both
    content = picture.read_bytes()
    damaged = tmp_path / "damaged.json"
    wrong = {"evidence": {"costs": {**costs, "pruned": "x"}}}
    damaged.write_text(json.dumps({"devices": {"x": {"a:float32": wrong}}}))
    tuning.write_text(json.dumps({"devices": {"x": {"a:float32": {"evidence": []}}}}))
    none = write_result_file(tmp_path / "none.json", {"plain": figures(speedup_end_to_end=None)})
    (tmp_path / "other").mkdir()
    for command, says in (
        ([a, b, "--tuning", str(tuning)], "no table of costs"),
        ([a, b, "--tuning", str(damaged)], "(Expected 'array', got 'str' - at 'pruned')"),
        ([none], "no result has a speed-up"),
        ([a, write_result_file(tmp_path / "other" / "a.json", {})], "named 'a'"),
        ([str(tmp_path / "nothing.json")], "no such file"),
    ):
        assert main(["plot", *command, "--force", "--output", str(picture)]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1 and picture.read_bytes() == content


def test_tune_writes_a_choice_that_generate_uses(bundle, rows, capsys):
    (bundle.path / "tuning.json").unlink(missing_ok=True)
    command = ["tune", bundle.path, "--input", rows, "--max-tokens", 6, "--rounds", 2, "--dtype", "float32"]
    assert main([str(part) for part in [*command, "--json"]]) == 0
    result = json.loads(capsys.readouterr().out)
    choice = read_tuning(bundle, "one", "float32")
    evidence = result["evidence"]
    assert len(evidence["candidates"]) == len(candidates(6, 2)) + 1 + 4 == 21
    assert [(p["nodes"], p["kept"]) for p in evidence["costs"]["pruned"]] == [(6, 3), (6, 1)]
    assert evidence["costs"]["sizes"] == [1, 2, 4, 6] and len(evidence["costs"]["seconds"]) == 4
    table = tuning_costs(bundle.path / "tuning.json")["one:float32"]
    assert table.sizes == (1, 2, 4, 6) and list(table.seconds) == evidence["costs"]["seconds"]
    assert [asdict(pruned) for pruned in table.pruned] == evidence["costs"]["pruned"]
    assert "replay of 1 of 2 prompts" in evidence["source"]
    best = max(evidence["candidates"], key=lambda e: e["tokens_per_second"])
    assert best["draft"] == result["choice"] == choice.label()
    assert read_tuning(bundle, "one", "float16") is None
    costs = StepCosts((1, 6), (0.01, 0.02), 0.005)
    adaptive = AdaptiveChoice(6, costs, Experience(90.0, ((2.0, 0.01),) * NUM_CELLS, trust=((7, 0.5),)))
    write_tuning(bundle, "one", "float32", adaptive, {})
    assert read_tuning(bundle, "one", "float32") == adaptive
    write_tuning(bundle, "one", "float32", DraftChoice(1), {})
    ask = [
        "--bundle",
        str(bundle.path),
        "--dtype",
        "float32",
        "--prompt",
        "Hello",
        "--max-tokens",
        "9",
        "--json",
    ]
    assert ss_generate(ask) == 0
    tuned = json.loads(capsys.readouterr().out)
    assert tuned["steps"] == tuned["generated_tokens"] - 1
    write_tuning(bundle, "one", "float32", adaptive, {})
    pruned = DraftChoice(6, num_kept=3)
    for drafts, choice in (([], adaptive), ([], pruned), (["--nodes", "6"], pruned)):
        write_tuning(bundle, "one", "float32", choice, {})
        assert ss_generate([*ask, *drafts]) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == tuned["token_ids"]


def test_tune_without_prompts_reads_the_recorded_ranks(mlx_base, tmp_path, capsys):
    bundle = make_bundle(tmp_path / "bundle", mlx_base, {"one": CONFIGS["rich"]})
    command = ["tune", str(bundle.path), "--rounds", "2", "--dtype", "float32", "--json"]
    assert main(command) == 2
    assert "give prompts with --input" in (error := capsys.readouterr().err) and error.count("\n") == 1
    statistics = {"counts": [[9, 1, 0], [9, 1, 0]], "joint": {"0 0": 8, "0 1": 1, "1 0": 1}}
    adapter = replace(bundle.manifest.adapters["one"], rank_statistics=statistics)
    write_manifest(bundle.path, replace(bundle.manifest, adapters={"one": adapter}))
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["evidence"]["source"] == "recorded rank statistics"
    found = {e["draft"]: e["tokens_per_call"] for e in result["evidence"]["candidates"]}
    assert found["plain"] == 1 and found["2 chain"] == 1.9 and found["6 chain"] == found["4 chain"] == 2.7
    assert found["4 best-first"] == 2.8 and found["6 best-first"] == 3.0 and found["6 k-ary"] == 2.9
    assert read_tuning(bundle, "one", "float32").label() == result["choice"]


def test_one_command_runs_every_adapter_of_a_bundle(mlx_base, tmp_path, capsys):
    two = make_bundle(tmp_path / "two", mlx_base, {"a": CONFIGS["rich"], "b": CONFIGS["bare"]}, 4)
    for app in "ab":
        (tmp_path / f"{app}.jsonl").write_text('{"prompt": "Hello"}\n')
    command = ["run", str(two.path), "--input", str(tmp_path / "{app}.jsonl"), "--dtype", "float32"]
    command += ["--methods", "plain,ss", "--max-tokens", "4"]
    assert main([*command, "--output", str(tmp_path / "out-{app}.json")]) == 0
    assert "## a" in (printed := capsys.readouterr().out) and "## b" in printed
    for app in "ab":
        result = json.loads((tmp_path / f"out-{app}.json").read_text())
        assert result["adapter"] == app and result["methods"]["ss"]["token_exact"] == 1
    assert main([*command, "--output", str(tmp_path / "out.json")]) == 2
    assert "--output" in (error := capsys.readouterr().err) and error.count("\n") == 1


@pytest.mark.parametrize("method", ["mlx-lm-draft", "hf-assisted"])
@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"model_file": "evil.py"}, None),
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "model_type": "unheard"}, "unheard"),
        ({"vocab_size": 299}, "vocab_size is 299, the bundle's is"),
    ],
)
def test_a_draft_model_is_data(bundle, mlx_base, rows, tmp_path, capsys, monkeypatch, method, entry, says):
    """No Python file of its folder runs, nobody is asked whether to, and its tokens are the bundle's."""
    draft = shutil.copytree(mlx_base.path, tmp_path / "draft")
    (draft / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('ran')\n")
    raw = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(raw | entry))
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    command = ["run", str(bundle.path), "--input", str(rows), "--dtype", "float32", "--max-tokens", "2"]
    command += ["--methods", f"plain,{method}", "--base", str(mlx_base.path), "--draft", str(draft)]
    status, error = main(command), capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    says = says or ("cannot be loaded" if method == "mlx-lm-draft" else "")
    assert status == (2 if says else 0) and says in error and error.count("\n") <= 1, error


def test_bad_input_is_one_line(bundle, rows, tmp_path, capsys):
    (bundle.path / "tuning.json").unlink(missing_ok=True)
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "long.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "' + "a " * 400 + '"}\n')
    text = figures(decode_tokens_per_second={"median": "1"})
    spread = {"median": float("nan"), "p10": 1.0, "p90": float("inf")}
    no_number = figures(decode_tokens_per_second=spread)
    unsorted = figures(speedup_end_to_end={"median": 2.0, "p10": 1.0, "p90": 1.5})
    broken = ({"plain": {}}, ["plain"], *({"plain": found} for found in (text, 3, no_number, unsorted)))
    broken = [write_result_file(tmp_path / f"broken{i}.json", found) for i, found in enumerate(broken)]
    draft = ["--methods", "hf-assisted", "--draft"]
    run = ["run", str(bundle.path), "--input", str(rows), "--dtype", "float32"]
    for command, says in (
        ([*run, "--methods", "magic"], "unknown method 'magic'"),
        ([*run[:3], str(tmp_path / "long.jsonl")], "long.jsonl:3: the prompt has"),
        ([*run, "--methods", "ss-tuned"], "ss-bench tune"),
        ([*run, "--methods", "mlx-lm"], "give --base"),
        (["run", str(tmp_path), "--input", str(rows)], "not a bundle"),
        (["compare", str(tmp_path / "x.json"), str(tmp_path / "x.json")], "not a result"),
        (["compare", "none.json", "none.json"], "no such file"),
        *((["compare", file, file], f"{file}: ") for file in broken),
        ([*run, "--plot", str(tmp_path / "x.xyz")], "x.xyz: not a supported picture format"),
        ([*run, "--plot", str(tmp_path)], "is a folder"),
        ([*run, "--output", "/proc/none/x.json"], "/proc"),
        ([*run, "--output", "/proc/x.json"], "/proc"),
        ([*run, *draft, "/nope"], "--draft /nope: no such folder"),
        ([*run, *draft, str(tmp_path / "empty")], "config.json: no such file"),
        ([], "COMMAND"),
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1, error
    (bundle.path / "tuning.json").write_text('{"format_version": 9}')
    with pytest.raises(UserError, match="format version 9"):
        read_tuning(bundle, "one", "float32")
    damaged = {"choice": {"num_nodes": 4, "costs": {"sizes": [2], "seconds": [1], "streams": 0}}}
    tuned = {"format_version": 2, "devices": {device_name(): {"one:float32": damaged}}}
    (bundle.path / "tuning.json").write_text(json.dumps(tuned))
    with pytest.raises(UserError, match="run ss-bench tune again"):
        read_tuning(bundle, "one", "float32")
    with pytest.raises(UserError, match="no method in common"):
        report.compare({"methods": {"a": {}}}, {"methods": {"b": {}}})
