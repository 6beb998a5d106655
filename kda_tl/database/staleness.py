"""Whether a stored plan still runs the kernels that were measured.

Two hashes a stage tell: that of its sources, which a call compares, and that of its kernel, which takes seconds to
lower. Sources that differ make a plan stale, unless ``kda-tl verify --static`` finds the kernels to be the same.
"""

from collections.abc import Mapping
from dataclasses import replace

from kda_tl.database.records import Entry


def stale_stages(entry: Entry, current: Mapping[str, str]) -> tuple[str, ...]:
    """Stages whose template or space changed since the entry was measured, whether or not their kernels did.

    This is all that a call asks: nothing is lowered to find out more, see :func:`renew`. ``current`` holds the SHA-256
    of each template's source and space as they are now, by stage; a stage that it lacks is gone, and so stale.
    """
    stages = entry.plan["stages"]
    return tuple(s for s in stages if s not in current or entry.templates.get(s) != current[s])


def list_unproved(entry: Entry, current: Mapping[str, str], version: str) -> tuple[str, ...]:
    """Stages whose kernels :func:`renew` has to know: those with other sources, and those without a hash.

    None if that cannot help, as a stage with other sources has no hash of a kernel by this version of TileLang.
    """
    known, changed = entry.kernels.get(version, {}), stale_stages(entry, current)
    if not known.keys() >= set(changed):
        return ()
    return tuple(s for s in entry.plan["stages"] if s in changed or s not in known)


def renew(
    entry: Entry, current: Mapping[str, str], version: str, kernels: Mapping[str, str]
) -> tuple[Entry, tuple[str, ...]]:
    """An entry with the hashes of today's sources, if its kernels are still those that were measured.

    ``kernels`` holds the hashes of those that :func:`list_unproved` names, as their sources make them now with this
    version of TileLang. Returns the entry, renewed unless a stage is stale, and the stages that are: their sources
    differ, and their kernels differ or cannot be compared.
    """
    known = entry.kernels.get(version, {})
    stale = tuple(s for s in stale_stages(entry, current) if s not in kernels or known.get(s) != kernels[s])
    if stale:
        return entry, stale
    templates = {s: current[s] for s in entry.plan["stages"]}
    return replace(entry, templates=templates, kernels={**entry.kernels, version: {**known, **kernels}}), ()
