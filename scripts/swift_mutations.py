"""Breaks the Swift library in one place at a time and expects a test to fail each time.

    python scripts/swift_mutations.py        needs a toolchain (scripts/swift_toolchain.sh provide)
    python scripts/swift_mutations.py chain  only those whose name holds the word

Works on a copy of the package under build/, so the sources stay as they are. Exit code 1 when the unbroken
copy fails, a broken one does not compile, or its tests pass.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, COPY = ROOT / "apps/swift", ROOT / "build/swift-mutations"
TINY = ROOT / "build/swift-tiny"
LIBRARY, CORE_ML = "Sources/SpeculativeStreaming", "Sources/SpeculativeStreamingCoreML"
CORE_AI = "Sources/SpeculativeStreamingCoreAI"
# Tests that need no Python and no package, and those of chained packages.
TESTS = "TreeTests|SamplingTests|DecodingTests|ReferenceTests|StepInputTests"
REUSE_TESTS = "onlyTheAddedTokensArePrefilled|theSecondTurnPrefillsOnlyWhatWasAdded"
CHAIN_TESTS = "everyTreeIsThatOfThePythonStepModel|theGoldenTracesFindWhatTheyFindInOnePackage"


@dataclass(frozen=True)
class Mutation:
    """One change of one source file that must not go unnoticed by `tests`."""

    name: str
    file: str
    old: str
    new: str
    tests: str = TESTS


MUTATIONS = (
    Mutation(
        "chain: the rows to commit are taken from the node ids",
        f"{CORE_ML}/FunctionChain.swift",
        "passed?.featureValue(for: source) ?? inputs.featureValue(for: source)",
        "passed?.featureValue(for: source)\n                        "
        '?? inputs.featureValue(for: source == "commit_rows" ? "commit_nodes" : source)',
        CHAIN_TESTS,
    ),
    Mutation(
        "chain: a part in the middle is left out",
        f"{CORE_ML}/FunctionChain.swift",
        "passed = try link.function.predict(own, states[part], options[part])",
        "let found = try link.function.predict(own, states[part], options[part])\n"
        "                if part != 1 || links.count < 3 { passed = found }",
        CHAIN_TESTS,
    ),
    Mutation(
        "chain: every part gets the first one's state",
        f"{CORE_ML}/FunctionChain.swift",
        "states[part]",
        "states[0]",
        CHAIN_TESTS,
    ),
    Mutation(
        "host cache: rows above the pruning layer are taken by node id",
        f"{CORE_AI}/HostCache.swift",
        "isAbovePruning[$0] ? accepted.rows : accepted.nodes",
        "isAbovePruning[$0] ? accepted.nodes : accepted.nodes",
        CHAIN_TESTS,
    ),
    Mutation(
        "host cache: a chunk is written one slot late",
        f"{CORE_AI}/CoreAICalls.swift",
        "count: part.count, slot: length)",
        "count: part.count, slot: length + 1)",
        CHAIN_TESTS,
    ),
    Mutation(
        "reuse: a chunk does not see the rows that a step has still to move",
        f"{LIBRARY}/FunctionStepModel.swift",
        "needsMove ? pending.slot : common",
        "needsMove ? common : common",
        REUSE_TESTS,
    ),
    Mutation(
        "reuse: what a longer text left is taken for committed",
        f"{LIBRARY}/FunctionStepModel.swift",
        "committed.removeLast(length - kept)",
        "committed.removeLast(min(1, length - kept))",
        REUSE_TESTS,
    ),
    Mutation(
        "session: the whole transcript is prefilled",
        "Sources/SpeculativeStreamingFoundationModels/SpeculativeExecutor.swift",
        "reusesText: true)",
        "reusesText: false)",
        REUSE_TESTS,
    ),
    Mutation(
        "tree: parents are left out without the mean of their bias",
        f"{LIBRARY}/ChildBound.swift",
        "let needed = logSum + mean + Float",
        "let needed = logSum + abs(mean) + 2 + Float",
    ),
    Mutation(
        "tree order: the more expensive place first",
        f"{LIBRARY}/TreeGrowth.swift",
        "if cost != other.cost { return cost < other.cost }",
        "if cost != other.cost { return cost > other.cost }",
    ),
    Mutation(
        "tree order: ties to the higher token id",
        f"{LIBRARY}/RankedChildren.swift",
        "$0.score > $1.score : $0.id < $1.id",
        "$0.score > $1.score : $0.id > $1.id",
    ),
    Mutation(
        "mask: a node does not see its grandparents",
        f"{LIBRARY}/DraftTree.swift",
        "for column in 0..<node where mask[parents[node] * size + column] {",
        "for column in [parents[node]] {",
    ),
    Mutation(
        "mask of the step's inputs: a node does not see the newest committed slot",
        f"{LIBRARY}/StepInputs.swift",
        "AdditiveMask.visible)\n            var node = row",
        "AdditiveMask.visible)\n"
        "            columns[length - 1] = AdditiveMask.hidden\n            var node = row",
    ),
    Mutation(
        "commit selection: node ids instead of their rows",
        f"{LIBRARY}/StepInputs.swift",
        "commitRows?.write(padded(pending.rows, -1))",
        "commitRows?.write(padded(pending.nodes, -1))",
    ),
    Mutation(
        "commit: the path without its last node",
        f"{LIBRARY}/DecodingLoop.swift",
        "try model.commit(accepted.nodes)",
        "try model.commit(accepted.nodes.count > 1 ? accepted.nodes.dropLast() : accepted.nodes)",
    ),
    Mutation(
        "walk: any child instead of the chosen one",
        f"{LIBRARY}/Walk.swift",
        "tree.parents[kept[$0]] == current && tree.tokens[kept[$0]] == wanted",
        "tree.parents[kept[$0]] == current",
    ),
    Mutation(
        "noise: another shift in splitmix64",
        f"{LIBRARY}/Sampling.swift",
        "mixed = (mixed ^ (mixed >> 27))",
        "mixed = (mixed ^ (mixed >> 26))",
    ),
    Mutation(
        "noise: the position of the node instead of its next token",
        f"{LIBRARY}/DecodingLoop.swift",
        "tree.depths[verified.kept[row]] + 1",
        "tree.depths[verified.kept[row]]",
    ),
)


def main() -> int:
    """Run all mutations; the exit code."""
    wanted = [m for m in MUTATIONS if all(word in m.name for word in sys.argv[1:])]
    if not wanted:
        print(f"no mutation is named {' '.join(sys.argv[1:])}", file=sys.stderr)
        return 2
    if not (TINY / "answers.json").is_file():
        exporter = [sys.executable, "-m", "tests.swift.export_traces", "bundle"]
        subprocess.run(exporter, stdout=subprocess.DEVNULL, check=True)
    shutil.rmtree(COPY, ignore_errors=True)
    # Built once as it is; after a mutation only the broken module and its dependents are built again.
    shutil.copytree(PACKAGE, COPY, symlinks=True, ignore=shutil.ignore_patterns(".build"))
    try:
        if (problem := failure_of_copy(f"{TESTS}|{CHAIN_TESTS}|{REUSE_TESTS}")) != "":
            print(f"the unbroken copy: {problem or 'its tests do not pass'}", file=sys.stderr)
            return 1
        missed = [m.name for m in wanted if not is_caught(m)]
    finally:
        shutil.rmtree(COPY, ignore_errors=True)
    print(f"{len(wanted) - len(missed)} of {len(wanted)} mutations caught")
    return 1 if missed else 0


def is_caught(mutation: Mutation) -> bool:
    """Whether a test fails with the mutation; the file is put back afterwards."""
    path = COPY / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        print(f"NOT APPLIED  {mutation.name}: its place in {mutation.file} is gone", flush=True)
        return False
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        problem = failure_of_copy(mutation.tests)
    finally:
        path.write_text(text)
    caught = problem.startswith("✘")
    print(f"{'caught' if caught else 'MISSED'}  {mutation.name}: {problem or 'all tests pass'}", flush=True)
    return caught


def failure_of_copy(tests: str) -> str:
    """The first failed test's line, what stopped the build, or nothing when all tests pass."""
    built = swift("build", "--build-tests")
    if built.returncode:
        return next((line for line in built.stdout.splitlines() if "error:" in line), "it does not build")
    tested = swift("test", "--skip-build", "--filter", tests)
    if tested.returncode == 0:
        return ""
    failed = (
        line for line in tested.stdout.splitlines() if line.startswith("✘ Test ") and "failed" in line
    )
    return next(failed, "✘ the test process failed")[:120]


def swift(*arguments: str) -> subprocess.CompletedProcess:
    command = [str(ROOT / "scripts/swift_toolchain.sh"), "run", "swift", *arguments, "-j", "1"]
    settings = {"SS_PYTHON": sys.executable, "SS_TINY_BUNDLE": str(TINY), "SS_REPOSITORY": str(ROOT)}
    environment = os.environ | settings | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        cwd=COPY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main())
