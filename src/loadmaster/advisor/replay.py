"""Many policies on the same streams of the published cluster: blocking, with intervals and bounds.

Recorded arrivals are in `replay_traces`; both give the same rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadmaster.advisor.bounds.ramp import least_blocking
from loadmaster.advisor.environments.engine import Cause, Kind, Outcome, Rule, replay, replay_many
from loadmaster.advisor.environments.profile import read_profiles
from loadmaster.advisor.environments.rules import COMPAT, FIXED
from loadmaster.advisor.environments.streams import DISTRIBUTIONS, Stream, draw_stream
from loadmaster.advisor.environments.world import World, build_world
from loadmaster.advisor.history import History, history_of_decisions
from loadmaster.advisor.prices import fit_prices
from loadmaster.core.errors import InputError
from loadmaster.core.run import ignore_progress

CONSTANTS = {f"const {k}": Rule(Kind.CONSTANT, k) for k in (2, 4, 6, 8, 16)}
BASELINES = {
    "Para_max": Rule(Kind.PARA_MAX),
    "Para_min": Rule(Kind.PARA_MIN),
    "Random": Rule(Kind.RANDOM),
    **CONSTANTS,
    "smallest": Rule(Kind.MEETS),
    "smallest >= 4": Rule(Kind.MEETS, 4),
    "best fit": Rule(Kind.BEST_FIT),
    "best fit >= 8": Rule(Kind.BEST_FIT, 8),
}
SELECTION_SEEDS = range(1000, 1005)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one set of streams; shares of the arrivals, 95 % intervals over seeds."""

    setting: str
    policy: str
    mean: float
    low: float
    high: float
    paired: float  # mean difference to the reference policy, and half its interval
    paired_half: float
    bound: float
    details: dict[str, float]
    details_half: dict[str, float]  # half of the 95 % interval of each
    history: dict[str, list[float]]  # over the time of a stream, mean over seeds

    def to_json(self) -> dict[str, object]:
        """Plain values; what is not known is null."""
        plain = asdict(self)
        for name, found in (("details_half", self.details_half), ("history", self.history)):
            plain[name] = {key: _finite(value) for key, value in found.items()}
        return plain


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return value if math.isfinite(value) else None


def make_row(
    setting: str,
    policy: str,
    share: NDArray[np.float64],
    reference: NDArray[np.float64],
    bound: float,
    details: dict[str, NDArray[np.float64]],
    histories: Sequence[History],
) -> Row:
    """Means and intervals over seeds; each detail has one value for each seed."""
    mean, half = interval(share)
    paired, paired_half = interval(share - reference)
    details = details | {
        "utilisation": np.array([h.utilisation for h in histories]),
        "fragmented": np.array([h.fragmented for h in histories]),
    }
    over_time = {
        name: np.nanmean([getattr(h, f"{name}_over_time") for h in histories], axis=0).tolist()
        for name in ("utilisation", "fragmented")
    }
    told = {name: interval(values) for name, values in details.items()}
    return Row(
        setting,
        policy,
        mean,
        mean - half,
        mean + half,
        paired,
        paired_half,
        bound,
        {name: found for name, (found, _) in told.items()},
        {name: found for name, (_, found) in told.items()},
        over_time,
    )


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and half of the 95 % interval over seeds (Student's t)."""
    if len(values) < 2:
        return float(values.mean()), math.inf
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(half)


def worlds(graphs: str | Path) -> dict[str, World]:
    """The published world, the corrected one (published end rule), and the published one without the leak."""
    jobs = read_profiles(graphs)
    return {
        "compat": build_world(jobs, COMPAT),
        "fixed": build_world(jobs, replace(FIXED, horizon_blocks=True), "fixed"),
        "own": build_world(jobs, replace(COMPAT, leak=False), "own"),
    }


def table_rules(world: World) -> dict[str, Rule]:
    """The rules of the tables; those that choose a block only where jobs stay inside it."""
    return {name: rule for name, rule in BASELINES.items() if not (rule.chooses_block and world.rules.leak)}


def rollout_rule(world: World, distribution: str, *, look: tuple[int, int] = (30, 20)) -> Rule:
    """The rollout over the base with least blocking on selection streams."""
    streams = [draw_stream(distribution, s, num_models=len(world.models)) for s in SELECTION_SEEDS]
    bases = [Rule(Kind.CONSTANT, 4), *(Rule(Kind.MEETS, k, go) for k in (1, 2, 4, 8) for go in (True, False))]
    if not world.rules.leak:
        bases = [Rule(Kind.BEST_FIT, k) for k in (1, 2, 4, 8)]
    counts = replay_many(world, streams, bases)
    best = int(np.argmin(counts[:, :, 1:5].sum(axis=(0, 2))))
    return replace(bases[best], rollout=look)


def price_rule(world: World, distribution: str) -> Rule:
    """The shadow-price rule with prices of selection streams; only where blocks may be chosen."""
    streams = [draw_stream(distribution, s, num_models=len(world.models)) for s in SELECTION_SEEDS]
    return fit_prices(world, streams)


def bench_ramp(
    world: World,
    seeds: Sequence[int],
    rules: Mapping[str, Rule | Callable[[str], Rule]] | None = None,
    *,
    distributions: Sequence[str] = DISTRIBUTIONS,
    poisson: bool = False,
    bounds: bool = True,
    deciders: Mapping[str, Callable[[list[Stream]], list[Outcome]]] | None = None,
    progress: Callable[[str, float], None] = ignore_progress,
) -> list[Row]:
    """Blocking of every rule; paired against the best constant of each distribution.

    A rule may be a function of the distribution; `deciders` are other policies, given whole streams.
    """
    if not len(seeds):
        raise InputError("no seeds; give at least one")
    chosen = table_rules(world) if rules is None else dict(rules)
    rows = []
    for d in distributions:
        streams = [draw_stream(d, seed, poisson=poisson, num_models=len(world.models)) for seed in seeds]
        found: dict[str, list[Outcome]] = {}
        for i, (name, given) in enumerate({**chosen, **CONSTANTS}.items()):
            progress(f"{d}: {name}", i / len(chosen))
            rule = given if isinstance(given, Rule) else given(d)
            found[name] = [replay(world, s, rule, seed=seed) for s, seed in zip(streams, seeds, strict=True)]
        for name, decide in (deciders or {}).items():
            found[name] = decide(streams)
        share = {name: np.array([o.blocking for o in outcomes]) for name, outcomes in found.items()}
        best = min(CONSTANTS, key=lambda name: share[name].mean())
        bound = float(np.mean([least_blocking(world, s).geometry for s in streams])) if bounds else 0.0
        for name in (*chosen, *(deciders or ())):
            details = {
                c.name.lower(): np.array([o.count(c) / len(o.cause) for o in found[name]])
                for c in (Cause.REJECTED, Cause.NO_BLOCK, Cause.LATE, Cause.HORIZON)
            }
            histories = [history_of_decisions(o) for o in found[name]]
            rows.append(make_row(d, name, share[name], share[best], bound, details, histories))
    return rows
