"""The published environment to the letter: completion times, blocks, blocking, and one test for each
defect."""

from dataclasses import replace

import numpy as np
import pytest

from loadmaster.advisor.environments.blocks import DEGREES, all_blocks
from loadmaster.advisor.environments.engine import Cause, Kind, Rule, replay, replay_many
from loadmaster.advisor.environments.profile import read_profile
from loadmaster.advisor.environments.rules import COMPAT, FIXED, Rules
from loadmaster.advisor.environments.streams import DISTRIBUTIONS, draw_stream
from loadmaster.advisor.environments.timing import completion_time, split_counts, time_step
from loadmaster.advisor.environments.world import _servers_of, build_world
from loadmaster.advisor.replay import BASELINES
from loadmaster.core.errors import FormatError
from tests.advisor.shared import needs_graphs, profiles, world

JCT = {  # the published simulator's, to 0.01
    "alexnet": (36061.15, 18031.03, 9015.95, 6010.88, 4508.41, 2254.76),
    "gnmt": (4470.80, 2235.57, 1117.92, 745.36, 560.48, 308.39),
    "resnet18": (36668.35, 18336.34, 9170.04, 6114.39, 4586.86, 2295.82),
    "squeezenet1_0": (38000.15, 19002.78, 9503.33, 6336.61, 4753.55, 2379.20),
    "vgg16": (34525.35, 17267.73, 8638.72, 5761.84, 4324.16, 2168.24),
}
FIXED_JCT = {
    "alexnet": (36061.15, 18488.81, 9682.05, 6697.67, 5273.99, 3190.28),
    "gnmt": (4470.80, 2404.51, 1341.90, 967.66, 803.55, 435.89),
    "resnet18": (36668.35, 20494.31, 12155.47, 9146.89, 7943.70, 6396.51),
    "squeezenet1_0": (38000.15, 21756.02, 12998.24, 9843.80, 8604.01, 7015.59),
    "vgg16": (34525.35, 22318.06, 16011.61, 13373.59, 12808.77, 12559.45),
}
SIZES = {  # nodes and edges at 16
    "alexnet": (616, 13172),
    "gnmt": (466, 5292),
    "resnet18": (1972, 41874),
    "squeezenet1_0": (1846, 39093),
    "vgg16": (1192, 26258),
}
BLOCKING = {  # mean and standard deviation over 60 seeds
    "Para_max": ((0.263, 0.004), (0.263, 0.004), (0.263, 0.004), (0.263, 0.004)),
    "Para_min": ((0.311, 0.010), (0.388, 0.012), (0.299, 0.015), (0.141, 0.018)),
    "Random": ((0.522, 0.011), (0.594, 0.017), (0.505, 0.013), (0.465, 0.013)),
    "const 2": ((0.457, 0.016), (0.937, 0.021), (0.530, 0.075), (0.120, 0.013)),
    "const 4": ((0.218, 0.009), (0.464, 0.055), (0.122, 0.008), (0.111, 0.004)),
    "const 6": ((0.342, 0.006), (0.365, 0.015), (0.324, 0.006), (0.323, 0.005)),
    "const 8": ((0.294, 0.005), (0.299, 0.009), (0.282, 0.004), (0.282, 0.004)),
    "smallest": ((0.307, 0.010), (0.371, 0.014), (0.291, 0.016), (0.142, 0.020)),
}
FIXED_BLOCKING = {
    "Para_max": ((0.686, 0.008), (0.653, 0.009), (0.698, 0.008), (0.705, 0.008)),
    "Para_min": ((0.367, 0.011), (0.640, 0.026), (0.382, 0.014), (0.189, 0.011)),
    "const 4": ((0.375, 0.010), (0.690, 0.055), (0.316, 0.010), (0.311, 0.006)),
    "smallest": ((0.328, 0.008), (0.498, 0.015), (0.317, 0.011), (0.187, 0.008)),
}
SEEDS = range(100, 120)


def test_195_blocks_in_the_published_order() -> None:
    blocks = all_blocks()
    assert np.diff(blocks.first).tolist() == [32, 82, 40, 20, 19, 2]
    assert [s.partition(":")[2] for s in blocks.shapes if s.startswith("4:")] == [
        "(2,2,1)",
        "(4,1,1)",
        "(2,1,2)",
        "diagonal",
    ]


