"""Breaks the code in one place at a time and says which breaks no test notices: ``make mutants``.

    python tests/mutants.py [-j N] [--seed N] [--timeout S] [--most N] [WORD ...]

The breaks are rows of ``mutations.txt``: a file, the tests that should fail, and text of the file with what it becomes.
Every process has a copy of the working tree, makes one break in it, runs the row's tests until one fails, and undoes
it. First the same tests run on an unbroken copy, where they must pass. With words only rows in which one occurs are
tried. The exit code is 1 if more rows than ``--most`` survive, 2 if a row does not fit the code any more.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from trees import ROOT, copy_tree, environment_of

TABLE = Path(__file__).with_name("mutations.txt")
SEED_VARIABLE = "KDA_TL_TEST_SEED"
_UNBROKEN_TIMEOUT_S = 900.0
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


def run_tests(folder: Path, tests: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """What became of a copy with these tests, and the end of what they printed."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-W", "ignore::pytest.PytestConfigWarning"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    # a group of its own: what hangs in a broken copy is ended with its workers
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment_of(folder) | {"PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return TIMEOUT, f"over {timeout_s:g} s"
    outcome = {0: SURVIVED, 1: KILLED}.get(process.returncode, BROKEN)
    return outcome, "\n".join(output.splitlines()[-12:])


def check_unbroken(folder: Path, asked: Sequence[tuple[str, ...]]) -> list[str]:
    """Tests that already fail on the code as it is, which would count every break as noticed."""
    found = [(tests, *run_tests(folder, tests, _UNBROKEN_TIMEOUT_S)) for tests in asked]
    return [f"{shlex.join(tests)}: {outcome}\n{output}" for tests, outcome, output in found if outcome != SURVIVED]


def try_mutation(folder: Path, mutation: Mutation, timeout_s: float) -> tuple[str, str]:
    """Breaks a copy, runs the tests, mends it."""
    path = folder / mutation.file
    sound = path.read_text()
    path.write_text(sound.replace(mutation.old, mutation.new))
    try:
        return run_tests(folder, mutation.tests, timeout_s)
    finally:
        path.write_text(sound)


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
    begin, copies = time.monotonic(), SimpleQueue[Path]()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        folders = [copy_tree(Path(temporary) / str(n)) for n in range(args.jobs)]
        asked = list(dict.fromkeys(mutation.tests for mutation in mutations))
        parts = [asked[n :: args.jobs] for n in range(args.jobs)]
        checked = [[] for _ in parts] if args.trust else pool.map(check_unbroken, folders, parts)
        if failing := [failure for failures in checked for failure in failures]:
            sys.stderr.write("\n".join(failing) + "\nThese fail on the unbroken code.\n")
            return 2
        for folder in folders:
            copies.put(folder)

        def attempt(mutation: Mutation) -> tuple[str, str]:
            folder = copies.get()
            try:
                return try_mutation(folder, mutation, args.timeout)
            finally:
                copies.put(folder)

        results = []
        for mutation, (outcome, output) in zip(mutations, pool.map(attempt, mutations), strict=True):
            results.append((mutation, outcome))
            say(f"{outcome:8}  {mutation.title}\n")
            if outcome == BROKEN:
                say(f"{output}\n")
            sys.stdout.flush()
    left = [m for m, outcome in results if outcome in (SURVIVED, BROKEN)]
    say(
        f"{len(results) - len(left)} of {len(results)} killed in {time.monotonic() - begin:.0f} s, {len(left)} survive\n"
    )
    for mutation in left:
        say(f"  {mutation.title}\n    {shlex.join(mutation.tests)}\n")
    return 1 if len(left) > args.most else 0


if __name__ == "__main__":
    sys.exit(main())
