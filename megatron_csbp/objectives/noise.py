# SPDX-License-Identifier: Apache-2.0
"""Noise of one sample as a pure function of its key. No global RNG, no rank, no torch.

Every number comes from the counter-based generator Philox-4x64: the key is (seed, split), the upper three counter
words are (what is drawn and for which view, sample index, epoch), the lowest counts the draws. Any rank, data worker
or resumed run therefore draws the same numbers for the same sample, and a rank draws only the rows it owns.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

_DRAWS_PER_COUNT = 4
_WORD_LIMIT = 1 << 64
_VIEW_SHIFT = 8
_BELOW_ONE = np.nextafter(1.0, 0.0)


class _Purpose(IntEnum):
    """What a stream of numbers is for. Values are part of the noise: changing one changes every run."""

    TOKENS = 0
    BLOCK_ORDER = 1
    BLOCK_JITTER = 2
    SEQUENCE = 3


@dataclass(frozen=True)
class SampleNoise:
    """The noise of one view of one sample in one epoch.

    Attributes:
        seed: seed of the run (`--seed`), or the fixed seed of validation.
        split: 0 training, 1 validation, 2 test.
        sample_index: index of the sample in its dataset.
        epoch: how often the sample came before, where samples repeat under the same index.
        view: which corrupted copy of the sample in the same step.

    Raises:
        ValueError: a part of the key is negative or does not fit 64 bits.
    """

    seed: int
    split: int
    sample_index: int
    epoch: int = 0
    view: int = 0

    def __post_init__(self) -> None:
        for name in ("seed", "split", "sample_index", "epoch"):
            value = getattr(self, name)
            if not 0 <= value < _WORD_LIMIT:
                raise ValueError(f"noise {name} {value} must be at least 0 and below 2**64.")
        if not 0 <= self.view < _WORD_LIMIT >> _VIEW_SHIFT:
            raise ValueError(f"noise view {self.view} must be at least 0 and below 2**{64 - _VIEW_SHIFT}.")

    @property
    def is_evaluation(self) -> bool:
        """Whether the sample is evaluated and not trained on."""
        return self.split != 0

    def block_levels(self, num_blocks: int) -> npt.NDArray[np.float64]:
        """Return one noise level for each block, stratified: every interval [i/n, (i+1)/n) holds exactly one.

        The strata are dealt to the blocks by a random permutation, so each block's level is uniform on [0, 1)
        whatever its position.

        Args:
            num_blocks: n, blocks of the whole sequence.

        Returns:
            Levels in [0, 1), float64 [n].
        """
        order = np.argsort(self._raw(_Purpose.BLOCK_ORDER, 0, num_blocks), kind="stable")
        levels = (order + self._uniform(_Purpose.BLOCK_JITTER, 0, num_blocks)) / num_blocks
        # The sum rounds up to n once in 2**53 / n draws.
        return np.minimum(levels, _BELOW_ONE)

    def sequence_level(self) -> float:
        """Return one noise level in [0, 1) for the whole sequence."""
        return float(self._uniform(_Purpose.SEQUENCE, 0, 1)[0])

    def uniforms(self, first_position: int, length: int) -> npt.NDArray[np.float64]:
        """Return the numbers that decide which tokens are corrupted, for a range of positions.

        Any range equals the slice of the whole, and costs only its own length.

        Args:
            first_position: position of the first token in the sequence.
            length: tokens in the range.

        Returns:
            Uniform numbers in [0, 1), float64 [length].
        """
        return self._uniform(_Purpose.TOKENS, first_position, length)

    def _uniform(self, purpose: _Purpose, first: int, length: int) -> npt.NDArray[np.float64]:
        """Return draws first .. first + length as multiples of 2**-53 in [0, 1)."""
        return (self._raw(purpose, first, length) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _raw(self, purpose: _Purpose, first: int, length: int) -> npt.NDArray[np.uint64]:
        """Return draws first .. first + length of one stream, uint64.

        Raw words, since NumPy promises their values across versions, which it does not for Generator's methods.
        """
        counts, skipped = divmod(first, _DRAWS_PER_COUNT)
        # View 0 has the counters of the time when there were no views (docs/adr/0018).
        drawn = purpose | (self.view << _VIEW_SHIFT)
        counter = np.array([counts, drawn, self.sample_index, self.epoch], dtype=np.uint64)
        philox = np.random.Philox(counter=counter, key=np.array([self.seed, self.split], dtype=np.uint64))
        draws: npt.NDArray[np.uint64] = np.asarray(philox.random_raw(skipped + length), dtype=np.uint64)
        return draws[skipped:]
