"""The winner among finalists: the median of rounds decides, and ties go to a fixed order."""

from __future__ import annotations

import pytest
from support.search_spaces import SMALL

from kda_tl.core.stage import Config
from kda_tl.errors import InputError
from kda_tl.tune.search import pick_winner

# ---- the winner among finalists

A, B, C, D = SMALL[:4]


@pytest.mark.parametrize(
    ("rounds", "default", "winner"),
    [
        ({B: [100, 100, 100], A: [101, 101, 101]}, None, A),  # 1 % apart: the order of the space decides
        ({B: [100, 100, 100], A: [103, 103, 103]}, None, B),  # 3 % apart without noise
        ({B: [100, 100, 100], A: [101, 101, 101], C: [101.9] * 3}, C, C),  # the default wins ties
        ({B: [100, 100, 100], A: [101, 101, 101], C: [103] * 3}, C, A),  # but only ties
        ({B: [100, 90, 110, 95, 105], A: [104, 95, 115, 99, 110]}, None, A),  # 4 % apart, but rounds scatter by 5 %
        ({B: [100, 99.9, 100.1], A: [104, 103.9, 104.1]}, None, B),  # 4 % apart, and rounds agree
        ({A: [100, 100, 500], B: [99, 99, 99]}, None, A),  # one disturbed round does not matter
        ({D: [100], B: [100], C: [100]}, A, B),  # a default that was not measured cannot win
        ({A: [], B: [100, 100]}, A, B),  # nor can one without rounds
    ],
)
def test_ties_go_to_a_fixed_order(rounds: dict[Config, list[float]], default: Config | None, winner: Config) -> None:
    for order in (dict(rounds), dict(reversed(rounds.items()))):
        assert pick_winner(order, default, SMALL) == winner


def test_more_rounds_separate_what_few_cannot() -> None:
    few = {A: [104.0, 99.0, 109.0], B: [100.0, 95.0, 105.0]}
    assert pick_winner(few, None, SMALL) == A
    assert pick_winner({config: rounds * 40 for config, rounds in few.items()}, None, SMALL) == B


def test_finalists_outside_the_order_keep_their_own() -> None:
    assert pick_winner({C: [100.0], A: [100.0]}) == C


def test_no_finalist_is_an_error() -> None:
    with pytest.raises(InputError, match="no finalist"):
        pick_winner({A: []}, A, SMALL)
