"""All stages on one rank: the executor without any process beside this one."""

import copy
from typing import Any

import pytest
import torch

from loadmaster.core.errors import GraphError, InputError, RunError
from loadmaster.modules.loss import compute_loss
from loadmaster.runtime.distributed.pipeline.batches import split_batch
from loadmaster.runtime.distributed.pipeline.executor import micro_batch_seed
from loadmaster.runtime.distributed.pipeline.rank import PipelineRank, TrainOptions
from loadmaster.runtime.distributed.transports import HostTransport, Waits
from loadmaster.zoo.example import Example
from tests.distributed.pipelines import pipeline_placement, train_plainly, whole_batch
from tests.distributed.run_models import Averaging, Checkpointed, HalfFrozen, Net, sgd, square
from tests.torch_models import Branching, example

CPU = torch.device("cpu")


def _rank(built: Example, schedule: str, micro_batches: int, **options: Any) -> PipelineRank:
    recompute = options.pop("recompute", False)
    placement = pipeline_placement(
        built, 3, micro_batches, schedule, per_rank=3, recompute=recompute, devices="cpu#0-2GB"
    )
    waits = Waits(0, 10.0)
    chosen = TrainOptions(optimizer=sgd, **options)
    return PipelineRank(placement, built.model, chosen, 0, CPU, HostTransport(CPU, waits), waits)


def _difference(built: Example, plain: Any) -> float:
    worst = 0.0
    for name, one in built.model.state_dict().items():
        two = plain[name].double()
        worst = max(worst, float((one.double() - two).norm() / max(float(two.norm()), 1e-6)))
    return worst


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-h1"])
@pytest.mark.parametrize("recompute", [False, True])
def test_every_schedule_gives_the_weights_of_plain_training(schedule: str, *, recompute: bool) -> None:
    if recompute and schedule == "zb-h1":
        schedule = "gpipe"
    torch.manual_seed(1)
    built = Example(Net(), (torch.randn(4, 16),), loss=square)
    plain = Example(copy.deepcopy(built.model), built.args, loss=square)
    given = ((whole_batch(built, 3)[0][0][:11],), {})  # 4, 4 and 3 rows
    rank = _rank(built, schedule, 3, loss=square, seed=3, recompute=recompute)
    losses = [rank.step(*given) for _ in range(3)]
    expected = train_plainly(plain, given, [4, 4, 3], sgd, steps=3, seed=3)
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert _difference(built, expected.state) < 1e-5


@pytest.mark.parametrize("recompute", [False, True])
def test_a_forward_that_reads_averages_which_it_writes_trains_as_one_process_does(*, recompute: bool) -> None:
    torch.manual_seed(1)
    built = Example(Averaging(), (torch.randn(4, 16),), loss=square)
    plain = Example(copy.deepcopy(built.model), built.args, loss=square)
    given = whole_batch(built, 3)
    rank = _rank(built, "interleaved", 3, loss=square, recompute=recompute)
    losses = [rank.step(*given) for _ in range(2)]
    expected = train_plainly(plain, given, [4, 4, 4], sgd, steps=2)
    assert losses == pytest.approx(expected.losses, rel=1e-6)
    assert _difference(built, expected.state) < 1e-6


def test_modules_that_were_given_in_eval_mode_stay_so_while_the_others_train() -> None:
    torch.manual_seed(1)
    built = Example(HalfFrozen(), (torch.randn(4, 16),), loss=square)
    plain = copy.deepcopy(built.model)
    given = whole_batch(built, 2)
    rank = _rank(built, "gpipe", 2, loss=square)
    rank.step(*given)
    rank.evaluate(*given)
    rank.step(*given)
    optimizer = sgd([one for one in plain.parameters() if one.requires_grad])
    for _ in range(2):
        optimizer.zero_grad()
        for args, _ in split_batch(given, [4, 4]):
            (square(plain(*args)) / 2).backward()
        optimizer.step()
    assert _difference(built, plain.state_dict()) < 1e-6
    assert not built.model.norm.training
    assert built.model.head.training


def test_autocast_is_that_of_plain_training() -> None:
    torch.manual_seed(1)
    built = Example(Net(), (torch.randn(4, 16),), loss=square)
    plain = copy.deepcopy(built.model)
    given = whole_batch(built, 2)
    rank = _rank(built, "zb-h1", 2, loss=square, autocast=torch.bfloat16)
    rank.step(*given)
    optimizer = sgd(list(plain.parameters()))
    for number, (args, _) in enumerate(split_batch(given, [4, 4])):
        torch.manual_seed(micro_batch_seed(0, 0, number))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compute_loss(plain(*args), square) / 2
        loss.backward()
    optimizer.step()
    assert _difference(built, plain.state_dict()) < 1e-3  # sums in 16 bits are grouped otherwise


def test_generators_of_the_process_go_on_as_if_nothing_had_been_drawn() -> None:
    built = Example(Net(), (torch.randn(4, 16),), loss=square)
    rank = _rank(built, "gpipe", 2, loss=square)
    given = whole_batch(built, 2)
    rank.step(*given)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    rank.step(*given)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_cannot_be_exported_nor_run_is_refused_with_both_reasons() -> None:
    built = example("branching")
    assert isinstance(built.model, Branching)
    rank = _rank(built, "gpipe", 2)
    with pytest.raises(GraphError, match=r"cannot be exported .*, and its forward fails: RuntimeError: mat1"):
        rank.step((torch.randn(4, 5),), {})


def test_evaluation_without_a_loss_is_refused() -> None:
    built = Example(Net(), (torch.randn(4, 16),))
    rank = _rank(built, "gpipe", 2)
    with pytest.raises(InputError, match="gives no loss of its own"):
        rank.evaluate(*whole_batch(built, 2))


def test_a_cut_within_what_the_model_computes_again_is_said_with_what_to_do() -> None:
    built = Example(Checkpointed(), (torch.randn(4, 16),), loss=square)
    rank = _rank(built, "gpipe", 2, loss=square)
    with pytest.raises(RunError, match="gradient_checkpointing_disable"):
        rank.step(*whole_batch(built, 2))
