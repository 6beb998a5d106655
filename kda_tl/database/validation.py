"""What is wrong with the files of a tuning database, in sentences."""

import importlib.resources
import json
import os
from collections.abc import Callable
from pathlib import Path

from kda_tl.core.files import read_regular
from kda_tl.database.file import MAX_FILE_BYTES, Document, migrate
from kda_tl.database.lookup import read_document
from kda_tl.database.records import Entry, Key
from kda_tl.errors import DatabaseError

CheckPlan = Callable[[Document, Entry], str]


def validate(path: str | os.PathLike[str], check_plan: CheckPlan | None = None) -> list[str]:
    """Problems of a file, or of all files of a database's directory, in sentences; empty if there are none.

    ``check_plan`` says why an entry of a file does not run, as :func:`kda_tl.cli.db.find_plan_problem`. With jsonschema
    installed, files are also held against ``tuning_db/schema.json``.
    """
    root = Path(path)
    if not root.exists():
        return [f"{root} does not exist."]
    files = sorted(root.glob("*/*.json")) if root.is_dir() else [root]
    return [f"{file}: {problem.removesuffix('.')}." for file in files for problem in _validate_file(file, check_plan)]


def _validate_file(file: Path, check_plan: CheckPlan | None) -> list[str]:
    try:
        document = read_document(file, file.absolute().parent.name)
    except DatabaseError as error:
        return [str(error)]
    problems: list[str] = []
    first: dict[Key, int] = {}
    for i, values in enumerate(document.entries):
        where = f"entries[{i}]"
        try:
            entry = Entry.from_dict(values, where)
        except DatabaseError as error:
            problems.append(str(error))
            continue
        if entry.key in first:
            problems.append(f"{where} has the key of entries[{first[entry.key]}]")
        first.setdefault(entry.key, i)
        if check_plan is not None and (reason := check_plan(document, entry)):
            problems.append(f"{where}.plan cannot run: {reason}")
        if missing := sorted(entry.plan["stages"].keys() - entry.templates.keys()):
            problems.append(f"{where}.templates lacks the stages {missing}")
        if entry.vs_default.ratio < 1:
            problems.append(f"{where} is slower than the default: store the default's plan")
        if entry.check.max_rel_err > entry.check.tolerance:
            problems.append(f"{where} is wrong by {entry.check.max_rel_err}, tolerance {entry.check.tolerance}")
    return problems + _validate_schema(file)


def _validate_schema(file: Path) -> list[str]:
    try:
        import jsonschema  # type: ignore[import-untyped]
    except ImportError:
        return []
    packaged = importlib.resources.files("kda_tl.tuning_db") / "schema.json"
    schema, values = (json.loads(read_regular(each, MAX_FILE_BYTES)) for each in (packaged, file))
    errors = jsonschema.Draft202012Validator(schema).iter_errors(migrate(values))
    return [f"{error.json_path.removeprefix('$.')}: {error.message}" for error in errors]
