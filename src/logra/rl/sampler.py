"""Which prompts the next step uses: exact epochs, resumable anywhere, independent of global random state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from logra.errors import CheckpointError, DataError
from logra.hashing import derive_key


def epoch_permutation(num_prompts: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(num_prompts), int64, keyed by (seed, epoch) alone.

    It is the sorting order of raw Philox words and not `Generator.permutation`, whose stream numpy may change
    between releases: a run must resume the same on another numpy.
    """
    words = np.random.Philox(key=derive_key(seed, "shuffle", epoch)).random_raw(num_prompts)
    return np.argsort(words, kind="stable")


def defer(order: np.ndarray, avoid: list[int], window: int) -> np.ndarray:
    """`order` rearranged so that its first `window` entries hold none of `avoid`; still a permutation.

    The window takes the first entries that need not be avoided; all others keep their order. Only the first
    window + len(avoid) entries can move. Needs window + len(avoid) <= len(order).
    """
    if not avoid or window < 1:
        return order
    is_allowed = ~np.isin(order[: window + len(avoid)], avoid)
    end = np.flatnonzero(is_allowed)[window - 1] + 1
    head, is_allowed = order[:end], is_allowed[:end]
    return np.concatenate([head[is_allowed], head[~is_allowed], order[end:]])


class PromptSampler:
    """Endless batches of prompt positions. Every epoch visits each prompt once; no batch is ever short.

    A batch may span two epochs. It still never holds a prompt twice (two groups of one prompt would get the
    same random numbers): what it already holds is deferred to just behind it in the new epoch's order, see
    `defer`. The order of an epoch depends on (seed, epoch) and, in those few entries, on where the batch that
    spans into it began.

    The batch size may change on resume. Raises DataError if it exceeds the number of prompts.
    """

    def __init__(
        self, num_prompts: int, batch_size: int, seed: int, shuffle: bool = True, fingerprint: str = ""
    ) -> None:
        """fingerprint: of the data set (`PromptSet.fingerprint`); stored, and compared on resume."""
        if batch_size < 1:
            raise DataError(f"the batch size is {batch_size} prompts: it must be at least 1")
        if batch_size > num_prompts:
            raise DataError(
                f"a batch of {batch_size} prompts is larger than the data set ({num_prompts} usable): "
                f"ask for at most {num_prompts} prompts a step, or give more data"
            )
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.fingerprint = fingerprint
        self._start_epoch(0, [], 0)

    def next_batch(self) -> list[int]:
        """The next `batch_size` positions, all different."""
        batch = self._take(self.batch_size)
        missing = self.batch_size - len(batch)
        if self.position == self.num_prompts:
            self._start_epoch(self.epoch + 1, batch if missing else [], missing)
            batch = batch + self._take(missing)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Integers, strings and one short list of integers: fit for JSON."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "avoid": list(self._avoid),
            "window": self._window,
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the saved sampler stood. CheckpointError, changing nothing, if the data differs."""
        state = dict(state)
        _check_keys(state, self.state_dict())
        changed = [
            f"{name} was {state[name]!r}, now {getattr(self, name)!r}"
            for name in ("num_prompts", "seed", "shuffle", "fingerprint")
            if state[name] != getattr(self, name)
        ]
        if changed:
            raise CheckpointError(
                f"cannot resume the data order, the data changed since the checkpoint: {'; '.join(changed)}. "
                "Restore the data set, its options and the seed, or start a new run"
            )
        _check_ranges(state)
        self._start_epoch(state["epoch"], list(state["avoid"]), state["window"])
        self.position = state["position"]

    def _take(self, count: int) -> list[int]:
        taken = self._order[self.position : self.position + count].tolist()
        self.position += len(taken)
        return taken

    def _start_epoch(self, epoch: int, avoid: list[int], window: int) -> None:
        """avoid: what the batch that spans into this epoch already holds; window: how many more it takes."""
        if self.shuffle:
            order = epoch_permutation(self.num_prompts, self.seed, epoch)
        else:
            order = np.arange(self.num_prompts)
        self._order = defer(order, avoid, window)
        self._avoid, self._window = avoid, window
        self.epoch, self.position = epoch, 0


def _check_keys(state: dict[str, Any], example: dict[str, Any]) -> None:
    if state.keys() != example.keys():
        wrong = sorted(map(str, state.keys() ^ example.keys()))
        raise CheckpointError(f"the saved data position is damaged: missing or unknown entries {wrong}")
    for name, value in example.items():
        if type(state[name]) is not type(value):
            raise CheckpointError(
                f"the saved data position is damaged: {name} is {state[name]!r}, not {type(value).__name__}"
            )


def _check_ranges(state: dict[str, Any]) -> None:
    num_prompts, avoid = state["num_prompts"], state["avoid"]
    is_valid = (
        state["epoch"] >= 0
        and 0 <= state["position"] < num_prompts
        and all(type(index) is int and 0 <= index < num_prompts for index in avoid)
        and len(set(avoid)) == len(avoid)
        and 0 <= state["window"] <= num_prompts - len(avoid)
    )
    if not is_valid:
        raise CheckpointError(
            f"the saved data position is damaged: epoch {state['epoch']}, position {state['position']}, "
            f"{len(avoid)} carried, window {state['window']} do not fit {num_prompts} prompts"
        )
