"""Gymnasium's checker, masks against brute force, batches against single replays, learned policies,
bounds."""

import numpy as np
import pytest

from loadmaster.advisor.environments.batched import BatchedRamp
from loadmaster.advisor.environments.engine import Cause, Kind, Rule, replay
from loadmaster.advisor.environments.streams import DISTRIBUTIONS, draw_stream
from loadmaster.advisor.policies.registry import policy
from loadmaster.advisor.replay import table_rules
from loadmaster.core.errors import InputError
from tests.advisor.plain_ramp import ALL, BLOCKS, play
from tests.advisor.shared import GRAPHS, needs_graphs, profiles, world


@needs_graphs
@pytest.mark.parametrize("joint", [False, True])
def test_gymnasiums_checker_passes(joint: bool) -> None:
    from gymnasium.utils.env_checker import check_env

    from loadmaster.advisor.environments.gym_env import RampEnv

    env = RampEnv(world("own" if joint else "fixed"), "C", joint=joint)
    check_env(env, skip_render_check=True)
    first = [env.reset(seed=9)[0].tolist() for _ in range(2)]
    assert first[0] == first[1]


@needs_graphs
def test_the_mask_offers_exactly_what_can_be_placed_in_time() -> None:
    w = world("fixed")
    stream = draw_stream("A", 77)
    batch = BatchedRamp(w, [stream], joint=True)
    _, mask = batch.reset()
    rng = np.random.default_rng(2)
    running: list[tuple[float, set[int]]] = []
    members = [{ALL.index(m) for m in one} for k in (1, 2, 4, 6, 8, 16) for _, one in BLOCKS[k]]
    for j in range(120):
        now = stream.arrival[j]
        running = [(end, held) for end, held in running if end > now + 1e-7]
        busy = set().union(*(held for _, held in running)) if running else set()
        limit = stream.beta[j] * w.sequential[stream.model[j]] * (1 + 1e-9)
        feasible = [
            not (block & busy) and w.jct[stream.model[j], b] <= limit for b, block in enumerate(members)
        ]
        assert mask[0, 1:].tolist() == feasible
        assert mask[0, 0]
        action = int(rng.choice(np.flatnonzero(mask[0])))
        if action:
            running.append((now + w.jct[stream.model[j], action - 1], members[action - 1]))
        _, mask, accepted = batch.step(np.array([action]))
        assert accepted[0] == (action > 0)


@needs_graphs
def test_a_batch_accepts_what_single_replays_accept() -> None:
    w = world("compat")
    streams = [draw_stream("A", s) for s in (1, 2, 3)]
    batch = BatchedRamp(w, streams)
    _, mask = batch.reset()
    total = np.zeros(3)
    while not batch.done:
        _, mask, accepted = batch.step(np.where(mask[:, 3], 3, 0))
        total += accepted
    expected = [1000 - replay(w, s, Rule(Kind.CONSTANT, 4)).num_blocked for s in streams]
    assert total.tolist() == expected


@needs_graphs
def test_blocks_cannot_be_chosen_where_jobs_leak() -> None:
    with pytest.raises(InputError, match="without the leak"):
        BatchedRamp(world("compat"), [draw_stream("A", 1)], joint=True)


@needs_graphs
@pytest.mark.parametrize("name", ["compat", "own", "fixed"])
def test_no_policy_blocks_less_than_the_bounds(name: str) -> None:
    from loadmaster.advisor.bounds.ramp import least_blocking

    for d, poisson in zip(DISTRIBUTIONS, (False, True, False, True), strict=True):
        stream = draw_stream(d, 31, poisson=poisson)
        bound = least_blocking(world(name), stream)
        assert bound.shared_time <= bound.every_moment <= bound.geometry
        rules = [*table_rules(world(name)).values(), Rule(Kind.MEETS, 4, rollout=(10, 5))]
        assert bound.geometry <= min(replay(world(name), stream, rule).blocking for rule in rules) + 1e-9


@pytest.mark.slow
def test_no_packing_of_blocks_holds_more_quarters_than_the_bound_allows() -> None:
    from ortools.sat.python import cp_model

    from loadmaster.advisor.bounds.ramp import _MOST_QUARTERS, _QUARTERS

    model, taken, worth = cp_model.CpModel(), [], []
    members: list[set[int]] = []
    for k, degree in enumerate(BLOCKS):
        for _, block in BLOCKS[degree]:
            taken.append(model.new_bool_var(""))
            worth.append(_QUARTERS[k])
            members.append({ALL.index(m) for m in block})
    for server in range(len(ALL)):
        model.add_at_most_one(x for x, block in zip(taken, members, strict=True) if server in block)
    model.maximize(sum(w * x for w, x in zip(worth, taken, strict=True)))
    solver = cp_model.CpSolver()
    assert solver.solve(model) == cp_model.OPTIMAL
    assert solver.objective_value == _MOST_QUARTERS


@needs_graphs
@pytest.mark.slow
@pytest.mark.parametrize("name", ["compat", "own"])
def test_answers_found_in_hindsight_lie_between_the_bound_and_every_rule(name: str) -> None:
    from loadmaster.advisor.bounds.hindsight import best_found
    from loadmaster.advisor.bounds.ramp import least_blocking

    w, stream = world(name), draw_stream("A", 32)
    rules = list(table_rules(w).values())
    found, again = (best_found(w, stream, rules, tries=2000, seed=5) for _ in range(2))
    least = min(replay(w, stream, rule, seed=5).num_blocked for rule in rules)
    assert found.num_blocked <= least - 5 * (name == "compat")
    assert found.blocking >= least_blocking(w, stream).geometry
    assert (found.cause == again.cause).all()


