"""`main` driven as Apple's sequential engine drives it (`apple/coreai-models`, CoreAISequentialEngine).

What it checks of a model when it loads it, how its caches grow, what it passes at every call. Memory is not
zeroed there: here it is NaN, which would stay if it were read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ss_runtime.coreai.asset import OpenAsset, waited_for

TOKEN_NAMES, POSITION_NAMES = ("input_ids", "in_new_token_ids"), ("position_ids", "pos_ids")
FIRST_CAPACITY = 256


class AppleEngine:
    """`main` of an asset, greedily.

    most: positions that the caches may grow to; first: those that they begin with; dtype: as in
    `OpenAsset`.
    """

    def __init__(self, asset: Path, most: int, dtype: str = "float16", first: int = FIRST_CAPACITY) -> None:
        from coreai.runtime import NDArray

        self._array, self._dtype, self._most = NDArray, np.dtype(dtype), most
        self._function = OpenAsset(asset, dtype).function("main")
        described = self._function.desc
        self._states = {n: tuple(described.state_descriptor(n).shape) for n in described.state_names}
        self._check(described)
        [self._tokens] = set(TOKEN_NAMES) & set(described.input_names)
        [self._positions] = set(POSITION_NAMES) & set(described.input_names)
        self._logits = described.output_names[0]
        self._capacity = min(first, most)
        self._caches = {name: self._memory(self._capacity) for name in self._states}
        self.processed = 0

    def _check(self, described) -> None:
        """What both of their engines ask for, the pipelined one included."""
        assert len(described.input_names) == len(self._states) == 2
        for name in described.input_names:
            entry = described.input_descriptor(name)
            assert (str(entry.dtype), tuple(entry.shape)) == ("int32", (1, -1))
        logits = described.output_descriptor(described.output_names[0])
        assert str(logits.dtype) == str(self._dtype) and tuple(logits.shape)[:2] == (1, -1)
        keys, values = self._states.values()
        assert keys == values and len(keys) == 5 and [i for i, d in enumerate(keys) if d < 0] == [3]
        assert "key" in next(iter(self._states))  # keys first

    def _memory(self, capacity: int) -> np.ndarray:
        shape = next(iter(self._states.values()))
        return np.full((*shape[:3], capacity, shape[4]), np.nan, self._dtype)

    def _grow(self, needed: int) -> None:
        assert needed <= self._most
        while self._capacity < needed:
            old, self._capacity = self._capacity, min(2 * self._capacity, self._most)
            for name, cache in self._caches.items():
                self._caches[name] = self._memory(self._capacity)
                self._caches[name][:, :, :, :old] = cache

    def run(self, tokens: list[int]) -> np.ndarray:
        """One call: the logits [S, V] of the tokens, which follow those of the calls before."""
        behind = self.processed + len(tokens)
        self._grow(behind)
        inputs = {self._tokens: [tokens], self._positions: [list(range(behind))]}
        arrays = {name: self._array(np.array(value, np.int32)) for name, value in inputs.items()}
        states = {name: self._array(cache) for name, cache in self._caches.items()}
        outputs = waited_for(self._function(arrays, states))
        self._caches = {name: np.array(state.numpy()) for name, state in states.items()}
        self.processed = behind
        return np.array(outputs[self._logits].numpy())[0]

    def generate(self, prompt: list[int], count: int, chunk: int | None = None) -> list[int]:
        """`count` tokens behind the prompt, which goes in whole or `chunk` tokens at a time."""
        chunk = chunk or len(prompt)
        for start in range(0, len(prompt), chunk):
            logits = self.run(prompt[start : start + chunk])
        chosen = [int(logits[-1].argmax())]
        while len(chosen) < count:
            chosen.append(int(self.run(chosen[-1:])[-1].argmax()))
        return chosen
