"""Requests whose workers start at once: a worker that imports this module imports nothing else."""

import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any


def run(request: Any) -> Any:
    """Target of worker processes."""
    return request.run()


@dataclass(frozen=True, kw_only=True)
class Note:
    """A request that takes a while and appends its name to a file."""

    path: str
    name: str
    seconds: float = 0.0
    timeout_s: float = 60.0

    @property
    def key(self) -> Hashable:
        return self.name

    def run(self) -> str:
        time.sleep(self.seconds)
        with open(self.path, "a") as file:
            file.write(self.name)
        return self.name.upper()
