"""Train the whole demo: data, tokenizer and base, its own text, bigram bias, adapters, measurements.

    python -m scripts.train_models --data DATA --minutes 90

DATA holds <app>/{train,valid,test}.jsonl.gz of the applications and the files that the base's recipe names.
Everything is made in --work, stage by stage, and put into --models when it is whole:

    data      rows that may be learnt: licences, near-duplicates of held-out prompts, literals as asked
    base      tokenizer and base, at least --minutes of training in all (a later, longer run goes on)
    texts     the base's own continuations of training prompts
    adapters  bigram bias and every adapter of the plan
    measure   tokens per call, acceptance by depth and metrics on the test prompts
    check     tokens per call predicted at the end of training against decoded step by step
    install   base, adapters, measurements and logs into --models, tables into its README.md

A finished stage is skipped, a killed one goes on. What depends on the base lies in a folder named by its
weights, so another base starts those stages afresh. CUDA is used where it is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scripts.model_tables import write_tables
from ss_device.application import load_application
from ss_device.command_line import CommandParser, add_device, positive, positive_number, run_command
from ss_device.errors import UserError
from ss_device.files import sha256
from ss_device.json_lines import read_json_lines, source_of
from ss_device.outputs import file_in_one_go, folder_in_one_go, write_text

STAGES = ("data", "base", "texts", "adapters", "measure", "check", "install")
TREES = ("best-first:32", "best-first:12", "best-first:64", "chain:5", "chain:9",
         "best-first+lookup:12", "best-first+lookup:32")  # fmt: skip
PAPER_TREES = (*TREES, "k-ary:121")
SPLITS = ("valid", "test")
TOLERANCE = 0.02
"""Between tokens per call as validation predicts them and as they are decoded."""


@dataclass(frozen=True)
class PlannedApplication:
    """How much of an application's text is made, and what may be too long (tokens).

    exclude: values of the rows' `source` that are not learnt; tested: those whose validation and test
    rows count (all, if empty).
    """

    name: str
    texts: int
    max_tokens: int
    max_length: int
    longest_test_prompt: int
    longest_prompt: int = 0
    exclude: tuple[str, ...] = ()
    tested: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedAdapter:
    """One adapter of every application: `<application><suffix>`."""

    suffix: str
    settings: str
    epochs: float
    learning_rate: float
    set: tuple[str, ...] = ()
    bigram_bias: bool = False


@dataclass(frozen=True)
class Plan:
    """What is made (`models/recipes/ss_demo_models.toml`)."""

    base: str
    recipe: Path
    applications: tuple[PlannedApplication, ...]
    adapters: tuple[PlannedAdapter, ...]


def read_plan(path: Path) -> Plan:
    """Raises UserError naming the file and the key that is wrong or missing."""
    if not path.is_file():
        raise UserError(f"{path}: no such plan")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        return Plan(
            raw["base"],
            path.parent / raw["recipe"],
            tuple(PlannedApplication(**_tuples(a)) for a in raw["applications"]),
            tuple(PlannedAdapter(**_tuples(a)) for a in raw["adapters"]),
        )
    except KeyError as error:
        raise UserError(f"{path}: missing key {error}") from error
    except TypeError as error:  # an unknown or missing key of a table
        raise UserError(f"{path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML ({error})") from error


def _tuples(raw: dict) -> dict:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}


@dataclass(frozen=True)
class Pipeline:
    """The stages over one plan; every method may be called again and does what is left."""

    plan: Plan
    arguments: argparse.Namespace

    @property
    def work(self) -> Path:
        return self.arguments.work

    @property
    def base(self) -> Path:
        return self.work / "base" / self.plan.base

    @cached_property
    def of_base(self) -> Path:
        """The folder of all that depends on the base's weights."""
        if not self.base.is_dir():
            raise UserError(f"{self.base}: there is no base yet; run the stage 'base' first")
        digest = sha256(*sorted(self.base.glob("*.safetensors")))
        return self.work / f"{self.plan.base}-{digest[:12]}"

    @property
    def chosen(self) -> list[PlannedApplication]:
        """The applications of --app, or all."""
        wanted, known = self.arguments.app, [app.name for app in self.plan.applications]
        if unknown := [name for name in wanted or [] if name not in known]:
            raise UserError(f"--app {unknown[0]}: the plan has {', '.join(known)}")
        return [app for app in self.plan.applications if not wanted or app.name in wanted]

    def own_texts(self, app: PlannedApplication) -> Path:
        return self.of_base / f"own_{app.name}.jsonl"

    def adapter(self, app: PlannedApplication, adapter: PlannedAdapter) -> Path:
        return self.of_base / "adapters" / f"{app.name}{adapter.suffix}"

    def prepared(self, app: PlannedApplication, split: str = "train") -> Path:
        return self.work / "data" / app.name / f"{split}.jsonl.gz"

    def prepare_data(self) -> None:
        """Prepared train rows, and the other files as they are."""
        from ss_device.training.prepared_data import prepare_rows, write_rows

        counts_file, source = self.work / "data" / "counts.json", self.arguments.data
        counts = json.loads(counts_file.read_text()) if counts_file.is_file() else {}
        for app in self.plan.applications:
            if app.name in counts:
                continue
            say(f"{app.name}: rows that may be learnt")
            files = {split: source / app.name / f"{split}.jsonl.gz" for split in SPLITS}
            made = prepare_rows(
                load_application(app.name), source / app.name / "train.jsonl.gz",
                files.values(), self.prepared(app), app.exclude,
            )  # fmt: skip
            for split, file in files.items():
                rows = (r for r in read_json_lines(file) if not app.tested or source_of(r) in app.tested)
                write_rows(rows, self.prepared(app, split))
            counts[app.name] = made
            write_text(counts_file, json.dumps(counts, indent=1) + "\n")
            print(json.dumps({app.name: made}))
        self._copy_plain_sources()

    def _copy_plain_sources(self) -> None:
        """Files that the recipe reads and no application prepares."""
        from ss_device.training.recipe import load_recipe

        for source in load_recipe(self.plan.recipe).sources:
            target = self.work / "data" / source.path
            if source.path and not target.exists():
                if not (self.arguments.data / source.path).is_file():
                    raise UserError(f"{self.arguments.data / source.path}: no such file")
                with file_in_one_go(target) as partial:
                    shutil.copyfile(self.arguments.data / source.path, partial)

    def train_base(self) -> None:
        """Stretches until the base has had `--minutes` of training (the recipe's steps without it)."""
        from ss_device.training.pretrain import trained_time

        minutes, trained = self.arguments.minutes, trained_time(self.base)
        words = ["base", self.plan.recipe, "--data", self.work / "data", "--output", self.base]
        words += ["--precision", "bf16", "--shard-size", self.arguments.shard_size]
        words += ["--check-minutes", self.arguments.check_minutes]
        if trained is None:
            words += ["--start", self.arguments.start] if self.arguments.start else []
            words += ["--minutes", minutes] if minutes else []
        else:
            enough = not minutes or 0.99 * minutes <= trained.minutes
            if self.base.is_dir() and trained.ended and enough:
                return
            # An interrupted stretch keeps its own budget; a finished one is followed by what is missing.
            words += ["--resume"]
            words += ["--minutes", minutes - trained.before_decay] if minutes and trained.ended else []
        self._ss_train(*words)

    def write_texts(self) -> None:
        """The base's own greedy text, for the adapters to learn and to be replayed on."""
        for app in self.chosen:
            words = ["distill", app.name, "--base", self.base, "--data", self.prepared(app)]
            words += ["--limit", app.texts, "--max-tokens", app.max_tokens, "--seed", 1]
            words += ["--longest-prompt", app.longest_prompt] if app.longest_prompt else []
            self._ss_train(*words, "--batch-size", 128, "--output", self.own_texts(app))

    def train_adapters(self) -> None:
        """Bigram bias and adapters of every application."""
        for app in self.chosen:
            bias = self.of_base / f"bias_{app.name}.safetensors"
            if not bias.exists():
                own = f"{app.name}={self.own_texts(app)}"
                self._ss_train("bigram-bias", own, "--base", self.base, "--epochs", 20, "--output", bias)
            for adapter in self.plan.adapters:
                self._train_adapter(app, adapter, bias)

    def _train_adapter(self, app: PlannedApplication, adapter: PlannedAdapter, bias: Path) -> None:
        output = self.adapter(app, adapter)
        if output.is_dir():
            return
        words = ["adapter", app.name, "--base", self.base, "--data", self.own_texts(app)]
        words += ["--output", output, "--settings", adapter.settings, "--epochs", adapter.epochs]
        words += ["--learning-rate", adapter.learning_rate, "--max-length", app.max_length]
        words += [word for change in adapter.set for word in ("--set", change)]
        words += ["--bigram-bias", bias] if adapter.bigram_bias else []
        words += ["--tokens-per-batch", self.arguments.tokens_per_batch, "--valid", 150]
        words += ["--evaluate-every", 250, "--precision", "bf16", "--seed", 5]
        golden = self.arguments.models / "adapters" / app.name / "golden_prompts.jsonl"
        words += ["--golden-prompts", golden] if golden.is_file() else []
        self._ss_train(*words, *(["--resume"] if output.with_name(output.name + ".run").is_dir() else []))

    def measure(self) -> None:
        """Replay of every adapter on the test prompts, under many trees."""
        for app in self.chosen:
            for adapter in self.plan.adapters:
                result = self.of_base / "measurements" / app.name / f"{app.name}{adapter.suffix}.json"
                if result.is_file():
                    continue
                trees = PAPER_TREES if adapter.settings == "paper" else TREES
                words = ["replay", self.adapter(app, adapter), "--base", self.base, "--json"]
                words += ["--data", self.prepared(app, "test"), "--limit", self.arguments.prompts]
                words += ["--continuations", self.of_base / f"own_test_{app.name}.jsonl"]
                words += ["--longest-prompt", app.longest_test_prompt]
                words += [word for tree in trees for word in ("--tree", tree)]
                write_text(result, self._ss_train(*words))

    def check(self) -> None:
        """Validation at the end of training against decoding the same texts, within two per cent."""
        from ss_device.evaluation.validation_check import decode_validation

        for app in self.chosen:
            for adapter in self.plan.adapters:
                folder = self.adapter(app, adapter)
                result = self.of_base / "checks" / f"{folder.name}.json"
                if not result.is_file():
                    say(f"{folder.name}: validation documents decoded")
                    found = decode_validation(
                        folder, self.base, self.own_texts(app), app.max_length, self.arguments.device
                    )
                    write_text(result, json.dumps(found, indent=1) + "\n")
                found = json.loads(result.read_text())
                if abs(found["decoded"] / found["predicted"] - 1) > TOLERANCE:
                    raise UserError(f"{result}: decoding and its prediction differ by more than 2 %")
                self._write_acceptance(app, folder)

    def _ss_train(self, *words) -> str:
        """Standard output of one `ss-train` command on the device that was asked for."""
        device = self.arguments.device
        return ss_train(*words, *(["--device", device] if device else []))

    def _write_acceptance(self, app: PlannedApplication, folder: Path) -> None:
        """`acceptance.csv` beside the adapter: by tree and depth on the test prompts."""
        measured = json.loads(
            (self.of_base / "measurements" / app.name / f"{folder.name}.json").read_text()
        )
        rows = [
            f"{tree},{depth},{share:.4f}"
            for tree, counts in measured["trees"].items()
            for depth, share in enumerate(counts["acceptance_by_depth"], 1)
        ]
        write_text(folder / "acceptance.csv", "\n".join(["tree,depth,acceptance", *rows]) + "\n")

    def install(self) -> None:
        """Copy what is finished into --models and write its tables; refused while anything is missing."""
        models = self.arguments.models
        for app in self.plan.applications:
            for adapter in self.plan.adapters:
                name = f"{app.name}{adapter.suffix}"
                for needed in (self.of_base / "measurements" / app.name, self.of_base / "checks"):
                    if not (needed / f"{name}.json").is_file():
                        raise UserError(f"{needed / name}.json: missing; run the stages before 'install'")
        copy_folder(self.base, models / "base" / self.plan.base)
        for app in self.plan.applications:
            for adapter in self.plan.adapters:
                folder = self.adapter(app, adapter)
                copy_folder(folder, models / "adapters" / folder.name)
                log = folder.with_name(folder.name + ".run") / "log.jsonl"
                write_text(models / "training_logs" / f"{folder.name}.jsonl", log.read_text())
            copy_folder(self.of_base / "measurements" / app.name, models / "measurements" / app.name)
        log = self.base.with_name(self.base.name + ".run") / "log.jsonl"
        write_text(models / "training_logs" / f"{self.plan.base}.jsonl", log.read_text())
        checked = sorted((self.of_base / "checks").glob("*.json"))
        checks = {path.stem: json.loads(path.read_text()) for path in checked}
        write_text(models / "measurements" / "checks.json", json.dumps(checks, indent=1) + "\n")
        counts = self.work / "data" / "counts.json"
        write_text(models / "measurements" / "data_counts.json", counts.read_text())
        if (models / "README.md").is_file():
            write_tables(models)

    def run(self, stages: Sequence[str]) -> None:
        """The chosen stages in their order."""
        bodies = (
            self.prepare_data, self.train_base, self.write_texts, self.train_adapters, self.measure,
            self.check, self.install,
        )  # fmt: skip
        for name, body in zip(STAGES, bodies, strict=True):
            if name in stages:
                say(f"stage {name}")
                body()


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def copy_folder(source: Path, target: Path) -> None:
    """`target` becomes a copy of `source`, in one go."""
    with folder_in_one_go(target) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)


