"""How exactly formulations of the oracle agree."""

from __future__ import annotations

import torch
from torch import Tensor

F64 = torch.float64
EXACT = 1e-12  # float64 against float64, different orders of summation


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
