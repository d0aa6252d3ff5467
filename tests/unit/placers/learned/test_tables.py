"""Cross-entropy and Post: the closed form, both surrogates, the sampler's rules, the traps of the field."""

from dataclasses import replace

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.errors import InputError
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Problem, Split
from loadmaster.core.run import Bound, Budget, Run, Score
from loadmaster.placers.answer import Tally
from loadmaster.placers.learned._groups import group_problem
from loadmaster.placers.learned._levels import count_levels
from loadmaster.placers.learned._searcher import Climb, run_searcher
from loadmaster.placers.learned._table import TableSearch, TableSettings, advantages, ascend
from loadmaster.placers.learned.cross_entropy import CrossEntropy
from loadmaster.placers.learned.post import Post
from loadmaster.placers.registry import placer
from loadmaster.simulator.events.engine import prepare
from tests.builders import chain, loose_ops, problem_of, star_cluster
from tests.conformance.problems import pinned_ops, pipeline, tight_memory, too_large, unsupported_ops


def loose(num: int = 6, devices: int = 2) -> Problem:
    return problem_of(loose_ops(num), star_cluster(devices), [float(1 + i) for i in range(num)])


def run_of(problem: Problem, count: int, seed: int = 0) -> Run:
    simulator = prepare(problem)
    return Run(
        budget=Budget(count=count),
        rng=np.random.default_rng(seed),
        score=simulator.score,
        arrange=simulator.order_and_score,
        bound=Bound(0.0, "none"),
    )