@needs_graphs
def test_a_rollout_beats_its_base_on_the_same_streams() -> None:
    streams = [draw_stream("A", s) for s in range(60, 64)]
    base = Rule(Kind.MEETS, 4, False)
    look = Rule(Kind.MEETS, 4, False, rollout=(30, 20))
    blocking = [[replay(world("compat"), s, r).blocking for s in streams] for r in (base, look)]
    assert np.mean(blocking[1]) < np.mean(blocking[0]) - 0.01


@needs_graphs
@pytest.mark.slow
def test_a_short_training_beats_random_and_repeats(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from loadmaster.advisor.learned.networks import load_network
    from loadmaster.advisor.learned.training import TrainSettings, evaluate, train_policy

    w = world("fixed")
    settings = TrainSettings(iterations=1, imitate=1, streams=4, steps=100)
    files = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for file in files:
        train_policy(w, settings, out=file)
    assert files[0].read_bytes() == files[1].read_bytes()
    streams = [draw_stream("A", s) for s in range(7000, 7006)]
    network, _ = load_network(files[0], world="fixed", num_actions=7)
    random = [replay(w, s, Rule(Kind.RANDOM)).blocking for s in streams]
    assert evaluate(network, w, streams).mean() < np.mean(random) - 0.05
    with pytest.raises(InputError, match="was trained for fixed with 7 actions"):
        load_network(files[0], world="compat", num_actions=7)


@needs_graphs
@pytest.mark.slow
@pytest.mark.parametrize("network", ["graph", "pacml"])
def test_networks_that_read_job_graphs_train(tmp_path, network: str) -> None:  # type: ignore[no-untyped-def]
    from loadmaster.advisor.bench import learned_decider
    from loadmaster.advisor.learned.training import TrainSettings, train_policy

    settings = TrainSettings(network=network, iterations=2, imitate=2, streams=4, steps=100)
    result = train_policy(world("fixed"), settings, graphs=GRAPHS, out=tmp_path / "g.safetensors")
    assert result["blocking"] < 0.529
    outcome = learned_decider(tmp_path / "g.safetensors", world("fixed"), GRAPHS)([draw_stream("A", 1001)])[0]
    assert outcome.blocking < 0.529


@needs_graphs
def test_the_published_network_does_not_see_which_servers_are_free() -> None:
    import torch

    from loadmaster.advisor.learned.networks import Spec, make_network

    torch.manual_seed(0)
    networks = {
        name: make_network(Spec(name, "fixed", 7, "A"), profiles()) for name in ("mlp", "graph", "pacml")
    }
    batch = BatchedRamp(world("fixed"), [draw_stream("A", s) for s in range(4)])
    seen, mask, _ = batch.step(np.full(4, 3))
    other = seen.copy()
    other[:, 18:50] = other[:, 18:50][:, ::-1]  # other servers are taken, and until other times
    for name, network in networks.items():
        with torch.no_grad():
            one, two = (
                network(torch.as_tensor(s), torch.as_tensor(mask), torch.as_tensor(batch.model.copy()))[1]
                for s in (seen, other)
            )
        assert torch.equal(one, two) == (name == "pacml")


def _group_settings(ray: bool) -> object:
    from loadmaster.advisor.learned.training import TrainSettings

    return TrainSettings(
        iterations=2, imitate=0, streams=4, steps=40, workers=2, ray=ray, joint=True, minibatch=80
    )


@needs_graphs
@pytest.mark.slow
def test_training_over_ray_gives_the_same_weights_as_here(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("ray")
    from loadmaster.advisor.learned.training import train_policy

    files = [tmp_path / f"{ray}.safetensors" for ray in (False, True)]
    for file, ray in zip(files, (False, True), strict=True):
        train_policy(world("fixed"), _group_settings(ray), out=file)  # type: ignore[arg-type]
    assert files[0].read_bytes() == files[1].read_bytes()


@needs_graphs
def test_more_workers_than_streams_are_refused() -> None:
    from loadmaster.advisor.learned.training import TrainSettings

    with pytest.raises(InputError, match="5 workers share 4 streams"):
        TrainSettings(streams=4, workers=5)


@needs_graphs
def test_given_blocks_are_replayed_as_they_were_chosen() -> None:
    w, stream = world("own"), draw_stream("A", 9)
    chosen = replay(w, stream, Rule(Kind.BEST_FIT, 4))
    again = replay(w, stream, Rule(Kind.GIVEN_BLOCK), given=chosen.block.astype(np.int64))
    assert (again.block == chosen.block).all()
    assert again.num_blocked == chosen.num_blocked
    with pytest.raises(InputError, match="without the leak"):
        replay(world("compat"), stream, Rule(Kind.BEST_FIT, 4))


@needs_graphs
def test_the_shipped_policy_chooses_alike_alone_and_in_a_batch_and_beats_best_fit() -> None:
    from loadmaster.advisor.bench import learned_decider
    from loadmaster.advisor.policies.learned import _SHIPPED

    w, streams = world("fixed"), [draw_stream("A", s) for s in (6000, 6001, 6002, 6003)]
    outcomes = learned_decider(_SHIPPED, w, GRAPHS)(streams)
    alone = play(w, streams[0], policy("learned"), 60)
    assert [word == "accepted" for word, _, _ in alone] == (outcomes[0].cause[:60] == Cause.ACCEPTED).tolist()
    assert [degree for _, degree, _ in alone] == outcomes[0].degree[:60].tolist()
    best_fit = np.mean([replay(w, s, Rule(Kind.BEST_FIT)).blocking for s in streams])
    assert np.mean([outcome.blocking for outcome in outcomes]) < best_fit - 0.01
