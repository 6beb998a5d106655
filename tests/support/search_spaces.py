"""Spaces of configs that are searched in tests, and a random cost of the kind that stages have."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from kda_tl.core.stage import Config, tunable


@dataclass(frozen=True, kw_only=True)
class KernelConfig(Config):
    BK: int = tunable(64, 32, 64, 128)
    BV: int = tunable(64, 16, 32, 64, 128)
    threads: int = tunable(128, 64, 128, 256)
    num_stages: int = tunable(2, 1, 2, 3, 4)
    swizzle: bool = tunable(False, False, True)
    order: str = tunable("rows", "rows", "cols")

    @property
    def smem_bytes(self) -> int:
        return 2 * self.num_stages * (64 * self.BK + self.BK * self.BV + 64 * self.BV) + 4 * self.BK * self.BV


SPACE = [c for c in KernelConfig.space() if c.smem_bytes <= 120_000 and c.BK * c.BV // c.threads <= 64]
DEFAULT = KernelConfig()


@dataclass(frozen=True, kw_only=True)
class SmallConfig(Config):
    BV: int = tunable(64, 16, 32, 64, 128)
    threads: int = tunable(128, 64, 128, 256)


SMALL = list(SmallConfig.space())


def draw_surface(seed: int) -> Callable[[Config], float]:
    """A random cost, in us, of the kind KDA stages have: waves of blocks, latency hidden by stages, a cliff where
    registers spill, and random effects of every choice, every pair of choices and every config."""
    rng = random.Random(seed)
    axes = KernelConfig.axes()
    alone = {(name, value): rng.gauss(0, 0.1) for name in axes for value in axes[name]}
    pairs = {
        ((a, x), (b, y)): rng.gauss(0, 0.05)
        for a, b in itertools.combinations(axes, 2)
        for x in axes[a]
        for y in axes[b]
    }
    own = {config: rng.gauss(0, 0.01) for config in SPACE}
    heads, latency = rng.choice([8, 32, 64, 96]), rng.uniform(0.1, 0.5)
    spill_at, spill = rng.choice([24, 32, 48]), rng.uniform(0.1, 0.6)

    def cost(config: Config) -> float:
        assert isinstance(config, KernelConfig)
        resident = max(1, min(8, 228_000 // config.smem_bytes, 2048 // config.threads))
        blocks = heads * 2 * (128 // config.BV) * (128 // config.BK)
        waves = math.ceil(blocks / (132 * resident))
        work = waves * resident * (config.BK * config.BV / 4096 + 0.3) * (1 + latency / (config.num_stages * resident))
        spilled = max(0.0, math.log2(config.BK * config.BV / config.threads / spill_at))
        point = config.as_dict().items()
        random_part = sum(alone[x] for x in point) + sum(pairs[x, y] for x, y in itertools.combinations(point, 2))
        return 100 * math.exp(0.5 * math.log(work) + spill * spilled + random_part + own[config])

    return cost
