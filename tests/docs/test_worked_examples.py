"""The worked examples of docs/method.md are parsed and recomputed.

An example is the fenced block after `<!-- example: NAME -->`. What is drawn is compared with the project's
code where there is some, and with loops written here.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from ss_convert.graph.tables import own_stream_mask, stream_offsets
from ss_device.acceptance import walk
from ss_device.config import SpeculativeConfig
from ss_device.decoding import Drafter
from ss_device.draft_policy import StepCosts
from ss_device.prompt_lookup import PromptLookup
from ss_device.sampling import TypicalAcceptance
from ss_device.step_checks import kept_rows
from ss_device.training.corpus import Document
from ss_device.training.losses import IGNORE, make_batch
from ss_device.tree import DraftTree, best_first_tree, k_ary_tree, keep_best_nodes, tree_from_parents
from ss_runtime.mlx.tree_graph import cache_mask, slot_positions, stream_mask

PAGE = Path(__file__).parents[2] / "docs" / "method.md"
EXAMPLE = re.compile(r"<!-- example: (\S+) -->\n```text\n(.*?)```\n", re.S)
EXAMPLES = dict(EXAMPLE.findall(PAGE.read_text()))
NAMES = [
    "adaptive", "ancestors", "cache-mask", "commit", "lazy-commit", "lookup", "positions", "pruning",
    "stream-mask", "streams", "targets", "tree", "two-maps", "typical", "walk",
]  # fmt: skip


def lines(name: str) -> list[str]:
    return [line for line in EXAMPLES[name].splitlines() if line.strip()]


def row(name: str, label: str) -> list[str]:
    """Cells of the one line of an example that begins with `label`."""
    pattern = re.compile(rf"{re.escape(label)}(?:\s*=)?\s+(.*)")
    (found,) = (m.group(1) for line in lines(name) if (m := pattern.fullmatch(line)))
    return found.split()


def numbers(name: str, label: str, kind=int) -> list:
    return [kind(cell) for cell in row(name, label)]


def bits(text: str, seen: str = "x") -> list[bool]:
    """A drawn row of a mask."""
    cells = text.split()
    assert set(cells) <= {"x", ".", "m"}
    return [cell in seen for cell in cells]


def drawn_tree(name: str = "tree") -> tuple[DraftTree, list[str]]:
    """The tree of an example with token ids for its words, and the words by id."""
    words = row(name, "token")
    ids = list(dict.fromkeys(words))
    return tree_from_parents([ids.index(w) for w in words], numbers("tree", "parent")), ids


def ancestors_by_hand(parents: list[int]) -> list[list[bool]]:
    seen = []
    for node in range(len(parents)):
        above, at = {node}, node
        while parents[at] >= 0:
            assert parents[at] < at
            at = parents[at]
            above.add(at)
        seen.append([column in above for column in range(len(parents))])
    return seen


def test_every_example_has_a_test():
    assert sorted(EXAMPLES) == NAMES
    assert PAGE.read_text().count("<!-- example:") == len(NAMES)


@pytest.mark.parametrize("how", ["shift", "same"])
def test_stream_positions(how):
    position, gamma = map(
        int, re.fullmatch(r"position i = (\d+), γ = (\d+)", lines("positions")[0]).groups()
    )
    header, *drawn = [re.split(r"\s{2,}", line) for line in lines("positions")[1:]]
    assert header == ["row", "stands at", "predicts"]
    config = SpeculativeConfig(num_streams=gamma, stream_position=how)
    stands_at = [position, *(position + stream_offsets(config)).tolist()]
    assert ([int(cells[1]) for cells in drawn] == stands_at) == (how == "shift")
    assert [cells[0] for cells in drawn] == ["main", *(f"stream {j + 1}" for j in range(gamma))]
    assert [cells[2] for cells in drawn] == [f"x[{position + 1 + j}]" for j in range(gamma + 1)]


@pytest.mark.parametrize("attends", [False, True])
def test_stream_mask_is_the_graphs(attends):
    """Drawn rows against MLX's mask, Core ML's constant one, and the four rules."""
    parents = numbers("stream-mask", "parents")
    drawn = [re.fullmatch(r"(main \d|stream \(\d,\d\))\s+(.*)", line) for line in lines("stream-mask")[3:]]
    mask = [bits(m.group(2), "xm" if attends else "x") for m in drawn]
    above, count = ancestors_by_hand(parents), len(parents)
    assert lines("stream-mask")[1].split() == ["main", *(f"({node},·)" for node in range(count))]
    assert lines("stream-mask")[2].split() == [*map(str, range(count)), *("1", "2") * count]
    gamma = (len(mask) - count) // count
    streams = [(i, j) for i in range(count) for j in range(1, gamma + 1)]
    assert [m.group(1) for m in drawn] == [f"main {i}" for i in range(count)] + [
        f"stream ({i},{j})" for i, j in streams
    ]
    assert np.array_equal(mask, np.array(stream_mask(mx.array(above), gamma, attends)))
    config = SpeculativeConfig(mode="shared", num_streams=gamma, main_attends_streams=attends)
    assert np.array_equal(np.array(mask)[:, count:], own_stream_mask(config, count) == 0)
    for i in range(count):
        assert mask[i] == above[i] + [attends and at == i for at, _ in streams]
    for (i, j), seen in zip(streams, mask[count:], strict=True):
        assert seen == above[i] + [at == i and other <= j for at, other in streams]


def test_cache_mask_is_the_graphs():
    (length,) = numbers("cache-mask", "length")
    slots = numbers("cache-mask", "slot")
    assert slots == list(range(len(slots)))
    assert [line[:6] for line in lines("cache-mask")[2:-1]] == [f"node {node}" for node in range(3)]
    parents = numbers("stream-mask", "parents")
    mask = np.array([bits(line.split(maxsplit=2)[2]) for line in lines("cache-mask") if line[:4] == "node"])
    above = np.array(ancestors_by_hand(parents))
    start = mx.array([length])
    assert np.array_equal(mask, np.array(cache_mask(mx.array(above), start, start, len(slots))))
    assert mask[:, :length].all() and np.array_equal(mask[:, length : length + len(parents)], above)
    assert not mask[:, length + len(parents) :].any()
    at = mx.array(length + tree_from_parents([0, 1, 2], parents).depths)
    drawn = numbers("cache-mask", "position")
    assert drawn == np.array(slot_positions(at, start, len(slots))).tolist() == [0, 1, 2, 3, 4, 5, 5, 7]


def test_training_targets_are_the_batchs():
    gamma = int(lines("targets")[0][4])
    generated = [int(cell) for cell in lines("targets")[0].split("= ")[-1].split()]
    words = row("targets", "token")
    assert numbers("targets", "position") == list(range(len(words)))
    document = Document(np.arange(len(words), dtype=np.int32), generated[0])
    assert generated == list(range(generated[0], len(words)))
    batch = make_batch([document], gamma)
    rows = batch.rows[0].tolist()
    assert row("targets", "carries streams") == ["x" if i in rows else "." for i in range(len(words))]
    drawn = [
        row("targets", "main's target"),
        *(row("targets", f"stream {j + 1}'s target") for j in range(gamma)),
    ]
    columns = [batch.main_targets[0], *batch.targets[0].T]
    for cells, targets in zip(drawn, columns, strict=True):
        expected = ["."] * len(words)
        for i, target in zip(rows, targets.tolist(), strict=True):
            expected[i] = "." if target == IGNORE else words[target]
        assert cells == expected


def streams_drawn() -> tuple[list[str], list[dict[str, float]]]:
    """Vocabulary and per stream the probabilities of the example."""
    cells = [row("streams", f"stream {j}") for j in (1, 2, 3)]
    tables = [dict(zip(c[::2], map(float, c[1::2]), strict=True)) for c in cells]
    return list(dict.fromkeys([*row("streams", "root"), *(w for t in tables for w in t)])), tables


def test_the_tree_is_the_best_first_one():
    words, tables = streams_drawn()
    with np.errstate(divide="ignore"):
        logits = np.log(np.array([[table.get(w, 0.0) for w in words] for table in tables], np.float32))
    drawn = [row("tree", "token"), numbers("tree", "parent"), numbers("tree", "depth")]
    tree = best_first_tree(words.index("SELECT"), logits, len(drawn[0]))
    assert [[words[t] for t in tree.tokens], tree.parents.tolist(), tree.depths.tolist()] == drawn
    paths = {("SELECT",): 1.0}
    for table in tables:  # every path, then the best of them
        paths |= {(*p, w): paths[p] * q for p in list(paths) for w, q in table.items() if w not in p}
        # Each stream's words are its own, so no path takes a stream twice but by its own depth.
    paths = {p: q for p, q in paths.items() if all(w in tables[g] for g, w in enumerate(p[1:]))}
    best = sorted(paths.items(), key=lambda item: -item[1])[: tree.num_nodes]
    assert [tuple(words[tree.tokens[n]] for n in tree.path(node)) for node in range(8)] == [
        p for p, _ in best
    ]
    np.testing.assert_allclose(numbers("tree", "p", float), [q for _, q in best], rtol=1e-9)


def test_the_drawing_is_the_table():
    """Left to right and top to bottom the drawing holds the nodes depth first, each under its parent."""
    tree, words = drawn_tree()
    drawing = lines("tree")[5:]
    columns: dict[int, int] = {}
    found = []
    for line in drawing:
        for match in re.finditer(r"[^\s─┬├└│]+", line):
            columns[match.start()] = len(found)
            before = [at for at in columns if at < match.start()]
            found.append((match.group(), columns[max(before)] if before else -1))
    order: list[int] = []

    def descend(node: int) -> None:
        order.append(node)
        for child in tree.children(node):
            descend(child)

    descend(0)
    assert [word for word, _ in found] == [words[tree.tokens[node]] for node in order]
    parents = [order[p] if p >= 0 else -1 for _, p in found]
    assert parents == [tree.parents[node] for node in order]


def test_ancestors_and_positions():
    tree, _ = drawn_tree()
    (committed,) = numbers("ancestors", "n")
    drawn = [line.split(maxsplit=2) for line in lines("ancestors")[2:]]
    assert [int(d[0]) for d in drawn] == numbers("tree", "node") == list(range(tree.num_nodes))
    assert lines("ancestors")[1].split() == ["node", "position", *row("tree", "node")]
    assert [int(d[1]) for d in drawn] == (committed + tree.depths).tolist()
    mask = [bits(d[2]) for d in drawn]
    assert np.array_equal(mask, tree.ancestor_mask())
    assert mask == ancestors_by_hand(tree.parents.tolist())


def walked() -> list[int]:
    return numbers("walk", "path")


def test_the_walk():
    tree, words = drawn_tree("walk")
    assert [row("walk", label) for label in ("node", "token")] == [
        row("tree", label) for label in ("node", "token")
    ]
    chosen_words = row("walk", "chosen")
    words = list(dict.fromkeys([*words, *chosen_words]))
    chosen = np.array([words.index(w) for w in chosen_words])
    path = walk(tree, np.arange(tree.num_nodes), chosen)
    assert path == walked()
    assert [words[tree.tokens[n]] for n in path[1:]] + [chosen_words[path[-1]]] == row("walk", "new")
    parents = tree.parents.tolist()
    right = [n == 0 or tree.tokens[n] == chosen[parents[n]] for n in range(tree.num_nodes)]
    reached = [all(right[a] for a in tree.path(n)) for n in range(tree.num_nodes)]
    assert bits(" ".join(row("walk", "reached"))) == reached == [n in path for n in range(tree.num_nodes)]


def test_the_commit():
    words, text = row("tree", "token"), ["t0", "t1", "t2", "t3"]
    assert row("commit", "before") == text + words
    assert row("commit", "after") == text + [words[n] for n in walked()]
    assert numbers("commit", "slot") == list(range(len(text) + len(words)))
    assert lines("commit")[-1] == f"length {len(text)} → {len(text) + len(walked())}"
    assert numbers("ancestors", "n") == [len(text)]


def padded(values, size: int = 8) -> list[int]:
    return [*map(int, values), *[-1] * (size - len(values))]


def test_the_lazy_commit_moves_the_path():
    assert numbers("lazy-commit", "commit_position") == numbers("ancestors", "n")
    nodes = numbers("lazy-commit", "commit_nodes")
    assert nodes == padded(walked())
    selection = np.array([[column == node for column in range(8)] for node in nodes], float)
    moved = selection @ np.arange(10, 18)  # scratch row v holds 10 + v
    assert moved.tolist() == [10, 11, 12, 17, 0, 0, 0, 0]


def pruned() -> tuple[DraftTree, np.ndarray]:
    tree, _ = drawn_tree("pruning")
    scores = [1.0]
    for node, edge in enumerate(numbers("pruning", "p given parent", float)[1:], 1):
        scores.append(scores[tree.parents[node]] * edge)
    return tree, np.array(scores)


def test_the_pruned_tree():
    tree, scores = pruned()
    assert [row("pruning", label) for label in ("node", "token")] == [
        row("tree", label) for label in ("node", "token")
    ]
    np.testing.assert_allclose(numbers("pruning", "p of the path", float), scores, rtol=1e-9)
    kept = keep_best_nodes(np.log(scores), *numbers("pruning", "K"))
    assert kept.tolist() == numbers("pruning", "kept") == sorted(np.argsort(-scores)[: len(kept)].tolist())
    assert [cells for line in lines("pruning") if (cells := line.split())[:2] == ["row", "0"]] == [
        ["row", *map(str, range(len(kept)))]
    ]
    assert lines("pruning")[-len(kept) - 1].split() == ["row", "node", *map(str, range(len(kept)))]
    place = {node: at for at, node in enumerate(kept.tolist())}
    parents = [place[p] if p >= 0 else -1 for p in tree.parents[kept].tolist()]
    assert parents == numbers("pruning", "parents")
    drawn = [line.split(maxsplit=2) for line in lines("pruning")[-len(kept) :]]
    assert [[int(d[0]), int(d[1])] for d in drawn] == [[at, node] for node, at in place.items()]
    mask = [bits(d[2]) for d in drawn]
    assert np.array_equal(mask, tree.ancestor_mask()[kept][:, kept])
    assert mask == ancestors_by_hand(parents)


def test_two_index_maps():
    _, scores = pruned()
    kept = keep_best_nodes(np.log(scores), *numbers("pruning", "K"))
    cells = {line.split()[0]: line.split()[1:9] for line in lines("two-maps")}
    assert list(map(int, cells["commit_nodes"])) == padded(walked())
    assert list(map(int, cells["commit_rows"])) == padded(kept_rows(kept, walked()))
    assert cells["commit_position"] == row("lazy-commit", "commit_position")
    assert kept[list(map(int, cells["commit_rows"]))[: len(walked())]].tolist() == walked()


def test_typical_thresholds():
    rule = TypicalAcceptance()
    assert (rule.epsilon, math.sqrt(rule.epsilon)) == (0.09, pytest.approx(0.3))
    for line in lines("typical")[1:]:
        probabilities, *drawn = re.split(r"\s{2,}", line)
        p = np.array([float(x) for x in probabilities.split()])
        entropy = -sum(x * math.log(x) for x in p)
        found = entropy, 0.3 * math.exp(-entropy), rule.threshold(p)
        assert p.sum() == pytest.approx(1) and drawn == [f"{value:.4f}" for value in found]


def test_ngram_drafts_are_mixed_as_written():
    words = row("lookup", "text")
    ids = {word: index for index, word in enumerate(dict.fromkeys(words))}
    history = Drafter(num_nodes=2, lookup=PromptLookup()).start([ids[w] for w in words])
    matches = [line.split() for line in lines("lookup")[2:4]]
    left = 1.0
    for order, word, share, weight in reversed(matches):
        assert (word, share, float(weight)) == ("z", "1", history.weight(int(order)))
        assert float(weight) == int(order) / (int(order) + 3)
        left *= 1 - float(weight)
    drafted, rest = history.predict(())
    assert list(drafted) == [ids["z"]] and rest == pytest.approx(left)
    assert lines("lookup")[-1] == f"p(z) = {drafted[ids['z']]:.2f} + {rest:.2f} · p_0(z)"


def test_the_adaptive_draft():
    (rate,) = numbers("adaptive", "λ")
    sizes, seconds = numbers("adaptive", "nodes"), numbers("adaptive", "seconds", float)
    p = numbers("adaptive", "p", float)
    assert p == numbers("tree", "p", float)
    assert StepCosts(tuple(sizes), tuple(seconds), 0.0).up_to(8).tolist() == seconds
    expected = [sum(p[1:size]) for size in sizes]
    values = [e - rate * s for e, s in zip(expected, seconds, strict=True)]
    np.testing.assert_allclose(numbers("adaptive", "expected", float), expected, atol=1e-9)
    np.testing.assert_allclose(numbers("adaptive", "value", float), values, atol=1e-9)
    assert lines("adaptive")[-1] == f"draft {1 + int(np.argmax(values))} nodes"


def test_sizes_named_in_the_text():
    """1 + Σ k^g nodes; a step's rows in the MSA layers."""
    tree = k_ary_tree(0, np.random.default_rng(0).normal(size=(4, 9)), 3)
    assert tree.num_nodes == 1 + 3 + 9 + 27 + 81 == 121
    assert "121 for k = 3 and γ = 4" in PAGE.read_text()
