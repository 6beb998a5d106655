"""The guides: links lead somewhere, commands exist, README's example runs, and its table says what the code does."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from kda_tl.cli import main
from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.core.problem import DTYPES, GATES, Problem
from kda_tl.database.gpus import known_device, resolve_gpu
from kda_tl.database.store import load_database
from kda_tl.errors import InputError
from kda_tl.ops import load_all
from kda_tl.runtime.dispatch import default_plan
from kda_tl.templates.pipelines import PIPELINES