def ss_train(*words) -> str:
    """Standard output of one `ss-train` command; its progress goes to stderr. Ends on an error."""
    command = [sys.executable, "-m", "ss_device.training.command", *map(str, words)]
    say(" ".join(command[3:6]))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


def build_parser() -> CommandParser:
    """Options of the command."""
    parser = CommandParser(
        prog="python -m scripts.train_models",
        description=__doc__,
        example="python -m scripts.train_models --data data --minutes 240",
    )
    parser.add_argument("--data", type=Path, help="folder of the data files (for the stage `data`)")
    parser.add_argument("--plan", type=Path, default=Path("models/recipes/ss_demo_models.toml"))
    parser.add_argument("--work", type=Path, default=Path("runs/models"), help="where everything is made")
    parser.add_argument("--models", type=Path, default=Path("models"), help="what `install` writes into")
    parser.add_argument("--stage", action="append", choices=STAGES, help="only this one (may be repeated)")
    parser.add_argument(
        "--app", action="append", metavar="NAME",
        help="texts, adapters, measure, check of this application alone: several processes share the work",
    )  # fmt: skip
    parser.add_argument("--minutes", type=positive_number, help="training of the base in all")
    parser.add_argument("--start", type=Path, metavar="BASE", help="a base whose weights are gone on with")
    parser.add_argument("--check-minutes", type=float, default=15.0, help="measure the base this often")
    parser.add_argument("--shard-size", default="50GB", metavar="SIZE", help="largest weight file, as 15MB")
    parser.add_argument("--tokens-per-batch", type=positive, default=1024, help="of adapters")
    parser.add_argument("--prompts", type=positive, default=200, help="test prompts per application")
    add_device(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def body(arguments: argparse.Namespace) -> None:
        stages = arguments.stage or STAGES
        if "data" in stages and not arguments.data:
            raise UserError("the stage 'data' needs --data, the folder of the data files")
        Pipeline(read_plan(arguments.plan), arguments).run(stages)

    return run_command(build_parser(), body, argv)


if __name__ == "__main__":
    raise SystemExit(main())
