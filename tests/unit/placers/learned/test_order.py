"""`learned_order`: what the network sees does not depend on names, and plans obey every rule."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.errors import FileError, FormatError, InputError
from loadmaster.core.graph import Graph
from loadmaster.core.problem import Links, Objective, Problem, Split
from loadmaster.placers.heuristic._lists import load_lists
from loadmaster.placers.learned._groups import group_problem
from loadmaster.placers.learned._proposals import first_plans, look_at
from loadmaster.placers.learned._scene import scene_of_step
from loadmaster.placers.learned._slicers import LoadSlicer, StepSlicer, slicer_of
from loadmaster.placers.learned._stages import device_ranks
from loadmaster.placers.learned._weights import load_weights, save_weights, shipped_weights, weights_name
from loadmaster.placers.registry import placer
from tests.builders import problem_of, star_cluster
from tests.conformance.problems import fork_join, one_layer, pipeline, small_diamond, tight_memory

torch = pytest.importorskip("torch", reason="learned_order needs the extra [torch]")

from loadmaster.modules.tensor_files import read_tensors, write_tensors  # noqa: E402
from loadmaster.placers.learned._order_network import NetworkSize, make_network  # noqa: E402


def weights(folder: Path, seed: int = 0) -> Path:
    path = folder / weights_name(f"{seed:064x}")
    save_weights(make_network(NetworkSize(), seed), path, training_set=f"{seed:064x}", about={})
    return path


class TestScene:
    """A scene has no units and no names."""

    @pytest.mark.parametrize("make", [fork_join, one_layer, small_diamond, lambda: pipeline(Split.CHAIN)])
    def test_times_in_another_unit_are_the_same_scene(self, make: object) -> None:
        problem: Problem = make()  # type: ignore[operator]
        costs, cluster = problem.costs, problem.cluster
        given = np.where(costs.transfer_s >= 0, 1000.0 * costs.transfer_s, costs.transfer_s)
        slower = replace(
            problem,
            costs=replace(costs, compute_s=1000.0 * costs.compute_s, transfer_s=given),
            cluster=replace(
                cluster,
                link_bytes_per_s=cluster.link_bytes_per_s / 1000.0,
                link_latency_s=cluster.link_latency_s * 1000.0,
            ),
        )
        one, other = (slicer_of(each, group_problem(each)).scene() for each in (problem, slower))
        for name in ("node", "device", "pair", "edge"):
            assert np.allclose(getattr(one, name), getattr(other, name), atol=1e-5), name

    def test_features_are_finite_for_every_problem(self) -> None:
        from tests.conformance.problems import PROBLEMS

        for name, make in PROBLEMS.items():
            problem = make()
            scene = slicer_of(problem, group_problem(problem)).scene()
            for column in (scene.node, scene.device, scene.pair, scene.edge):
                assert np.isfinite(column).all(), name
                assert np.abs(column).max(initial=0.0) <= 64.0, name


class TestInvariance:
    """What the network says does not hang on the order of names."""

    def test_keys_follow_permuted_nodes(self) -> None:
        problem = fork_join()
        turned, place = permuted(problem, np.random.default_rng(1))
        network = make_network(NetworkSize(), 3).eval()
        keys, scores = [], []
        for each in (problem, turned):
            scene = scene_of_step(each, load_lists(each))
            opinion = look_at(network, slicer_of(each, group_problem(each)), scene)
            keys.append(opinion.key)
            scores.append(opinion.score)
        assert np.allclose(keys[0], keys[1][place], atol=1e-5)
        assert np.allclose(scores[0], scores[1][place], atol=1e-4)

    def test_groups_of_permuted_ops_get_the_same_keys(self) -> None:
        problem = fork_join()
        turned, _ = permuted(problem, np.random.default_rng(1))
        network = make_network(NetworkSize(), 3).eval()
        one, other = (look_at(network, slicer_of(each, group_problem(each))) for each in (problem, turned))
        assert len(one.key) < problem.graph.num_ops
        assert np.allclose(np.sort(one.key), np.sort(other.key), atol=1e-5)

    def test_renamed_devices_of_one_kind_get_each_others_scores(self) -> None:
        problem = problem_of(_graph(), star_cluster(3), 1.0)
        room = np.array([2**24, 2**30, 2**40])
        problem = replace(problem, cluster=replace(problem.cluster, memory_bytes=room))
        other = replace(problem, cluster=replace(problem.cluster, memory_bytes=room[[2, 0, 1]]))
        network = make_network(NetworkSize(), 3).eval()
        one, two = (look_at(network, slicer_of(each, group_problem(each))) for each in (problem, other))
        assert np.allclose(one.key, two.key, atol=1e-5)
        assert np.allclose(one.score[:, [2, 0, 1]], two.score, atol=1e-5)

    def test_devices_with_less_memory_are_told_apart(self) -> None:
        problem = problem_of(_graph(), star_cluster(2), 1.0)
        room = np.array([2**24, 2**40])
        problem = replace(problem, cluster=replace(problem.cluster, memory_bytes=room))
        network = make_network(NetworkSize(), 3).eval()
        score = look_at(network, slicer_of(problem, group_problem(problem))).score
        assert not np.allclose(score[:, 0], score[:, 1])

    def test_any_number_of_devices_is_scored(self) -> None:
        network = make_network(NetworkSize(), 0).eval()
        for devices in (1, 2, 7, 23):
            problem = problem_of(_graph(), star_cluster(devices), 1.0)
            opinion = look_at(network, slicer_of(problem, group_problem(problem)))
            assert opinion.score.shape == (len(opinion.key), devices)
            assert np.isfinite(opinion.score).all()


class TestSlicers:
    """Keys of any kind give plans that obey the rules."""

    def test_random_keys_give_chains(self) -> None:
        problem = pipeline(Split.CHAIN)
        slicer = slicer_of(problem, group_problem(problem))
        assert isinstance(slicer, LoadSlicer)
        rng = np.random.default_rng(0)
        for _ in range(20):
            sliced = slicer.slice(rng.normal(size=slicer.chain.model.num_classes))
            assert sliced is not None
            assert api.check_plan(problem, sliced.plan) == []
            assert sliced.expected_s == pytest.approx(api.seconds_per_sample(problem, sliced.plan))

    def test_a_cut_is_never_worse_than_the_usual_orders_it_includes(self) -> None:
        problem = pipeline(Split.CHAIN)
        slicer = LoadSlicer(problem, group_problem(problem))
        usual = slicer.usual()
        best = api.plan(problem, algorithm="ideal_dp", budget="200x")
        assert usual is not None
        assert best.score_s is not None
        assert usual.expected_s >= best.score_s * (1 - 1e-9)

    def test_wishes_keep_to_the_room_there_is(self) -> None:
        problem = tight_memory()
        slicer = slicer_of(problem, group_problem(problem))
        assert isinstance(slicer, StepSlicer)
        for score in (np.array([[5.0, 0.0]] * 5), np.array([[0.0, 5.0]] * 5), np.zeros((5, 2))):
            for rng in (None, np.random.default_rng(0)):
                row = slicer.wish(score, rng)
                held = np.bincount(row, slicer.groups.cargo.held_bytes, 2)
                assert (held <= slicer.groups.room_bytes).all()

    def test_a_wish_for_one_device_is_a_plan_on_one_device(self) -> None:
        problem = small_diamond()
        slicer = slicer_of(problem, group_problem(problem))
        assert isinstance(slicer, StepSlicer)
        sliced = slicer.slice(np.arange(4.0), np.ones(slicer.groups.num, dtype=np.int32))
        assert sliced is not None
        assert sliced.plan.device.tolist() == [1, 1, 1, 1]

    def test_stages_are_numbered_along_the_graph_of_devices(self) -> None:
        source, target = np.array([0, 1, 2], np.int32), np.array([1, 2, 3], np.int32)
        assert device_ranks(source, target, np.array([2, 2, 0, 1]))[[2, 0, 1]].tolist() == [0, 1, 2]
        assert np.isfinite(device_ranks(source, target, np.array([0, 1, 0, 1]))).all()  # a circle


class TestPlacer:
    """The algorithm as it is asked."""

    @pytest.mark.parametrize("make", [fork_join, lambda: pipeline(Split.FREE), lambda: pipeline(Split.CHAIN)])
    def test_the_first_plan_is_the_zero_shot_plan(self, make: object, tmp_path: Path) -> None:
        problem: Problem = make()  # type: ignore[operator]
        file = weights(tmp_path)
        slicer = slicer_of(problem, group_problem(problem))
        expected = first_plans(slicer, look_at(load_weights(file)[0], slicer))[0].sliced
        found = api.plan(problem, algorithm=placer("learned_order", weights=str(file)), budget="1x")
        assert found.plan is not None
        assert found.plan.device.tolist() == expected.plan.device.tolist()

    def test_more_evaluations_never_give_a_worse_plan(self, tmp_path: Path) -> None:
        for make in (fork_join, lambda: pipeline(Split.FREE)):
            problem, algorithm = make(), placer("learned_order", weights=str(weights(tmp_path)))
            scores = [api.plan(problem, algorithm=algorithm, budget=f"{n}x").score_s for n in (1, 10, 60)]
            assert None not in scores
            assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]

    def test_the_first_plan_is_reckoned_no_slower_than_what_nobody_learned(self) -> None:
        problem = fork_join()
        slicer = slicer_of(problem, group_problem(problem))
        assert isinstance(slicer, StepSlicer)
        found = first_plans(
            slicer, look_at(make_network(NetworkSize(), 0).eval(), slicer), orders=4, noise=0.1
        )
        usual = min(one.expected_s for _, one in slicer.usual() if one.fullness <= 1.0)
        assert found[0].sliced.expected_s <= usual
        assert len({one.sliced.plan.device.tobytes() for one in found}) == len(found)

    def test_plans_that_seem_too_large_come_last_of_their_kind(self) -> None:
        problem = tight_memory()
        slicer = slicer_of(problem, group_problem(problem))
        assert isinstance(slicer, StepSlicer)
        num = slicer.groups.num
        crowded = slicer.slice(slicer.no_key, np.zeros(num, dtype=np.int32))
        assert crowded is not None
        assert crowded.fullness > 1.0
        found = first_plans(slicer, look_at(make_network(NetworkSize(), 0).eval(), slicer))
        assert found[0].sliced.fullness <= 1.0

    def test_more_orders_never_reckon_a_slower_first_plan(self) -> None:
        problem = fork_join()
        slicer = slicer_of(problem, group_problem(problem))
        opinion = look_at(make_network(NetworkSize(), 0).eval(), slicer)
        few, many = (first_plans(slicer, opinion, orders=orders, noise=0.1)[0] for orders in (0, 32))
        assert many.sliced.expected_s <= few.sliced.expected_s

    @pytest.mark.parametrize("wrong", [{"noise": -1.0}, {"orders": -1}, {"orders": 10**9}])
    def test_parameters_that_make_no_search_are_refused(self, wrong: dict[str, float]) -> None:
        with pytest.raises(InputError, match="give a number"):
            placer("learned_order", **wrong)

    def test_the_shipped_weights_are_small_and_named_by_their_training_set(self) -> None:
        path = shipped_weights()
        _, about = load_weights(path)
        assert path.stat().st_size < 4e6
        assert path.name == weights_name(str(about["training_set"]))


class TestWeights:
    """Files of weights are data, and may be missing, damaged or of another version."""

    def test_they_come_back_as_they_were(self, tmp_path: Path) -> None:
        network, about = load_weights(weights(tmp_path, 5))
        same = make_network(NetworkSize(), 5).state_dict()
        assert all(torch.equal(value, same[name]) for name, value in network.state_dict().items())
        assert about["training_set"] == f"{5:064x}"

    def test_a_changed_byte_is_noticed(self, tmp_path: Path) -> None:
        path = weights(tmp_path)
        data = bytearray(path.read_bytes())
        data[-200] ^= 1
        path.write_bytes(data)
        with pytest.raises(FormatError):
            load_weights(path)

    def test_another_version_says_which(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("loadmaster.placers.learned._weights.VERSION", 99)
        path = weights(tmp_path)
        monkeypatch.undo()
        with pytest.raises(FormatError, match="version 99, this Loadmaster reads version 1"):
            load_weights(path)

    def test_what_is_no_file_of_weights_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        path.write_bytes(b"\x80\x04pickle")
        with pytest.raises(InputError):
            load_weights(path)
        with pytest.raises(FileError):
            load_weights(tmp_path / "none.safetensors")
        path.write_bytes(bytes(5 * 2**20))
        with pytest.raises(FormatError, match="at most"):
            load_weights(path)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"width": 10**9},
            {"width": -3},
            {"width": "x"},
            {"width": None},
            {"rounds": 10**6},
            {"rounds": 1.5},
        ],
    )
    def test_sizes_that_no_network_has_are_refused(self, tmp_path: Path, wrong: dict[str, object]) -> None:
        path = tmp_path / "x.safetensors"
        rewritten(weights(tmp_path), path, wrong)
        with pytest.raises(FormatError, match="not a whole number from 1 to"):
            load_weights(path)

    def test_numbers_that_are_not_finite_are_refused(self, tmp_path: Path) -> None:
        network = make_network(NetworkSize(), 0)
        with torch.no_grad():
            network.query.weight.fill_(torch.nan)
        save_weights(network, tmp_path / "x.safetensors", training_set="0" * 64, about={})
        with pytest.raises(FormatError, match="not finite"):
            load_weights(tmp_path / "x.safetensors")

    def test_tensors_of_another_type_are_no_reason_to_fall_over(self, tmp_path: Path) -> None:
        network = make_network(NetworkSize(), 0).bfloat16()
        save_weights(network, tmp_path / "x.safetensors", training_set="0" * 64, about={})
        assert load_weights(tmp_path / "x.safetensors")[0].query.weight.dtype == torch.float32

    def test_what_a_file_says_of_itself_may_be_nonsense(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        said = torch.frombuffer(bytearray(b"[" * 200_000), dtype=torch.uint8)
        write_tensors(path, {"about": said})
        with pytest.raises(FormatError, match="holds no weights"):
            load_weights(path)

    def test_a_named_file_that_is_missing_is_an_error(self, tmp_path: Path) -> None:
        algorithm = placer("learned_order", weights=str(tmp_path / "none.safetensors"))
        with pytest.raises(FileError, match="cannot read weights"):
            api.plan(fork_join(), algorithm=algorithm, budget="5x")

    def test_without_the_shipped_weights_auto_answers_and_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("loadmaster.placers.learned._weights.FOLDER", tmp_path)
        found = api.plan(small_diamond(), algorithm="learned_order", budget="20x")
        assert found.plan is not None
        assert "auto answered without it" in found.members[-1].reason
        bad = tmp_path / "learned_order-0.safetensors"
        bad.write_bytes(b"nothing")
        found = api.plan(small_diamond(), algorithm="learned_order", budget="20x")
        assert "auto answered without it" in found.members[-1].reason


def rewritten(source: Path, target: Path, change: dict[str, object]) -> None:
    """The same weights, which say something else of themselves."""
    tensors = read_tensors(source)
    about = json.loads(bytes(tensors["about"].numpy())) | change
    tensors["about"] = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
    write_tensors(target, tensors)


def permuted(
    problem: Problem, rng: np.random.Generator
) -> tuple[Problem, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """The same problem with its ops in another topological order, and the new place of every op."""
    graph = problem.graph
    waiting = np.bincount(graph.use_op, minlength=graph.num_ops).tolist()
    users: dict[int, list[int]] = {}
    for tensor, user in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        users.setdefault(int(graph.tensor_op[tensor]), []).append(user)
    ready = [op for op in range(graph.num_ops) if waiting[op] == 0]
    order = []
    while ready:
        op = ready.pop(int(rng.integers(len(ready))))
        order.append(op)
        for user in users.get(op, []):
            waiting[user] -= 1
            if waiting[user] == 0:
                ready.append(user)
    old = np.array(order)
    place = np.empty(len(old), dtype=np.int64)
    place[old] = np.arange(len(old))
    numbers = ("phase", "dtype", "group", "signature", "flops")
    sizes = ("bytes_moved", "resident_bytes", "workspace_bytes")
    columns = {name: getattr(graph, name)[old] for name in numbers + sizes}
    words = ("op_name", "op_kind", "module")
    names = {name: tuple(np.array(getattr(graph, name), dtype=object)[old]) for name in words}
    turned: Graph = replace(
        graph,
        **names,
        **columns,
        mirror=graph.mirror,
        tensor_op=place[graph.tensor_op],
        use_op=place[graph.use_op],
    )
    costs = replace(
        problem.costs,
        compute_s=problem.costs.compute_s[old],
        issue_s=problem.costs.issue_s[old],
        origin=problem.costs.origin[old],
        rel_error=problem.costs.rel_error[old],
    )
    return replace(problem, graph=turned, costs=costs, pinned=problem.pinned[old]), place


def _graph() -> Graph:
    from loadmaster.graph.generate import layered

    return layered(20, 1)


def test_both_objectives_have_a_slicer() -> None:
    assert isinstance(slicer_of(fork_join(), group_problem(fork_join())), StepSlicer)
    problem = pipeline(Split.CONVEX)
    assert isinstance(slicer_of(problem, group_problem(problem)), LoadSlicer)
    assert problem.links == Links.HOST
    assert problem.objective == Objective.THROUGHPUT
