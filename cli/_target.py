"""Which device ``--gpu`` means: one that is here, to measure on, or any known one, to compile and look up for."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from kda_tl.core.device import Device, cpu_device, current_device, normalise_gpu_name
from kda_tl.database.gpus import known_device, resolve_gpu
from kda_tl.errors import DeviceError, InputError


def add_gpu_argument(parser: argparse.ArgumentParser, default: str = "auto") -> None:
    """Declares ``--gpu``."""
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        default=default,
        help=f"auto (the GPU here, else the CPU), cpu, h100, h200, ..., or a product's slug (default: {default})",
    )


def find_here(name: str, args: argparse.Namespace, *, static: bool = False) -> Device:
    """The device of a name, which must be the one that is here.

    Args:
        name: value of ``--gpu``.
        args: the parsed arguments, for the command that would work.
        static: the command has a ``--static`` that needs no GPU.

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
    offer = f", or compile only: `{suggest(args, gpu=name, add='--static')}`" if static else ""
    asked = slugs[0] if len(slugs) == 1 else f"one of {', '.join(slugs)}"
    if here.kind == "cpu":
        raise DeviceError(
            f"--gpu {name} is {asked}, and {_why_no_gpu()}: use the CPU target, `{suggest(args, gpu='cpu')}`{offer}."
        )
    raise DeviceError(
        f"--gpu {name} is {asked}, but the GPU here is {here.slug}: run `{suggest(args, gpu=here.slug)}`{offer}."
    )


def find_known(name: str) -> tuple[Device, ...]:
    """Every device a name stands for, here or not: for compiling and looking up.

    Raises:
        InputError: no GPU of that name is known.
    """
    if normalise_gpu_name(name) == "cpu":
        return (cpu_device(),)
    if name == "auto":
        return (current_device(),)
    try:
        slugs: Sequence[str] = resolve_gpu(name)
    except InputError:
        here = current_device()
        if normalise_gpu_name(name) == here.slug:
            return (here,)
        raise
    return tuple(known_device(slug) for slug in slugs)


def find_one_known(name: str) -> tuple[Device, str | None]:
    """One device of a name, the one here if it is among them, and a note if there was a choice."""
    devices = find_known(name)
    if len(devices) == 1:
        return devices[0], None
    here = current_device()
    chosen = next((device for device in devices if device.slug == here.slug), devices[0])
    others = ", ".join(device.slug for device in devices if device is not chosen)
    return chosen, f"{name} is taken as {chosen.slug} (also: {others})."


def suggest(args: argparse.Namespace, *, gpu: str | None = None, add: str | None = None) -> str:
    """The command line that was given, with another GPU or one more option."""
    words = list(args.words)
    if gpu is not None:
        words = _without(words, "--gpu")
        words[1:1] = ["--gpu", gpu]
    if add is not None and add not in words:
        words.append(add)
    return shlex.join(["kda-tl", *words])


def _without(words: list[str], option: str) -> list[str]:
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == option:
            skip = True
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept


def _why_no_gpu() -> str:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} here is built without CUDA"
    return "torch finds no GPU here"
