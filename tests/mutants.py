"""Breaks the code in one place at a time and says which breaks no test notices: ``make mutants``.

    python tests/mutants.py [-j N] [--seed N] [--timeout S] [--most N] [WORD ...]

The breaks are rows of ``mutations.txt``: a file, the tests that should fail, and text of the file with what it becomes.
Every process has a copy of the working tree, makes one break in it, runs the row's tests until one fails, and undoes
it. First the same tests run on an unbroken copy, where they must pass. With words only rows in which one occurs are
tried. The exit code is 1 if more rows than ``--most`` survive, 2 if a row does not fit the code any more.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.trees import ROOT, copy_tree, environment_of

TABLE = Path(__file__).with_name("mutations.txt")
SEED_VARIABLE = "KDA_TL_TEST_SEED"
UNBROKEN_TIMEOUT_S = 900.0
OUTPUT = "pytest.log"
KILLED, SURVIVED, TIMEOUT, BROKEN = "killed", "SURVIVED", "timeout", "BROKEN"


@dataclass(frozen=True)
class Mutation:
    """One break: text of a file, what it becomes, and what pytest is asked for."""

    file: str
    tests: tuple[str, ...]
    old: str
    new: str

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.file}: {' '.join(self.old.split())[:60]} -> {' '.join(self.new.split())[:60] or 'nothing'}"


def read_table(text: str) -> list[Mutation]:
    """Rows are apart by empty lines: a line "file tests", then lines of "- old" and of "+ new"; "#" is a comment."""
    mutations = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if lines:
            file, *tests = shlex.split(lines[0])
            old, new = ("\n".join(line[2:] for line in lines[1:] if line[0] == sign) for sign in "-+")
            mutations.append(Mutation(file, tuple(tests), old, new))
    return mutations


def find_misfits(mutations: Sequence[Mutation]) -> list[str]:
    """Rows that do not say one thing of the code as it is."""
    misfits = []
    for m in mutations:
        path = ROOT / m.file
        count = path.read_text().count(m.old) if path.exists() else 0
        if count != 1 or not m.old or m.old == m.new or not m.tests:
            misfits.append(f"{m.title}: its old text occurs {count} times")
    return misfits


@dataclass
class Attempt:
    """Tests that run in a copy, broken by a mutation or sound, in a child of this process."""

    folder: Path
    tests: tuple[str, ...]
    mutation: Mutation | None
    deadline: float
    whole: str = ""  # the file that was broken, as it was in the copy

    def begin(self) -> int:
        """Breaks the copy and starts the tests; returns the child's id."""
        if self.mutation is not None:
            path = self.folder / self.mutation.file
            self.whole = path.read_text()
            path.write_text(self.whole.replace(self.mutation.old, self.mutation.new))
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            run_child(self.folder, self.tests)
        return child

    def end(self, status: int | None) -> tuple[str, str]:
        """Mends the copy; returns what became of it, and the end of what the tests printed."""
        if self.mutation is not None:
            (self.folder / self.mutation.file).write_text(self.whole)
        output = "\n".join((self.folder / OUTPUT).read_text(errors="replace").splitlines()[-12:])
        if status is None:
            return TIMEOUT, output
        return {0: SURVIVED, 1: KILLED}.get(os.waitstatus_to_exitcode(status), BROKEN), output


def run_child(folder: Path, tests: Sequence[str]) -> None:
    """Runs pytest and ends the process, in a group of its own: what hangs is ended with its workers."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background, and so by what tests start
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 3
    try:
        os.chdir(folder)
        os.environ.update(environment_of(folder), PYTHONDONTWRITEBYTECODE="1")
        sys.path[:] = [str(folder), *(path for path in sys.path if not path.startswith(str(ROOT / "tests")))]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("kda_tl", "support")]:
            del sys.modules[name]
        sys.dont_write_bytecode = True
        import pytest

        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--part=all", *tests]))
        sys.stdout.flush()
    finally:
        os._exit(code)


def run_all(
    work: Sequence[tuple[tuple[str, ...], Mutation | None]], folders: Sequence[Path], timeout_s: float
) -> Iterator[tuple[int, str, str]]:
    """What becomes of each piece of work, as they end: its number, the outcome, and what was printed."""
    free, waiting = list(folders), list(enumerate(work))[::-1]
    running: dict[int, tuple[int, Attempt]] = {}
    while waiting or running:
        while free and waiting:
            number, (tests, mutation) = waiting.pop()
            attempt = Attempt(free.pop(), tests, mutation, time.monotonic() + timeout_s)
            running[attempt.begin()] = number, attempt
        time.sleep(0.05)
        for child, (number, attempt) in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            late = not ended and time.monotonic() > attempt.deadline
            if late:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
            if ended or late:
                del running[child]
                free.append(attempt.folder)
                yield number, *attempt.end(None if late else status)


def import_all() -> None:
    """What every test imports and no row breaks: children are forks of this process, and start in a second."""
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    for name in ("numpy", "torch", "tilelang", "optuna", "hypothesis", "filelock", "platformdirs", "psutil", "rich"):
        importlib.import_module(name)


def main() -> int:
    """Tries the rows and prints a line each, then those that survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only rows whose text has one of these")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="of the tests")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a row")
    parser.add_argument("--most", type=int, default=2, help="rows that may survive (default: 2)")
    parser.add_argument("--trust", action="store_true", help="do not run the tests on the unbroken code first")
    args = parser.parse_args()
    os.environ.setdefault(SEED_VARIABLE, str(args.seed))
    mutations = read_table(TABLE.read_text())
    if misfits := find_misfits(mutations):
        sys.stderr.write("\n".join(misfits) + f"\n{len(misfits)} rows do not fit the code: mend {TABLE.name}.\n")
        return 2
    if args.words:
        mutations = [m for m in mutations if any(word in repr(m) for word in args.words)]
    say = sys.stdout.write
    say(f"{len(mutations)} rows, {args.jobs} at a time, {SEED_VARIABLE}={os.environ[SEED_VARIABLE]}\n")
    begin = time.monotonic()
    import_all()
    results: list[tuple[Mutation, str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folders = [copy_tree(Path(temporary) / str(n)) for n in range(args.jobs)]
        asked = [] if args.trust else [(tests, None) for tests in dict.fromkeys(m.tests for m in mutations)]
        for number, outcome, output in run_all(asked, folders, UNBROKEN_TIMEOUT_S):
            if outcome != SURVIVED:
                sys.stderr.write(f"fails on the unbroken code: {shlex.join(asked[number][0])}: {outcome}\n{output}\n")
                return 2
        for number, outcome, output in run_all([(m.tests, m) for m in mutations], folders, args.timeout):
            results.append((mutations[number], outcome))
            say(f"{outcome:8}  {mutations[number].title}\n" + (f"{output}\n" if outcome == BROKEN else ""))
            sys.stdout.flush()
    left = [m for m, outcome in results if outcome in (SURVIVED, BROKEN)]
    took = time.monotonic() - begin
    say(f"{len(results) - len(left)} of {len(results)} killed in {took:.0f} s, {len(left)} survive\n")
    for mutation in left:
        say(f"  {mutation.title}\n    {shlex.join(mutation.tests)}\n")
    return 1 if len(left) > args.most else 0


if __name__ == "__main__":
    sys.exit(main())
