"""The guide: features that vary, a network of any number of devices, weights that are refused by name."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch

from loadmaster.core.errors import FormatError, InputError
from loadmaster.core.run import Budget
from loadmaster.strategies.ask import make_evaluator
from loadmaster.strategies.guide_choice import load_guide
from loadmaster.strategies.guide_session import train_guide
from loadmaster.strategies.guide_training import Settings, random_cluster, train
from loadmaster.strategies.guides import UniformGuide
from loadmaster.strategies.learned.features import make_record, make_states
from loadmaster.strategies.learned.guide import NetworkGuide, make_inputs
from loadmaster.strategies.learned.network import Network, Spec, load_network, save_network
from loadmaster.strategies.scoring.evaluator import Evaluator
from loadmaster.strategies.search.guided import Guided
from loadmaster.strategies.search.uniform import Uniform
from loadmaster.strategies.search_run import SearchRun
from tests.unit.strategies.models import mixed_step, wide_step
from tests.unit.strategies.strategies import BATCH, TWO_HOSTS, problem_for, wide_problem

SMALL = Settings(episodes=2, replays=120, least_visits=4, spec=Spec(width=8, layers=1))


def seeded(devices: str = TWO_HOSTS) -> Evaluator:
    evaluator = make_evaluator(problem_for(wide_step(BATCH, 512), devices), BATCH)
    Uniform()(evaluator, SearchRun(Budget(count=100), np.random.default_rng(0)))
    return evaluator


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network(Spec(width=8, layers=1)).eval()


def test_no_feature_of_edges_or_devices_is_constant() -> None:
    evaluator = seeded()
    record = make_record(evaluator)
    best = min(evaluator.seen.values(), key=lambda e: e.rank)
    state = make_states(record, [(0, 0)], best)
    assert len(np.unique(record.before)) > 2  # bytes between groups
    assert len(np.unique(record.link[:, :, 0])) > 1
    for column in range(4 + 4):
        assert len(np.unique(record.group[:, column])) > 1, column
    assert len(np.unique(state.placed)) > 1


def test_utilisation_is_a_share_not_a_flag() -> None:
    evaluator = seeded()
    found = max(evaluator.seen.values(), key=lambda e: e.busy_s.mean() / e.time_s if e.overflow == 0 else 0)
    busy = found.busy_s / found.time_s
    assert ((busy >= 0) & (busy <= 1 + 1e-9)).all()
    assert ((busy > 0.01) & (busy < 0.99)).any()


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_features_have_no_units(scale: float) -> None:
    problem = wide_problem(width=512, devices=TWO_HOSTS)
    cluster = dataclasses.replace(
        problem.cluster,
        flops_per_s=problem.cluster.flops_per_s / scale,
        memory_bytes_per_s=problem.cluster.memory_bytes_per_s / scale,
        overhead_s=problem.cluster.overhead_s * scale,
        link_bytes_per_s=problem.cluster.link_bytes_per_s / scale,
        link_latency_s=problem.cluster.link_latency_s * scale,
    )
    slow = dataclasses.replace(
        problem,
        cluster=cluster,
        costs=dataclasses.replace(problem.costs, compute_s=problem.costs.compute_s * scale),
    )
    first, second = (make_record(make_evaluator(p, BATCH)) for p in (problem, slow))
    np.testing.assert_allclose(first.group, second.group, rtol=1e-6)
    np.testing.assert_allclose(first.link, second.link, rtol=1e-6)
    np.testing.assert_allclose(first.seconds, second.seconds, rtol=1e-6)


@pytest.mark.parametrize("devices", [TWO_HOSTS, "3xV100-16GB", "1xV100-16GB | 1xP100"])
def test_one_network_serves_any_devices(devices: str) -> None:
    evaluator = seeded(devices)
    guide = NetworkGuide(network())
    guesses = guide.guess(guide.prepare(evaluator), [(), (0,), (0, 1)], next(iter(evaluator.seen.values())))
    for guess in guesses:
        assert guess.prior is not None
        assert guess.prior.shape == (len(evaluator.actions),)
        assert guess.prior.sum() == pytest.approx(1.0, abs=1e-5)


def test_guesses_use_one_thread_and_leave_the_number_as_it_was() -> None:
    evaluator, seen = seeded(), []
    guide = NetworkGuide(network())
    guide.network.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        best = min(evaluator.seen.values(), key=lambda e: e.rank)
        guide.guess(guide.prepare(evaluator), [(0,)], best)
        assert (seen, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(before)


def test_relabelling_equal_devices_does_not_change_the_prior() -> None:
    evaluator = seeded("2xV100-16GB | 2xV100-16GB ; inter=10gbit")
    record = make_record(evaluator)
    best = evaluator.seen[next(iter(evaluator.seen))]
    logits = network()(make_inputs(record, make_states(record, [()], best)))[0].detach()
    single = {a.devices[0]: i for i, a in enumerate(evaluator.actions) if len(a.devices) == 1}
    values = [float(logits[0, single[d]]) for d in range(4)]
    assert values == pytest.approx([values[0]] * 4, abs=1e-4)


def test_training_is_reproducible_by_seed() -> None:
    graphs = [(wide_step(BATCH, 256), BATCH), (mixed_step(6), 6)]
    first, second = (train(graphs, SMALL) for _ in range(2))
    assert first[1] == second[1]
    for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(a, b)
    other, _ = train(graphs, dataclasses.replace(SMALL, seed=1))
    assert not torch.equal(next(iter(first[0].parameters())), next(iter(other.parameters())))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"workers": 2}, {"ray": True}])
def test_workers_do_not_change_the_weights(tmp_path: Path, how: dict[str, Any]) -> None:
    if "ray" in how:
        pytest.importorskip("ray")
    models = ("tests/distributed/run_models.py:build_rows@8",)
    settings = dataclasses.replace(SMALL, together=2)
    plain = train_guide(tmp_path / "one.safetensors", settings, models=models)
    other = train_guide(tmp_path / "more.safetensors", settings, models=models, **how)
    assert plain.weights.read_bytes() == other.weights.read_bytes()
    assert plain.curve.read_text() == other.curve.read_text()


def test_training_to_a_file_that_is_none_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.safetensors file, not to 'guide.pt'"):
        train_guide(tmp_path / "guide.pt", SMALL)
    with pytest.raises(InputError, match="episodes is 0; it must be at least 1"):
        train_guide(tmp_path / "g.safetensors", dataclasses.replace(SMALL, episodes=0))
    with pytest.raises(InputError, match="NAME@BATCH"):
        train_guide(tmp_path / "g.safetensors", SMALL, models=("hf:gpt2@many",))


def test_weights_survive_their_file(tmp_path: Path) -> None:
    save_network(network(), tmp_path / "w.safetensors", {"seed": "0"})
    again = load_network(tmp_path / "w.safetensors")
    for a, b in zip(network().parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_weights_of_another_version_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save

    path = tmp_path / "old.safetensors"
    path.write_bytes(save(dict(network().state_dict()), {"about": "version=0, width=8, layers=1"}))
    with pytest.raises(FormatError, match=r"network version 0, not 1; train them again, or use 'shipped'"):
        load_network(path)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are no weights"):
        load_guide(str(tmp_path / "none.safetensors"))
    (tmp_path / "bad.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(FormatError, match="not a safetensors file"):
        load_guide(str(tmp_path / "bad.safetensors"))
    (tmp_path / "big.safetensors").write_bytes(b"\0" * (4 * 2**20 + 1))
    with pytest.raises(FormatError, match="at most 4194304"):
        load_guide(str(tmp_path / "big.safetensors"))


def test_a_search_with_a_network_repeats_and_differs_from_one_without(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_network(network(), path, {})
    found = {}
    for label, name in (("first", str(path)), ("again", str(path)), ("without", "none")):
        evaluator = make_evaluator(wide_problem(width=512), BATCH)
        run = SearchRun(Budget(count=300), np.random.default_rng(0))
        Guided(network=name, descent_share=0.0)(evaluator, run)
        found[label] = tuple(evaluator.seen)
    assert found["first"] == found["again"] != found["without"]


def test_random_clusters_have_at_least_two_devices() -> None:
    rng = np.random.default_rng(0)
    sizes = [problem_for(wide_step(BATCH, 64), random_cluster(rng)).cluster.num_devices for _ in range(15)]
    assert min(sizes) >= 2
    assert max(sizes) <= 16


def test_without_weights_the_search_still_answers() -> None:
    assert isinstance(UniformGuide().guess(None, [()], ())[0].prior, type(None))