@needs_graphs
def test_completion_times_are_the_published_simulators() -> None:
    found = world("compat")
    for m, name in enumerate(found.models):
        assert found.nominal[m] == pytest.approx(JCT[name], abs=0.0101), name


@needs_graphs
def test_corrected_completion_times() -> None:
    found = world("fixed")
    for m, name in enumerate(found.models):
        expected = np.array(FIXED_JCT[name])
        # one of the thirty differs: SqueezeNet on 2 is 21756.34 here and 21756.02 there
        abs_error = np.where((name == "squeezenet1_0") & (np.array(DEGREES) == 2), 0.33, 0.0101)
        assert (abs(found.nominal[m] - expected) <= abs_error).all(), name


@needs_graphs
def test_partitioned_graphs_have_the_published_sizes() -> None:
    for graph in profiles():
        counts = split_counts(graph, 16)
        step = time_step(graph, counts, _servers_of(counts, 193, COMPAT, all_blocks()))
        assert (step.num_nodes, step.num_edges) == SIZES[graph.name]


def _far(found: np.ndarray, expected: tuple[float, float], deviations: float) -> bool:
    return bool(abs(found.mean() - expected[0]) > deviations * expected[1] + 0.0006)


@needs_graphs
@pytest.mark.parametrize("d", DISTRIBUTIONS)
def test_baselines_block_as_published(d: str) -> None:
    names = list(BLOCKING)
    counts = replay_many(world("compat"), [draw_stream(d, s) for s in SEEDS], [BASELINES[n] for n in names])
    share = counts[:, :, 1:5].sum(axis=2) / 1001
    at = DISTRIBUTIONS.index(d)
    assert [n for i, n in enumerate(names) if _far(share[:, i], BLOCKING[n][at], 0.8)] == []


@needs_graphs
@pytest.mark.parametrize("d", DISTRIBUTIONS)
def test_corrected_world_blocks_as_measured(d: str) -> None:
    names = list(FIXED_BLOCKING)
    counts = replay_many(world("fixed"), [draw_stream(d, s) for s in SEEDS], [BASELINES[n] for n in names])
    share = counts[:, :, 1:5].sum(axis=2) / 1001
    at = DISTRIBUTIONS.index(d)
    # its anchors are means of 20 seeds themselves
    assert [n for i, n in enumerate(names) if _far(share[:, i], FIXED_BLOCKING[n][at], 1.2)] == []


@needs_graphs
def test_without_the_leak_constant_8_blocks_half() -> None:
    streams = [draw_stream("A", s) for s in SEEDS]
    share = replay_many(world("own"), streams, [Rule(Kind.CONSTANT, 8)])[:, 0, 1:5].sum(axis=1) / 1001
    assert share.mean() == pytest.approx(0.142, abs=0.005)


def _time(model: int, degree: int, block_of: str, rules: Rules) -> float:
    blocks = all_blocks()
    graph = profiles()[model]
    counts = split_counts(graph, degree)
    block = next(b for b in range(195) if blocks.shapes[blocks.shape[b]] == f"{degree}:{block_of}")
    return completion_time(time_step(graph, counts, _servers_of(counts, block, rules, blocks), rules))


@needs_graphs
@pytest.mark.parametrize(
    ("change", "sign"),
    [
        ({"ms_read_as_s": False}, 1),  # U1: communication counts
        ({"bandwidth_divided_twice": False}, -1),  # U2: collectives are slower than they need be
        ({"no_rack_contention": False}, 1),  # U3
        ({"parameters_on_edges": False}, -1),  # U5: less traffic
    ],
)
def test_each_timing_defect_moves_the_time_its_way(change: dict[str, bool], sign: int) -> None:
    shape = "(4,1,2)"
    before = replace(FIXED, ms_read_as_s=True) if "ms_read_as_s" in change else FIXED
    apart = _time(4, 8, shape, replace(before, **change)) - _time(4, 8, shape, before)
    assert sign * apart > 0