class TestCrossEntropyStep:
    """The minimiser of the divergence to the elite has a closed form."""

    def test_the_table_is_the_share_of_each_device_among_the_elite(self) -> None:
        groups = group_problem(loose(3))
        search = TableSearch(groups, TableSettings(elite=0.5, period=4, mixing=0.2), budget=100)
        rows = np.array([[0, 0, 1], [0, 1, 1], [1, 1, 0], [1, 1, 1]], dtype=np.int32)
        search.observe(rows, np.array([1.0, 2.0, 3.0, 4.0]))  # the elite: the first two rows
        share = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
        assert np.allclose(search.probability, 0.8 * share + 0.2 * 0.5)

    def test_it_minimises_the_divergence_among_nearby_tables(self) -> None:
        """The likelihood of the elite under the closed form is the greatest there is."""
        groups = group_problem(loose(4))
        rng = np.random.default_rng(1)
        rows = rng.integers(0, 2, (40, 4)).astype(np.int32)
        search = TableSearch(groups, TableSettings(elite=1.0, period=40, mixing=1e-12), budget=100)
        search.observe(rows, rng.random(40))

        def likelihood(table: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
            return float(np.log(table[np.arange(4)[None], rows]).sum())

        best = likelihood(search.probability)
        for _ in range(50):
            shifted = np.clip(search.probability + rng.normal(0, 0.05, (4, 1)) * [[1, -1]], 1e-6, 1.0)
            assert likelihood(shifted / shifted.sum(axis=1, keepdims=True)) <= best + 1e-9

    def test_mixing_keeps_every_device_possible(self) -> None:
        """Without it a table freezes: a device that the elite never used can never be drawn again."""
        groups = group_problem(loose(4))
        search = TableSearch(groups, TableSettings(period=4), budget=100)
        search.observe(np.zeros((4, 4), dtype=np.int32), np.ones(4))
        assert (search.probability > 0).all()
        assert search.mixing == pytest.approx(2 / 4)

    def test_the_period_follows_the_budget(self) -> None:
        groups = group_problem(loose())
        assert TableSearch(groups, TableSettings(), budget=500).period == 50
        assert TableSearch(groups, TableSettings(), budget=2400).period == 100

    def test_a_round_that_the_budget_cuts_short_teaches_nothing_wrong(self) -> None:
        groups = group_problem(loose())
        search = TableSearch(groups, TableSettings(), budget=10)
        before = search.probability.copy()
        search.observe(search.propose(np.random.default_rng(0))[:7], np.arange(7.0))
        assert (search.probability == before).all()


class TestSurrogates:
    """Both forms move towards what was better than the mean, and not by the unit of time."""

    @pytest.mark.parametrize("form", ["clipped", "kl"])
    @pytest.mark.parametrize("ratio", ["joint", "group"])
    def test_the_better_device_gains(self, form: str, ratio: str) -> None:
        table = np.full((1, 2), 0.5)
        rows = np.array([[0], [0], [1], [1]], dtype=np.int32)
        after = ascend(table, rows, np.array([1.0, 1.0, 2.0, 2.0]), TableSettings(ppo=form, ratio=ratio))
        assert after[0, 0] > 0.5
        assert after.sum() == pytest.approx(1.0)

    @pytest.mark.parametrize("form", ["clipped", "kl"])
    def test_milliseconds_and_seconds_learn_alike(self, form: str) -> None:
        """The published reward 1 / latency makes the step size a matter of the unit."""
        rng = np.random.default_rng(0)
        table, rows, times = (
            np.full((5, 3), 1 / 3),
            rng.integers(0, 3, (10, 5)).astype(np.int32),
            rng.random(10),
        )
        one = ascend(table, rows, times, TableSettings(ppo=form))
        other = ascend(table, rows, 1000.0 * times, TableSettings(ppo=form))
        assert np.allclose(one, other, rtol=1e-12)

    def test_the_first_step_is_the_gradient_of_the_surrogate(self) -> None:
        """Against differences of the surrogate itself, in logits."""
        rng = np.random.default_rng(3)
        table = rng.dirichlet(np.ones(3), 4)
        rows, times = rng.integers(0, 3, (8, 4)).astype(np.int32), rng.random(8)
        settings = TableSettings(ppo="clipped", ppo_steps=1, ppo_rate=1e-3)
        start, advantage = np.log(table), advantages(times, by_rank=False)

        def surrogate(logits: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
            log = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            ratio = np.exp((log - start)[np.arange(4)[None], rows].sum(axis=1))
            return float(np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage).mean())

        slope = np.zeros((4, 3))
        for m in range(4):
            for j in range(3):
                ahead, behind = start.copy(), start.copy()
                ahead[m, j] += 1e-5
                behind[m, j] -= 1e-5
                slope[m, j] = (surrogate(ahead) - surrogate(behind)) / 2e-5
        expected = np.exp(start + 1e-3 * slope)
        expected /= expected.sum(axis=1, keepdims=True)
        assert np.allclose(ascend(table, rows, times, settings), expected, atol=1e-8)

    def test_a_joint_ratio_leaves_the_clip_range_after_small_changes_of_many_groups(self) -> None:
        """Why Post stalls on large graphs, and what ratios of single groups mend."""
        rng = np.random.default_rng(0)
        table, rows, times = (
            np.full((300, 2), 0.5),
            rng.integers(0, 2, (10, 300)).astype(np.int32),
            rng.random(10),
        )
        joint = ascend(table, rows, times, TableSettings(ppo="clipped"))
        single = ascend(table, rows, times, TableSettings(ppo="clipped", ratio="group"))
        assert np.abs(joint - 0.5).mean() < 0.5 * np.abs(single - 0.5).mean()

    def test_equal_times_teach_nothing(self) -> None:
        table, rows = np.full((2, 2), 0.5), np.array([[0, 0], [1, 1]], dtype=np.int32)
        assert (ascend(table, rows, np.ones(2), TableSettings(ppo="clipped")) == table).all()


class TestSampler:
    """Colours, support, pins and room hold while drawing, not only in the end."""

    @pytest.mark.parametrize("make", [pinned_ops, unsupported_ops, tight_memory])
    def test_every_drawn_row_obeys_the_rules(self, make: object) -> None:
        problem: Problem = make()  # type: ignore[operator]
        groups = group_problem(problem)
        uniform = groups.cargo.fits / groups.cargo.fits.sum(axis=1, keepdims=True)
        rows = groups.draw(uniform, np.random.default_rng(0), 200)
        for row in rows:
            assert api.check_plan(problem, groups.plan(row)) == []
            held = np.bincount(row, groups.cargo.held_bytes, groups.num_devices)
            assert (held <= groups.room_bytes).all()

    def test_devices_that_are_alike_are_named_in_the_order_of_first_use(self) -> None:
        groups = group_problem(loose(4, devices=3))
        assert groups.relabel(np.array([[2, 0, 2, 1]], dtype=np.int32)).tolist() == [[0, 1, 0, 2]]
        assert groups.relabel(np.array([[0, 1, 0, 2]], dtype=np.int32)).tolist() == [[0, 1, 0, 2]]

    def test_an_overrun_stretches_the_time_it_learns_from(self) -> None:
        groups = group_problem(tight_memory())
        fits = Score(0, 2.0, (20, 30))
        over = Score(10, 2.0, (30, 20))
        assert groups.penalised_s(fits) == 2.0
        assert groups.penalised_s(over) == pytest.approx(2.0 * (1 + 10 * 0.5))


class TestSearch:
    """What one run delivers."""

    @pytest.mark.parametrize("algorithm", ["cross_entropy", "post"])
    def test_a_single_device_may_be_the_answer(self, algorithm: str) -> None:
        """The published code of a later placer gives such plans a latency of 1e10."""
        problem = problem_of(chain(4, 100), star_cluster(2), 1.0)
        for warm in (True, False):
            found = api.plan(problem, algorithm=_made(algorithm, warm=warm), budget="400x")
            assert found.plan is not None
            assert len(set(found.plan.device.tolist())) == 1

    def test_a_warm_search_is_never_worse_than_its_start(self) -> None:
        problem = pipeline(Split.FREE)
        start = api.plan(problem, algorithm="linear_dp", budget="20x")
        found = api.plan(problem, algorithm="post", budget="60x")
        assert found.score_s is not None
        assert start.score_s is not None
        assert found.score_s <= start.score_s

    def test_it_finds_the_best_split_of_loose_ops(self) -> None:
        for algorithm in (CrossEntropy(warm=False), Post(warm=False, form="kl"), Post(warm=False)):
            found = api.plan(loose(), algorithm=algorithm, budget="600x")
            assert found.score_s == pytest.approx(11.0)  # 21 seconds over two devices

    def test_other_seeds_draw_other_plans(self) -> None:
        problem = problem_of(loose_ops(30), star_cluster(4), [float(1 + i % 7) for i in range(30)])
        found = [
            api.plan(problem, algorithm=Post(warm=False, finish=0.0), budget="30x", seed=seed)
            for seed in (0, 1, 0)
        ]
        assert found[0].digest == found[2].digest
        assert found[0].digest != found[1].digest

    def test_every_row_asked_for_is_counted(self) -> None:
        """Also moves that are refused, and rows that were seen before."""
        problem, asked = loose(), []
        run = run_of(problem, 50)

        def arrange(plan: Plan) -> tuple[Plan, Score]:
            asked.append(plan)
            return run.arrange(plan)

        tally = Tally(problem, replace(run, arrange=arrange))
        groups = group_problem(problem)
        run_searcher(Climb(groups, None), groups, tally)
        assert len(asked) == tally.scored == 50

    def test_a_plan_that_failed_teaches_and_the_search_goes_on(self) -> None:
        problem, calls = loose(), []
        run = run_of(problem, 80)

        def arrange(plan: Plan) -> tuple[Plan, Score]:
            calls.append(plan)
            ordered, score = run.arrange(plan)
            return ordered, score if len(calls) % 3 else Score(0, np.inf, score.peak_bytes)

        found = CrossEntropy(warm=False)(problem, replace(run, arrange=arrange))
        assert found.score_s is not None
        assert np.isfinite(found.score_s)
        assert len(calls) == 80

    @pytest.mark.parametrize("name", ["cross_entropy", "post", "learned_order"])
    def test_it_is_soon_over_where_it_is_proven_that_nothing_fits(self, name: str) -> None:
        problem, asked = too_large(), []
        run = run_of(problem, 5_000)

        def arrange(plan: Plan) -> tuple[Plan, Score]:
            asked.append(plan)
            return run.arrange(plan)

        hopeless = replace(run.bound, infeasible="an op is larger than every device")
        found = placer(name)(problem, replace(run, arrange=arrange, bound=hopeless))
        assert found.status == "infeasible"
        assert len(asked) < 50

    @pytest.mark.parametrize(
        "wrong", [{"form": "other"}, {"elite": 0.0}, {"mixing": 2.0}, {"finish": 1.0}, {"ratio": "x"}]
    )
    def test_parameters_that_make_no_search_are_refused(self, wrong: dict[str, object]) -> None:
        with pytest.raises(InputError):
            Post(**wrong)  # type: ignore[arg-type]


class TestFreeSplits:
    """The busiest load ignores the samples in flight, so answers say how many there are."""

    def test_levels_count_the_changes_of_device_on_the_longest_way(self) -> None:
        problem = problem_of(chain(5), star_cluster(2), 1.0)
        for devices, levels in (([0] * 5, 1), ([0, 0, 1, 1, 1], 2), ([0, 1, 0, 1, 1], 4)):
            assert count_levels(problem, plan_of(np.array(devices, dtype=np.int32))) == levels

    @pytest.mark.parametrize("algorithm", ["cross_entropy", "post"])
    def test_an_answer_says_how_many_samples_are_in_flight(self, algorithm: str) -> None:
        problem = pipeline(Split.FREE)
        found = api.plan(problem, algorithm=algorithm, budget="20x")
        assert found.plan is not None
        levels = count_levels(problem, found.plan)
        assert f"a free split of {levels} levels" in found.members[-1].reason


def _made(algorithm: str, *, warm: bool) -> CrossEntropy | Post:
    return CrossEntropy(warm=warm) if algorithm == "cross_entropy" else Post(warm=warm)
