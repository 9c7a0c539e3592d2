"""Training from Python: `from ss_device import train_adapter`. `ss-train adapter` calls it too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ss_device.adapter import Adapter
    from ss_device.application import Application
    from ss_device.base_model import BaseFolder
    from ss_device.config import SpeculativeConfig
    from ss_device.training.adapt import AdapterSettings
    from ss_device.training.schedule import AdapterSchedule
    from ss_device.training.settings import AdapterInputs


def train_adapter(
    app: str | Path | Application,
    base: str | Path,
    data: str | Path | Iterable[str | Path | Mapping],
    output: str | Path,
    *,
    settings: str | Mapping | SpeculativeConfig = "plus",
    schedule: AdapterSchedule | None = None,
    changes: Mapping | None = None,
    inputs: AdapterInputs | None = None,
    device: str | None = None,
    resume: bool = False,
    force: bool = False,
    report: Callable[[dict], None] | None = None,
) -> Adapter:
    """Train a speculative adapter on a frozen base, write its folder to `output` and return it.

        from ss_device import AdapterSchedule, train_adapter

        schedule = AdapterSchedule(epochs=3, patience=2)
        adapter = train_adapter("sqlctx", "ss-demo-base", "own.jsonl", "adapters/mine", schedule=schedule)
        print(adapter.record["validation"]["tokens_per_call"])

    app: an application's name, its path, or the application itself. base: a folder, the name of one under
    `models/base`, or an id on the Hugging Face hub. data: a JSON lines file with the application's fields
    (or `hub`, `hub:SPLIT` for its data set), several of them, or rows. settings: `paper`, `plus`, `shared`,
    `shared-v2`, or the settings themselves (docs/method.md, Modes); changes: some of them, by name.
    schedule: optimisation; inputs: which rows are used, and the adapter or bigram bias to start from.

    device: `cpu`, `cuda` or `mps` (None: $SS_DEVICE, else a GPU if there is one). resume: continue from the
    last checkpoint in `<output>.run/`; force: replace an earlier run and the adapter it wrote. `report`
    receives every log record (`fit_adapter`). Raises UserError, which names what is wrong.
    """
    from ss_device.command_line import quiet_libraries

    bound_cpu_caches()
    quiet_libraries(warnings_too=False)
    from ss_device.training.adapt import fit_adapter
    from ss_device.training.chat_template import application_and_base
    from ss_device.training.examples import read_examples
    from ss_device.training.presets import speculative_config
    from ss_device.training.run_folder import writing
    from ss_device.training.schedule import AdapterSchedule
    from ss_device.training.settings import AdapterInputs, RunOptions

    schedule, inputs, output = schedule or AdapterSchedule(), inputs or AdapterInputs(), Path(output)
    config = speculative_config(settings, changes)
    found, frozen = application_and_base(app, base)
    trained = _adapter_settings(frozen, config, schedule, inputs)
    documents = read_examples(found, frozen, data, inputs, schedule.seed)
    held = min(inputs.valid, max(1, len(documents) // 10))
    train, valid = documents[held:] or documents, documents[:held]
    run, report = RunOptions(resume, force, device), report or (lambda record: None)
    with writing(output):
        return fit_adapter(frozen, found, trained, train, valid, output, run, report)


def _adapter_settings(
    base: BaseFolder, config: SpeculativeConfig, schedule: AdapterSchedule, inputs: AdapterInputs
) -> AdapterSettings:
    """What is trained, with the files that it starts from; what does not fit the base is refused."""
    from ss_device.adapter import load_adapter
    from ss_device.training.adapt import AdapterSettings
    from ss_device.training.base_loading import check_quantization
    from ss_device.training.bigram_bias import load_bigram_bias

    config.check(base.architecture)
    check_quantization(schedule)
    start = load_adapter(inputs.start) if inputs.start else None
    golden = Path(inputs.golden_prompts).read_text(encoding="utf-8") if inputs.golden_prompts else ""
    bias = None
    if inputs.bigram_bias:
        bias, _ = load_bigram_bias(Path(inputs.bigram_bias), base, config.bigram_rank)
    return AdapterSettings(config, schedule, start, bias, golden)


def bound_cpu_caches() -> None:
    """Before torch is loaded: keep few of oneDNN's compiled operations.

    They are kept by shape, and batches have many shapes: at the default of 1024 the training of the
    demo base grew to 11.7 GB within half an hour on a CPU; with 32 it took 3 GB, and was no slower.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "32")
