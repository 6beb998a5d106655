"""One call of an isolated worker, from its begin to its end."""

from __future__ import annotations

from typing import Any

from kda_tl.core.isolate import PENDING, IsolatedWorker, wait_any


def call(worker: IsolatedWorker, payload: Any) -> Any:
    worker.submit(payload)
    while (result := worker.poll()) is PENDING:
        wait_any([worker])
    return result
