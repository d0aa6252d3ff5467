"""HSDAG: parsing, features, rewards, and where the published code differs from the paper."""

from typing import Any

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.errors import InputError
from loadmaster.placers.learned._groups import group_problem
from loadmaster.placers.learned._hsdag_features import make_hsdag_graph
from loadmaster.placers.registry import placer
from tests.builders import chain, diamond, problem_of, star_cluster
from tests.conformance.problems import fork_join, small_diamond, tight_memory

torch = pytest.importorskip("torch", reason="hsdag needs the extra [torch]")

from loadmaster.placers.learned._hsdag_network import keep_best_edges  # noqa: E402
from loadmaster.placers.learned._hsdag_search import HsdagSearch  # noqa: E402
from loadmaster.placers.learned.hsdag import Hsdag  # noqa: E402


def search_of(problem: Any, seed: int = 0, **settings: Any) -> HsdagSearch:
    return HsdagSearch(problem, group_problem(problem), Hsdag(width=16, **settings), seed)


class TestParsing:
    """Every node keeps its best edge; connected pieces are groups."""

    def test_groups_are_the_pieces_of_best_edges(self) -> None:
        source, target = np.array([0, 1, 2, 3]), np.array([1, 2, 3, 4])
        group, inner = keep_best_edges(5, source, target, np.array([0.9, 0.1, 0.8, 0.7]))
        assert group.tolist() == [0, 0, 1, 1, 1]
        assert inner.tolist() == [True, False, True, True]

    def test_against_a_plain_count_of_pieces(self) -> None:
        import networkx

        rng = np.random.default_rng(0)
        for _ in range(20):
            pairs = {
                tuple(sorted(pair)) for pair in rng.integers(0, 12, (25, 2)).tolist() if pair[0] != pair[1]
            }
            source, target = (np.array(end) for end in zip(*sorted(pairs), strict=True))
            score = rng.random(len(source))
            kept = networkx.Graph()
            kept.add_nodes_from(range(12))
            for node in range(12):
                own = [e for e in range(len(source)) if node in (source[e], target[e])]
                if own:
                    best = max(own, key=lambda e: score[e])
                    kept.add_edge(int(source[best]), int(target[best]))
            group, _ = keep_best_edges(12, source, target, score)
            pieces = {frozenset(np.flatnonzero(group == g).tolist()) for g in set(group.tolist())}
            assert pieces == {frozenset(piece) for piece in networkx.connected_components(kept)}

    def test_one_pass_leaves_groups_to_choose_from_and_the_coded_fixed_point_leaves_one(self) -> None:
        """Every node with an edge merges in every pass, so a connected graph ends as one group."""
        problem = fork_join()
        once, coded = search_of(problem), search_of(problem, as_coded=True)
        rng = np.random.default_rng(0)
        once.propose(rng)
        coded.propose(rng)
        assert once.num_groups >= 4 * 4
        assert coded.num_groups == 1


class TestFeatures:
    """What the paper lists, and what its code leaves."""

    def test_chains_merge(self) -> None:
        problem = problem_of(chain(6), star_cluster(2), 1.0)
        graph = make_hsdag_graph(problem, group_problem(problem), merge_chains=True, as_coded=False)
        assert graph.num == 1
        apart = make_hsdag_graph(problem, group_problem(problem), merge_chains=False, as_coded=False)
        assert apart.num == 6

    def test_a_diamond_does_not(self) -> None:
        problem = problem_of(diamond(), star_cluster(2), 1.0)
        graph = make_hsdag_graph(problem, group_problem(problem), merge_chains=True, as_coded=False)
        assert graph.num == 4

    def test_as_coded_only_types_and_an_index_are_left(self) -> None:
        problem = fork_join()
        groups = group_problem(problem)
        text = make_hsdag_graph(problem, groups, merge_chains=True, as_coded=False)
        code = make_hsdag_graph(problem, groups, merge_chains=True, as_coded=True)
        kinds = len(set(problem.graph.op_kind))
        assert code.features.shape[1] == kinds + 1
        assert text.features.shape[1] > kinds + 20
        assert np.isfinite(text.features).all()


class TestLearning:
    """Rewards, masks and seeds."""

    def test_a_policy_learns_which_device_is_fast(self) -> None:
        search = search_of(problem_of(diamond(0), star_cluster(2), 1.0), learning_rate=0.02)
        rng = np.random.default_rng(0)
        taken = []
        for _ in range(300):
            rows = search.propose(rng)
            taken.append(float((rows == 1).mean()))
            search.observe(rows, np.array([1.0 + float((rows == 0).sum())]))
        assert np.mean(taken[-40:]) > np.mean(taken[:40]) + 0.2

    def test_the_unit_of_time_changes_nothing(self) -> None:
        """1 / latency in milliseconds is in the hundreds: the step size would follow the unit."""
        rows = []
        for unit in (1.0, 1e-3):
            search, rng = search_of(small_diamond(), steps=5), np.random.default_rng(0)
            for at in range(15):
                row = search.propose(rng)
                search.observe(row, np.array([unit * (1.0 + at % 3)]))
            rows.append(search.propose(rng))
        assert (rows[0] == rows[1]).all()

    def test_one_device_may_be_the_answer_unless_as_coded(self) -> None:
        problem = problem_of(chain(4, 100), star_cluster(2), 1.0)
        found = api.plan(problem, algorithm=Hsdag(width=16, merge_chains=False), budget="80x")
        assert found.plan is not None
        assert len(set(found.plan.device.tolist())) == 1
        search = search_of(small_diamond(), as_coded=True)
        search.reference_s = 1.0
        search.observe(np.zeros((1, 4), dtype=np.int32), np.array([1.0]))
        assert search.rewards == [pytest.approx(1e-10)]

    def test_room_is_kept_while_sampling(self) -> None:
        problem = tight_memory()
        search, rng = search_of(problem), np.random.default_rng(0)
        for _ in range(60):
            (row,) = search.propose(rng)
            held = np.bincount(row, search.groups.cargo.held_bytes, 2)
            assert (held <= search.groups.room_bytes).all()
            search.observe(row[None], np.array([1.0]))

    def test_a_failed_plan_is_worth_nothing_and_the_search_goes_on(self) -> None:
        search, rng = search_of(small_diamond(), steps=4), np.random.default_rng(0)
        for at in range(9):
            rows = search.propose(rng)
            search.observe(rows, np.array([np.inf if at % 2 else 2.0]))
        assert all(torch.isfinite(value).all() for value in search.network.state_dict().values())

    def test_the_same_seed_gives_the_same_plans_to_the_bit(self) -> None:
        for settings in ({}, {"as_coded": True}):
            algorithm = placer("hsdag", width=16, steps=5, finish=0.0, **settings)
            found = [
                api.plan(fork_join(), algorithm=algorithm, budget="25x", seed=seed) for seed in (3, 3, 4)
            ]
            digests = [(one.plan or one.least_overflow_plan).digest for one in found]  # type: ignore[union-attr]
            assert digests[0] == digests[1]
            assert digests[0] != digests[2]

    def test_settings_that_make_no_search_are_refused(self) -> None:
        for wrong in ({"steps": 0}, {"passes": 0}, {"dropout": 1.0}, {"finish": -0.1}):
            with pytest.raises(InputError):
                Hsdag(**wrong)  # type: ignore[arg-type]


def test_a_plan_does_not_depend_on_the_number_of_threads_of_the_caller() -> None:
    problem = api.problem("gen:transformer:300", "V100-16GB, T4, cpu-64GB")
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(api.plan(problem, algorithm="hsdag", budget="200x").score_s)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
