"""Packages that kda_tl needs, imported when they are used: one that is missing or broken is told in a sentence."""

import contextlib
from collections.abc import Iterator

from kda_tl.errors import PackageError

# What to install where an import fails, by the name that is imported; a test holds it to pyproject.toml
REQUIREMENTS = {
    "filelock": "filelock>=3.12",
    "numpy": "numpy>=1.26",
    "optuna": "optuna>=5,<6",
    "platformdirs": "platformdirs>=4",
    "psutil": "psutil>=5.9",
    "pynvml": "nvidia-ml-py>=12",
    "rich": "rich>=13",
    "tilelang": "tilelang>=0.1.15,<0.1.16",
    "torch": "torch>=2.6",
}


def describe_failure(name: str, error: BaseException) -> str:
    """Why a package could not be imported, and what to install, in one sentence without its full stop."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    root = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    wanted = root or name  # what is missing may be a package that this one needs
    return f"{name} cannot be imported ({reason}): run `pip install '{REQUIREMENTS.get(wanted, wanted)}'`"


@contextlib.contextmanager
def importing(name: str) -> Iterator[None]:
    """Holds the import of one package. Raises PackageError if it is missing, or broken in whatever way."""
    try:
        yield
    except Exception as error:  # a broken package raises what it likes
        raise PackageError(f"{describe_failure(name, error)}.") from error
