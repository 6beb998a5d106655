"""What tests of tuning share: a pool of workers, and a run that has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import fake_stages

from kda_tl.tune.pool import WorkerPool
from kda_tl.tune.session import Run


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2, overlap=False) as shared:
        yield shared


@pytest.fixture
def run(pool: WorkerPool, tmp_path: Path) -> Run:
    return fake_stages.make_run(pool, tmp_path / "trials.jsonl")
