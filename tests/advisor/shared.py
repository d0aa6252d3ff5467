"""Public data beside the repository, and worlds made of it once."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from loadmaster.advisor.environments.profile import JobGraph, read_profiles
from loadmaster.advisor.environments.rules import COMPAT, FIXED
from loadmaster.advisor.environments.world import World, build_world

SHARED = Path(__file__).resolve().parents[3] / "shared"
GRAPHS = SHARED / "graphs" / "pipedream"
GAVEL = SHARED / "traces" / "gavel"
needs_graphs = pytest.mark.skipif(
    not GRAPHS.is_dir(), reason="PipeDream's profiles are not beside the repository"
)
needs_traces = pytest.mark.skipif(not GAVEL.is_dir(), reason="Gavel's traces are not beside the repository")


@cache
def profiles() -> tuple[JobGraph, ...]:
    return read_profiles(GRAPHS)


@cache
def world(name: str) -> World:
    rules = {
        "compat": COMPAT,
        "own": replace(COMPAT, leak=False),
        "fixed": replace(FIXED, horizon_blocks=True),
        "drained": FIXED,
    }
    return build_world(profiles(), rules[name], name)
