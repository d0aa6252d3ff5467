"""TAG's search: its space, its rows, and the published defects that can be played."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from loadmaster.core.errors import UnknownNameError
from loadmaster.core.run import Budget
from loadmaster.core.strategy import Mode, Sync
from loadmaster.graph.capture import capture
from loadmaster.strategies.ask import make_evaluator
from loadmaster.strategies.guide_choice import load_guide
from loadmaster.strategies.registry import make_search
from loadmaster.strategies.scoring.compat import COMPAT
from loadmaster.strategies.scoring.evaluator import Evaluator
from loadmaster.strategies.scoring.uniform_states import every_device, uniform_state
from loadmaster.strategies.search.tag_compat import TreeSearch
from loadmaster.strategies.search_run import SearchRun
from tests.unit.strategies.strategies import BATCH, MIXED_DEVICES, TWO_HOSTS, problem_for, wide_problem


def run_of(count: int = 300) -> SearchRun:
    return SearchRun(Budget(count=count), np.random.default_rng(0))


def with_compat(evaluator: Evaluator, *names: str) -> Evaluator:
    return Evaluator(
        evaluator.problem,
        evaluator.splits,
        evaluator.costs,
        evaluator.facts,
        evaluator.actions,
        compat=frozenset(names),
    )


def test_three_classes_give_every_subset_by_sum_server_and_placed() -> None:
    search = TreeSearch(make_evaluator(wide_problem(devices=MIXED_DEVICES), BATCH), run_of(), 10)
    subsets = {devices for devices, _ in search.moves}
    assert len(subsets) == 7
    # A subset of one device can only be placed.
    assert len(search.moves) == 3 * 7 - 2 * sum(len(s) == 1 for s in subsets)


def test_rows_are_equal_and_none_is_dropped() -> None:
    evaluator = make_evaluator(wide_problem(devices=MIXED_DEVICES), BATCH)
    for state in TreeSearch(evaluator, run_of(), 50).run_all():
        for devices, rows in state.rows.items():
            assert sum(rows) == BATCH
            assert max(rows) - min(rows) <= 1
            assert len(rows) == len(devices)


@pytest.mark.parametrize("batch", [5, 7, 11, 13])
def test_data_parallelism_trains_all_rows_of_a_batch_that_does_not_divide(batch: int) -> None:
    from tests.unit.strategies.models import wide_step

    evaluator = make_evaluator(problem_for(wide_step(batch, 64), TWO_HOSTS), batch)
    for name in ("data_parallel", "proportional"):
        state = make_search(name)(evaluator, run_of())[0]
        assert [sum(rows) for rows in state.rows.values()] == [batch]


def test_playouts_are_no_more_than_asked_for() -> None:
    search = TreeSearch(make_evaluator(wide_problem(), BATCH), run_of(10**6), 40)
    search.run_all()
    assert len(search.known) <= 41


def test_gradients_divided_by_replicas_flatter_data_parallelism() -> None:
    plain = make_evaluator(wide_problem(width=2048, devices=TWO_HOSTS), BATCH)
    flattered = with_compat(plain, "divide_gradients")
    state = uniform_state(plain, every_device(plain, "replicate", "allreduce"))
    rows = plain.rows_of(state, "even")
    honest, short = (e.replay(state, rows, frozenset()) for e in (plain, flattered))
    assert short.time_s < honest.time_s
    assert short.link_busy_s.max() < honest.link_busy_s.max()


def test_a_broadcast_for_each_consumer_makes_fewer_factors_worth_while() -> None:
    plain = make_evaluator(wide_problem(width=1024, devices=TWO_HOSTS), BATCH)
    dear = with_compat(plain, "broadcast_per_consumer")
    state = uniform_state(plain, every_device(plain, "replicate", "allreduce"))
    rows = plain.rows_of(state, "even")
    found = [e.factors_of(state, rows, 1.0) for e in (plain, dear)]
    assert found[1] < found[0]


def test_one_channel_lets_sums_on_other_links_wait() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    graph = capture(model, (torch.zeros(BATCH, 1024),), optimizer="sgd", loss=lambda out: out.square().mean())
    plain = make_evaluator(problem_for(graph, TWO_HOSTS), BATCH)
    pairs = [
        next(i for i, a in enumerate(plain.actions) if a.devices == pair and a.sync == Sync.ALLREDUCE)
        for pair in ((0, 1), (2, 3))
    ]
    state = tuple(pairs[g % 2] for g in range(plain.facts.num_groups))
    rows = plain.rows_of(state, "even")
    honest, waiting = (e.replay(state, rows, frozenset()) for e in (plain, with_compat(plain, "one_channel")))
    assert waiting.time_s > honest.time_s


def test_the_time_of_all_rows_as_a_cost_makes_fewer_factors_worth_while() -> None:
    plain = make_evaluator(wide_problem(width=1024, devices=TWO_HOSTS), BATCH)
    state = uniform_state(plain, every_device(plain, "replicate", "allreduce"))
    rows, fewer = plain.rows_of(state, "even"), 0
    for rate in np.geomspace(1e9, 1e12, 20).tolist():
        found = []
        for evaluator in (with_compat(plain), with_compat(plain, "full_batch_time")):
            speeds = tuple(tuple(rate for _ in row) for row in evaluator.wires.bytes_per_s)
            evaluator.wires = dataclasses.replace(evaluator.wires, bytes_per_s=speeds)
            found.append(evaluator.factors_of(state, rows, 1.0))
        assert found[1] <= found[0]
        fewer += found[1] < found[0]
    assert fewer


def test_rows_that_do_not_divide_are_left_out_on_demand() -> None:
    plain = make_evaluator(wide_problem(devices="5xV100-16GB"), BATCH)  # 12 rows
    state = uniform_state(plain, every_device(plain, "replicate", "allreduce"))
    kept, left = (e.rows_of(state, "even") for e in (plain, with_compat(plain, "drop_rows")))
    assert [sum(rows) for rows in kept.values()] == [12]
    assert [sum(rows) for rows in left.values()] == [10]
    times = [
        e.replay(state, rows, frozenset()).time_s
        for e, rows in ((plain, kept), (with_compat(plain, "drop_rows"), left))
    ]
    assert times[1] < times[0]


def test_features_of_the_published_code_are_blind() -> None:
    pytest.importorskip("safetensors")
    from loadmaster.strategies.learned.features import make_record, make_states

    plain = make_evaluator(wide_problem(width=512, devices=TWO_HOSTS), BATCH)
    blind = with_compat(plain, "zero_edges", "whole_utilisation")
    state = plain.evaluate(uniform_state(plain, 0))
    seen, unseen = (make_record(e) for e in (plain, blind))
    assert seen.before.any()
    assert not unseen.before.any()
    shown, hidden = (make_states(record, [()], state).device[0, :, 0] for record in (seen, unseen))
    assert ((shown > 0) & (shown < 1)).any()
    assert set(hidden.tolist()) <= {0.0, 1.0}


def test_a_network_changes_which_states_are_played() -> None:
    pytest.importorskip("safetensors")
    found = {}
    for name in ("none", "shipped"):
        evaluator = make_evaluator(wide_problem(width=512, devices=MIXED_DEVICES), BATCH)
        search = TreeSearch(evaluator, run_of(), 30, load_guide(name))
        search.run_all()
        found[name] = list(search.known)
    assert found["none"] != found["shipped"]


@pytest.mark.parametrize("name", COMPAT)
def test_a_switch_may_be_asked_for_by_name(name: str) -> None:
    evaluator = make_evaluator(wide_problem(), BATCH)
    assert make_search("tag_compat", compat=(name,), playouts=20)(evaluator, run_of())


def test_an_unknown_switch_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="divide_gradients"):
        with_compat(make_evaluator(wide_problem(), BATCH), "divide_gradient")


def test_a_group_that_is_placed_goes_to_the_least_loaded_device() -> None:
    evaluator = make_evaluator(wide_problem(devices="4xV100-16GB"), BATCH)
    search = TreeSearch(evaluator, run_of(), 5)
    placed = max(range(len(search.moves)), key=lambda m: (len(search.moves[m][0]), search.moves[m][1] == -1))
    state = search._state((placed,) * evaluator.facts.num_groups)
    assert {evaluator.actions[a].mode for a in state} == {Mode.PLACE}
    assert len(set(state)) > 1