@needs_graphs
def test_u4_servers_of_one_rack_exchange_for_nothing() -> None:
    free, paid = _time(4, 2, "(1,1,2)", FIXED), _time(4, 2, "(1,1,2)", replace(FIXED, free_within_rack=False))
    assert free == pytest.approx(17267, abs=1)
    assert paid > free * 1.1
    assert _time(4, 2, "(2,1,1)", FIXED) == pytest.approx(22318.06, abs=0.01)


@needs_graphs
def test_l1_whole_ops_leave_the_block() -> None:
    found = world("compat")
    gnmt, eight, sixteen = found.models.index("gnmt"), DEGREES.index(8), DEGREES.index(16)
    first = {i: int(found.blocks.mask[found.blocks.first[i]]) for i in range(6)}
    for k, servers in ((eight, 10), (sixteen, 21)):
        taken = 0
        for i in np.flatnonzero(found.needs[gnmt, k]):
            taken |= first[int(i)]
        assert taken.bit_count() == servers
    assert world("fixed").needs.sum() == 5 * 6


@needs_graphs
def test_g1_the_published_mask_offers_degrees_without_a_block() -> None:
    stream = draw_stream("A", 3)
    assert replay(world("compat"), stream, Rule(Kind.PARA_MIN)).count(Cause.NO_BLOCK) > 0
    assert replay(world("fixed"), stream, Rule(Kind.PARA_MIN)).count(Cause.NO_BLOCK) == 0


@needs_graphs
def test_j1_completion_times_ignore_the_block_only_as_published() -> None:
    assert np.ptp(world("compat").jct[4, 32:114]) == 0
    assert np.ptp(world("fixed").jct[4, 32:114]) > 1000


@needs_graphs
def test_h1_jobs_at_the_horizon_are_blocked_only_as_published() -> None:
    stream = draw_stream("D", 3)
    counted, drained = (replay(world(n), stream, Rule(Kind.CONSTANT, 2)) for n in ("fixed", "drained"))
    assert counted.count(Cause.HORIZON) > 0 == drained.count(Cause.HORIZON)
    assert drained.num_blocked == counted.num_blocked - counted.count(Cause.HORIZON)


@needs_graphs
def test_f1_resnet_on_one_server_misses_a_deadline_of_exactly_its_time() -> None:
    for name, missed in (("compat", True), ("fixed", False)):
        w = world(name)
        stream = draw_stream("A", 0)
        only = replace(stream, model=np.full(1001, w.models.index("resnet18")), beta=np.ones(1001))
        assert (replay(w, only, Rule(Kind.CONSTANT, 1)).cause[0] == Cause.LATE) == missed


@needs_graphs
def test_scaling_all_times_changes_nothing() -> None:
    w, stream = world("drained"), draw_stream("B", 5)
    scaled = replace(w, jct=w.jct * 4, sequential=w.sequential * 4)
    later = replace(stream, arrival=stream.arrival * 4, horizon=stream.horizon * 4, period=stream.period * 4)
    for rule in BASELINES.values():
        assert (replay(w, stream, rule).cause == replay(scaled, later, rule).cause).all()


@needs_graphs
def test_causes_add_up_and_streams_repeat() -> None:
    stream = draw_stream("C", 8, poisson=True)
    rule = Rule(Kind.CONSTANT, 4, rollout=(5, 4))
    one, two = (replay(world("compat"), stream, rule, seed=1) for _ in range(2))
    assert (one.cause == two.cause).all()
    assert (one.degree == two.degree).all()
    assert sum(one.count(c) for c in Cause) == len(stream.model)
    assert one.count(Cause.NOT_DECIDED) == 1


def test_a_profile_line_that_is_neither_op_nor_edge_is_refused_with_its_number(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "odd.txt"
    file.write_text(
        "node1 -- Input -- forward_compute_time=1, backward_compute_time=1,"
        " activation_size=1, parameter_size=0\n"
        "__import__('os').system('true')\n"
    )
    with pytest.raises(FormatError, match="line 2"):
        read_profile(file)


@needs_graphs
def test_any_subset_of_graphs_makes_a_world() -> None:
    assert build_world(profiles()[:2], COMPAT).jct.shape == (2, 195)
