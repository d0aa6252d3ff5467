"""Benchmarks by name: tables of the published cluster, and of all cells of recorded arrivals."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from loadmaster.advisor.environments.engine import Outcome, Rule
from loadmaster.advisor.environments.streams import Stream
from loadmaster.advisor.environments.trace import DEADLINES, read_throughputs, read_trace
from loadmaster.advisor.environments.world import World
from loadmaster.advisor.replay import Row, bench_ramp, price_rule, rollout_rule, table_rules, worlds
from loadmaster.advisor.replay_traces import TRACE_RULES, bench_trace, trace_rules
from loadmaster.core.errors import FileError, UnknownNameError
from loadmaster.core.run import ignore_progress

WORLDS = ("compat", "fixed", "own")
THROUGHPUTS = "simulation_throughputs.json"
CELLS = {  # devices for load 0.7, 0.95 and 1.4; the smallest trace asks for 0.3 of a device on the average
    "51b7ef.trace": (4, 2, 1),
    "2869ce.trace": (12, 9, 6),
    "0e4a51.trace": (64, 48, 32),
}
_SMALL_HOSTS = 32  # below it a host has 4 devices, else 8


def bench_world(
    world: str,
    graphs: str | Path,
    seeds: Sequence[int],
    names: Sequence[str] | None = None,
    *,
    weights: str | Path | None = None,
    poisson: bool = False,
    progress: Callable[[str, float], None] = ignore_progress,
) -> list[Row]:
    """Rows of the table rules, of rollout and shadow_price where asked, and of a learned policy."""
    made = worlds(graphs)[world]
    known: dict[str, Rule | Callable[[str], Rule]] = dict(table_rules(made))
    known["rollout"] = partial(rollout_rule, made)
    if not made.rules.leak:
        known["shadow_price"] = partial(price_rule, made)
    wanted = [name for name in known if name != "rollout"] if names is None else names
    for name in wanted:
        if name not in known:
            raise UnknownNameError(f"policy of world {world}", name, known)
    deciders = {} if weights is None else {"learned": learned_decider(weights, made, graphs)}
    rules = {name: known[name] for name in wanted}
    return bench_ramp(made, seeds, rules, poisson=poisson, deciders=deciders, progress=progress)


def learned_decider(
    weights: str | Path, world: World, graphs: str | Path
) -> Callable[[list[Stream]], list[Outcome]]:
    """Decides whole streams with trained weights."""
    from loadmaster.advisor.environments.profile import read_profiles
    from loadmaster.advisor.learned.networks import load_network
    from loadmaster.advisor.learned.training import decide

    network, spec = load_network(weights, world=world.name, graphs=read_profiles(graphs))
    joint = spec.num_actions == 1 + len(world.blocks.mask)
    return lambda streams: decide(network, world, streams, joint=joint)


def bench_real(
    folder: str | Path,
    seeds: Sequence[int],
    names: Sequence[str] | None = None,
    *,
    progress: Callable[[str, float], None] = ignore_progress,
) -> list[Row]:
    """Every cell of trace, deadlines, load, rigid and elastic; traces of other names on 32, 48 and 64."""
    place = Path(folder)
    rates = read_throughputs(place / THROUGHPUTS)
    files = sorted(place.glob("*.trace"))
    if not files:
        raise FileError(f"{folder} has no *.trace")
    chosen = [file for file in files if file.name in CELLS] or files
    rules = trace_rules(list(TRACE_RULES) if names is None else names)
    rows = []
    for file in chosen:
        trace = read_trace(file)
        for deadline in DEADLINES:
            for size in CELLS.get(file.name, (64, 48, 32)):
                for elastic in (False, True):
                    rows += bench_trace(
                        trace,
                        rates,
                        size,
                        seeds,
                        rules,
                        deadline=deadline,
                        elastic=elastic,
                        per_host=hosts_of(size),
                        name=file.name,
                        progress=progress,
                    )
    return rows


def hosts_of(num_devices: int) -> int:
    """Devices of a host: a small cluster has small ones."""
    return 4 if num_devices < _SMALL_HOSTS else 8
