"""Sets the fingerprints of packaged plans anew where their kernels are what they were when they were measured.

    python tests/renew.py COMMIT

Fingerprints follow the text of the templates, so that a moved constant or an edited comment makes plans stale. This
builds every kernel of every packaged plan with the templates of COMMIT, where the records were fresh, and with those of
the working tree. A record gets the fingerprint of today's stage if the stage's kernels, as TileLang is given them, are
the same; what is not stays stale, is listed, and is to be measured again.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trees import ROOT, copy_commit, copy_tree, environment_of

PACKAGED = ROOT / "tuning_db"
Description = dict[str, Any]  # "fingerprints" by stage; "kernels": by record and stage, a hash


def describe() -> Description:
    """Fingerprints, and a hash of each kernel of the working tree's records, with the kda_tl that Python finds."""
    from kda_tl import kernel, templates
    from kda_tl.cli.verify import find_workload
    from kda_tl.db import Database
    from kda_tl.dispatch import parse_plan
    from kda_tl.errors import InputError
    from kda_tl.stage import Case

    kernels: dict[str, str] = {}
    for (slug, operator, direction), file in Database.load(PACKAGED, "packaged").files.items():
        device = file.gpu.as_device()
        for key, entry in file.entries.items():
            problem = find_workload(entry, direction).problem()
            try:
                plan = parse_plan(entry.plan, problem, device)
            except InputError:  # a stage that these templates do not have
                continue
            case = Case(problem=problem.without_lengths(), device=device, BT=plan.BT, BC=plan.BC)
            for name, config in plan.stages:
                stage = templates.load(name)
                settings = {**kernel._CUDA_PASS_CONFIGS, **stage.passes(case)}
                text = f"{device.target} {sorted(settings.items())}\n{stage.build(case, config).script()}"
                kernels[f"{slug}/{operator}_{direction} {key.text} {name}"] = hashlib.sha256(text.encode()).hexdigest()
    return {"fingerprints": {name: templates.fingerprint(name) for name in templates.names()}, "kernels": kernels}


def describe_in(folder: Path) -> Description:
    """The same of a copy."""
    command = [sys.executable, __file__, "--describe"]
    found = subprocess.run(command, env=environment_of(folder), check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(found.splitlines()[-1])


def renew(record: str, stored: dict[str, str], before: Description, now: Description) -> list[str]:
    """Writes fingerprints of today into a record's; returns stages that stay stale."""
    stale = []
    for stage, fingerprint in stored.items():
        kernel = f"{record} {stage}"
        fresh = fingerprint == before["fingerprints"].get(stage)
        if fresh and kernel in now["kernels"] and before["kernels"].get(kernel) == now["kernels"][kernel]:
            stored[stage] = now["fingerprints"][stage]
        elif fingerprint != now["fingerprints"].get(stage):
            stale.append(stage)
    return stale


def main(commit: str) -> int:
    """Writes the files; 1 if a record stays stale."""
    from kda_tl.db import store
    from kda_tl.db_file import Document
    from kda_tl.records import Entry

    with tempfile.TemporaryDirectory() as folder:
        before = describe_in(copy_commit(commit, Path(folder) / "before"))
        now = describe_in(copy_tree(Path(folder) / "now"))
    left = 0
    for path in sorted(PACKAGED.glob("*/*.json")):
        document, entries = Document.parse(path.read_text()), []
        for values in document.entries:
            key = Entry.from_dict(values).key.text
            stale = renew(f"{path.parent.name}/{path.stem} {key}", values["templates"], before, now)
            left += bool(stale)
            entries.append(Entry.from_dict(values))
            if stale:
                sys.stdout.write(f"{path.parent.name}/{path.name} {key} stays stale: {', '.join(stale)}\n")
        store(PACKAGED, document.gpu.as_device(), document.operator, document.direction, entries)
        sys.stdout.write(f"{path.parent.name}/{path.name}: {len(entries)} records\n")
    return 1 if left else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--describe"]:
        sys.stdout.write(json.dumps(describe()) + "\n")
    elif len(sys.argv) == 2:
        sys.exit(main(sys.argv[1]))
    else:
        sys.exit(__doc__)
