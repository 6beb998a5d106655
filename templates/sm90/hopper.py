"""What stages for Hopper are declared with: the base of configs, specs that several name, and bytes of tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kda_tl.core.dtypes import TORCH_DTYPE
from kda_tl.core.stage import Case, Config, TensorSpec, first_valid, static_sizes

# What the caller gives of rows and gates
GIVEN = {
    "q": "tokens H K : io",
    "k": "tokens H K : io",
    "g": "tokens HV G : g",
    "beta": "tokens HV : beta",
    "A_log": "HV : f32 ? has_A_log",
    "dt_bias": "HV G : f32 ? has_dt_bias",
}
# What prep makes of a chunk and head
FACTORS = {
    "A": "NT HV LOWER HALF : io",
    "Aqk": "NT HV LOWER HALF : io",
    "k_neg": "NT HV BT KP : io",
    "qg": "NT HV BT KP : io",
    "kg": "NT HV BT KP : io",
    "decay": "NT HV KP : f32",
}
# The same where the recurrence reads the caller's rows: powers of two and norms are a number a token
PAIRS = {"A": FACTORS["A"], "Aqk": FACTORS["Aqk"], "powers": "NT HV 7 BT : f32"}
# How far a walk must begin before what it is asked for: see reach
BOUNDS = {"bounds": "NT HV : f32"}
# Values again, of each token: see bwd_gdn_states. Gradients of v may take their place
VALUES = {"values": "tokens HV V : io"}
# Gradients of the states that segments end with, where they are not found otherwise: see bwd_gdn_states
ENDS = {"ends": "NC HV V KP : f32"}
# Whether these are in memory, 1 or 0, for a recurrence that begins before all are
READY = {"ready": "NT HV : f32"}
# Which chunks are a segment, and which tokens a chunk
TABLES = {"segments": "NS 4 : i32", "chunk_tokens": "NT 2 : i32"}
SCALARS = ("scale", "lower_bound")


@dataclass(frozen=True, kw_only=True)
class HopperConfig(Config):
    """Of a stage for Hopper."""

    NEEDS: ClassVar[str] = "its products are instructions of sm_90"  # why, as the head of a sentence

    def reject(self, case: Case) -> str | None:
        """Everything but Hopper."""
        return None if case.device.sm == 90 else f"{self.NEEDS}, the device is {case.device.arch}"

    @classmethod
    def default(cls, case: Case) -> Config:
        """The fields' defaults, or, where the case rejects them, the first config that it takes."""
        return first_valid(case, cls())


def count_bytes(case: Case, sizes: Mapping[str, int], tensors: Mapping[str, str]) -> int:
    """Of those tensors that the problem has, by their specs, without tables of integers."""
    p, all_sizes = case.problem, {**static_sizes(case), **sizes}
    specs = [spec for text in tensors.values() if (spec := TensorSpec.parse(text)).dtype != "i32" and spec.present(p)]
    return sum(math.prod(spec.shape(all_sizes)) * TORCH_DTYPE[spec.element(p)].itemsize for spec in specs)
