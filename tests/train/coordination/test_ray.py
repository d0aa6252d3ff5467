"""Workers as Ray actors on a local cluster: the same weights, a killed actor replaced."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadmaster.train.coordination.result import TrialStatus
from loadmaster.train.study import Study
from tests.train.plain_engine import Plain
from tests.train.small_trials import digest, plainly, trial

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [
    pytest.mark.slow,  # a cluster takes its time to start
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=80 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


def study(tmp_path: Path, trials: list[Any], **options: Any) -> Study:
    given = {"engine": Plain(2), "launcher": "ray", "checkpoint_every": 5, "devices": ["cpu#0", "cpu#1"]}
    return Study(trials, dir=tmp_path / "run", **(given | options))


def test_two_actors_train_to_the_weights_of_the_plain_loop(cluster: None, tmp_path: Path) -> None:
    trials = [trial("a"), trial("b", lr=0.1), trial("c", lr=0.001, num_batches=6)]
    seen: set[str] = set()

    class Watch:
        def on_device(self, device: str, name: str, done: Any) -> None:
            seen.add(device)

    result = study(tmp_path, trials, callbacks=[Watch()]).fit()
    for one in trials:
        assert result[one.name].status == TrialStatus.DONE
        assert digest(result[one.name].state_dict()) == plainly(one)
    assert seen == {"cpu#0", "cpu#1"}


def test_an_actor_that_is_killed_is_replaced_and_its_trial_goes_on(cluster: None, tmp_path: Path) -> None:
    from loadmaster.train.coordination.coordinator import Coordinator

    trials = [trial("a"), trial("b", lr=0.1)]
    seen: list[Coordinator] = []

    class KillOne:
        left = 12

        def on_step(self, name: str, done: Any) -> None:
            self.left -= 1
            if self.left == 0:
                ray.kill(seen[0].pool.actors[0])  # type: ignore[attr-defined]

    one = study(tmp_path, trials, callbacks=[KillOne()])
    make = one._coordinator

    def made(*given: Any, **options: Any) -> Coordinator:
        seen.append(make(*given, **options))
        return seen[0]

    one._coordinator = made  # type: ignore[method-assign]
    result = one.fit()
    for each in trials:
        assert digest(result[each.name].state_dict()) == plainly(each)


def test_two_runs_compute_with_the_threads_of_the_caller_and_end_in_the_same_weights(
    cluster: None, tmp_path: Path
) -> None:
    import torch
    from torch import nn

    import loadmaster.train as lt

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 3))

    def score(model: Any) -> dict[str, float]:
        return {"loss": float(torch.get_num_threads())}

    torch.set_num_threads(2)
    found = []
    for at, launcher in enumerate(("ray", "ray", "inline")):
        devices = "cpu" if launcher == "inline" else ["cpu#0", "cpu#1"]
        trials = [trial(name, build=build, evaluate=score, eval_every=None) for name in "ab"]
        result = lt.Study(trials, dir=tmp_path / str(at), devices=devices, launcher=launcher).fit()
        assert [each.error for each in result.trials] == ["", ""]
        assert {each.metrics["loss"] for each in result.trials} == {2.0}
        found.append([digest(each.state_dict()) for each in result.trials])
    assert found[0] == found[1] == found[2]
    assert torch.get_num_threads() == 2
