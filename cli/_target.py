"""Which device ``--gpu`` means, one that is here to measure on, or any known one to look up for; and which ``--db``."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from pathlib import Path

from kda_tl.cli._console import Terminal
from kda_tl.core.device import Device, cpu_device, current_device, normalise_gpu_name
from kda_tl.database.gpus import known_device, resolve_gpu
from kda_tl.database.store import Database, use
from kda_tl.errors import DatabaseError, DeviceError


def find_here(name: str, args: argparse.Namespace, *, static: bool = False) -> Device:
    """The device of a name, which must be the one that is here; ``static``: the command has a ``--static``.

    Raises:
        InputError: no GPU of that name is known.
        DeviceError: it is another GPU, or there is none; the message names the commands that work.
    """
    if normalise_gpu_name(name) == "cpu":
        return cpu_device()
    here = current_device()
    if name == "auto" or normalise_gpu_name(name) == here.slug:
        return here
    slugs = resolve_gpu(name)
    if here.slug in slugs:
        return here
    asked = slugs[0] if len(slugs) == 1 else f"one of {', '.join(slugs)}"
    why = f"and {_why_no_gpu()}: use the CPU target," if here.kind == "cpu" else f"but the GPU here is {here.slug}: run"
    offer = f", or compile only: `{suggest(args, gpu=name, add='--static')}`" if static else ""
    raise DeviceError(f"--gpu {name} is {asked}, {why} `{suggest(args, gpu=here.slug)}`{offer}.")


def find_known(name: str) -> tuple[Device, ...]:
    """Every device a name stands for, here or not: for compiling and looking up.

    Raises InputError if no GPU of that name is known.
    """
    if normalise_gpu_name(name) == "cpu":
        return (cpu_device(),)
    here = current_device()
    if name == "auto" or normalise_gpu_name(name) == here.slug:
        return (here,)
    return tuple(known_device(slug) for slug in resolve_gpu(name))


def find_one_known(name: str, terminal: Terminal) -> Device:
    """One device of a name, the one here if it is among them; it is told if there was a choice."""
    devices, here = find_known(name), current_device()
    chosen = next((device for device in devices if device.slug == here.slug), devices[0])
    if others := ", ".join(device.slug for device in devices if device is not chosen):
        terminal.note(f"{name} is taken as {chosen.slug} (also: {others}).")
    return chosen


def load_directory(directory: str) -> Database:
    """The database of a directory given by the user. Raises DatabaseError if it is not a directory."""
    if not Path(directory).is_dir():
        raise DatabaseError(f"{directory} is not a directory: pass one that `kda-tl tune` wrote, or tuning_db/.")
    return Database.load(directory, directory)


def open_database(directory: str | None) -> contextlib.AbstractContextManager[object]:
    """Puts the database of a directory before all others, if one was given."""
    return contextlib.nullcontext() if directory is None else use(load_directory(directory))


def suggest(args: argparse.Namespace, *, gpu: str | None = None, add: str | None = None) -> str:
    """The command line that was given, with another GPU or one more option."""
    words = list(args.words)
    if gpu is not None:
        pairs = zip(["", *words], words, strict=False)  # each with the word before it
        words = [w for before, w in pairs if "--gpu" not in (before, w) and not w.startswith("--gpu=")]
        words[1:1] = ["--gpu", gpu]
    if add is not None and add not in words:
        words.append(add)
    return shlex.join(["kda-tl", *words])


def _why_no_gpu() -> str:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} here is built without CUDA"
    return "torch finds no GPU here"
