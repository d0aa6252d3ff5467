"""The first step by shards is compared with that of the plain model; what differs fails, and says where."""

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training needs the extra [torch]")
from torch import nn  # noqa: E402

import loadmaster.train as lt  # noqa: E402
from loadmaster.core.errors import RunError, VerifyError  # noqa: E402
from loadmaster.shards.device.cpu_device import CpuDevice  # noqa: E402
from tests.train.shards.test_silence import CAP, WIDTH, data, layers, mse, sgd  # noqa: E402
from tests.train.small_trials import Rows  # noqa: E402


def trial(build: Callable[[], nn.Module], **more: Any) -> lt.Trial:
    given = {"name": "t", "build": build, "data": data, "loss": mse, "optim": sgd, "seed": 0}
    return lt.Trial(**(given | more))


def opened(one: lt.Trial, cap_bytes: int = CAP) -> tuple[Any, CpuDevice]:
    device = CpuDevice(cap_bytes=cap_bytes)
    return lt.open_runner(one, device=device, num_threads=1, optimizer_placement="device"), device


def weights_after(one: lt.Trial, cap_bytes: int = CAP) -> dict[str, Any]:
    runner, device = opened(one, cap_bytes)
    try:
        list(runner.steps(device, 99))
        return {name: tensor.clone() for name, tensor in runner.state_dict().items()}
    finally:
        runner.close()


def refused(one: lt.Trial, words: str, cap_bytes: int = CAP) -> None:
    """It fails at once, and nothing was trained."""
    runner, device = opened(one, cap_bytes)
    before = {name: tensor.clone() for name, tensor in runner.state_dict().items()}
    with pytest.raises(VerifyError, match=words):
        list(runner.steps(device, 1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in runner.state_dict().items())
    runner.close()
    assert device.arena.used_bytes == 0


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = layers()

    def forward(self, x: Any) -> Any:
        return self.c(torch.tanh(self.b(self.a(x))))


def test_blocks_in_the_wrong_order_are_told_by_the_loss() -> None:
    one = trial(Chain, blocks=lambda m: [m.b, nn.Sequential(m.a, nn.Tanh()), m.c])
    refused(one, r"the loss is \d.* by shards and \d.* by the model itself")


def test_blocks_that_are_right_pass_and_say_so() -> None:
    runner, device = opened(trial(Chain, blocks=lambda m: [m.a, nn.Sequential(m.b, nn.Tanh()), m.c]))
    list(runner.steps(device, 1))
    assert runner.verified == "first step equal to that of the model itself (loss and 6 gradients)"
    runner.close()


def test_a_loss_that_reads_parameters_is_told_by_a_gradient() -> None:
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(nn.Sequential(*layers()))
        return made[-1]

    def loss(out: Any, target: Any) -> Any:
        return mse(out, target) + 1e-3 * sum(p.square().sum() for p in made[-1].parameters())

    refused(trial(build, loss=loss), r"the gradient of '0.weight' \(and \d more\) has the norm", 14_000)


def test_parameters_that_a_loss_holds_itself_are_told_too() -> None:
    held: list[Any] = []

    def build() -> nn.Module:
        model = nn.Sequential(*layers())
        nn.init.normal_(model[0].weight, std=0.2)  # so it is built with memory, and stays the same object
        held[:] = [model[0].weight]
        return model

    refused(
        trial(build, loss=lambda out, y: mse(out, y) + 1e-2 * held[0].square().sum()), "'0.weight'", 14_000
    )


def test_parameters_of_a_model_built_without_memory_that_a_loss_holds_are_refused_in_words() -> None:
    held: list[Any] = []

    def build() -> nn.Module:
        model = nn.Sequential(*layers())
        held[:] = [model[0].weight]
        return model

    one = trial(build, loss=lambda out, y: mse(out, y) + 1e-2 * held[0].square().sum())
    runner, device = opened(one, 14_000)
    with pytest.raises(RunError, match="its loss holds a parameter that has no values"):
        list(runner.steps(device, 1))
    runner.close()


class Aux(nn.Module):
    """Keeps a number for the loss, as experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.aux = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: Any) -> Any:
        out = self.linear(x)
        self.aux = out.square().mean()
        return out


def test_what_a_block_keeps_for_the_loss_is_told_by_a_gradient() -> None:
    made: list[Any] = []

    def build() -> nn.Module:
        made.append(nn.Sequential(Aux(), Aux(), *layers(2)))
        return made[-1]

    refused(trial(build, loss=lambda out, y: mse(out, y) + made[-1][0].aux), "the gradient of '0.linear")


class Scaled(nn.Module):
    """Multiplies by what a function outside of it counts."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        self.linear, self.counts = nn.Linear(WIDTH, WIDTH), lambda: counts.append(1) or len(counts)

    def forward(self, x: Any) -> Any:
        return self.linear(x) / self.counts()


def test_counts_outside_of_modules_are_told() -> None:
    counts: list[int] = []
    refused(trial(lambda: nn.Sequential(Scaled(counts), Scaled(counts), Scaled(counts))), "the loss is")


class Drawing(Chain):
    """What it draws in Python would be fixed by a trace."""

    def forward(self, x: Any) -> Any:
        return self.c(self.b(self.a(x)) * random.random())


def test_what_a_trace_would_fix_is_run_as_it_stands() -> None:
    runner, device = opened(trial(Drawing))
    assert runner.state.chain.by_call
    list(runner.steps(device, 1))
    assert runner.verified.startswith("first step equal")


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: nn.BatchNorm1d(WIDTH),
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True),
        lambda: nn.ReLU(inplace=True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_usual_layers_pass(layer: Any, dtype: Any) -> None:
    def rows() -> Any:
        return [(x.to(dtype), y.to(dtype)) for x, y in data()]

    one = trial(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(), *layers(2)).to(dtype), data=rows)
    runner, device = opened(one, 120_000)
    losses = [done.loss for done in runner.steps(device, 99)]
    assert runner.verified.startswith("first step equal to that of the model itself")
    assert losses == pytest.approx(list(lt.reference(one).losses), rel=1e-6)
    runner.close()


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        self.linear.weight.data.clamp_(-0.1, 0.1)
        return self.linear(x)


def test_weights_that_forward_writes_are_told() -> None:
    refused(
        trial(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Clamped(), *layers(2))),
        "parameter '1.linear.weight' is written outside of the optimizer",
    )


class Kept(nn.Module):
    """Batch norm, dropout, a list and a count: all that a run may leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.seen: list[float] = []
        self.table = torch.zeros(3)
        self.count = 0

    def forward(self, x: Any) -> Any:
        self.count += 1
        self.seen.append(1.0)
        self.table[0] += 1
        return self.drop(self.norm(self.linear(x)))


def shuffled() -> Any:
    for x, y in Rows(6):
        yield nn.functional.pad(x, (0, WIDTH - 6)), nn.functional.one_hot(y, WIDTH).float()


@pytest.mark.parametrize("more", [{}, {"accumulate": 2}, {"precision": "bf16"}, {"precision": "fp16"}])
def test_the_numbers_are_those_without_the_check_and_nothing_is_left_of_it(more: dict[str, Any]) -> None:
    made: list[Any] = []

    def build() -> nn.Module:
        made.append(nn.Sequential(Kept(), Kept(), Kept(), nn.Linear(WIDTH, WIDTH)))
        return made[-1]

    seen = {}
    for verify in ("first-step", False):
        found = weights_after(trial(build, data=shuffled, verify=verify, **more), 40_000)
        kept = made[-1][2]
        seen[verify] = kept.count, len(kept.seen), kept.table.tolist(), found
    assert seen["first-step"][:3] == seen[False][:3]
    assert seen[False][0] > 0
    assert all(torch.equal(tensor, seen[False][3][name]) for name, tensor in seen["first-step"][3].items())


def test_a_model_too_large_for_the_memory_that_is_free_is_not_checked_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loadmaster.train.execute.first_step.free_host_bytes", lambda: 4000)
    runner, device = opened(trial(lambda: nn.Sequential(*layers())))
    list(runner.steps(device, 1))
    assert runner.verified.startswith("not checked: a plain step takes")
    runner.close()


def test_blocks_of_a_model_whose_forward_is_of_no_use_are_compared_in_a_row() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = layers()

    runner, device = opened(trial(Parts, blocks=lambda m: [m.a, m.b, m.c]))
    list(runner.steps(device, 1))
    assert "its blocks in a row" in runner.verified
    runner.close()


class Answer(dict[str, Any]):
    """As models of `transformers` answer."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Wrapped(Chain):
    def forward(self, x: Any) -> Any:
        return Answer(logits=super().forward(x), loss=None)


@pytest.mark.parametrize("right", [True, False])
def test_blocks_that_give_the_logits_of_an_answer_are_compared_with_them(right: bool) -> None:
    def blocks(m: Any) -> Any:
        return [m.a, nn.Sequential(m.b, nn.Tanh()), m.c][:: 1 if right else -1]

    if not right:
        refused(trial(Wrapped, blocks=blocks), "the loss is")
        return
    runner, device = opened(trial(Wrapped, blocks=blocks))
    list(runner.steps(device, 1))
    assert runner.verified.startswith("first step equal to that of the model itself")
    runner.close()


def test_a_study_fails_that_trial_alone_records_both_and_trains_it_when_told(tmp_path: Any) -> None:
    def trials(**more: Any) -> list[lt.Trial]:
        more["evaluate"] = lambda _predict: {"score": 1.0}
        wrong = trial(Chain, name="wrong", blocks=lambda m: [m.b, nn.Sequential(m.a, nn.Tanh()), m.c], **more)
        return [wrong, trial(Chain, name="right", evaluate=more["evaluate"])]

    result = lt.Study(trials(), dir=tmp_path, devices="cpu", memory_cap=4 * CAP).fit()
    assert result["wrong"].error_kind == "verify"
    assert [row["checked"] for row in result.rows()] == ["differs", "yes"]
    assert "give Trial(blocks=...)" not in result["wrong"].error  # they were given
    heads = result.table().splitlines()[0].split()
    assert heads[-1] == "error"
    assert heads.index("eval") < heads.index("checked")
    assert result.to_json()["trials"][1]["verified"] == result["right"].verified
    assert "Trial(verify=False)" in result["wrong"].error
    assert result["right"].verified.startswith("first step equal to that of the model itself")
    assert result["right"].status == "done"
    again = lt.Study(trials(verify=False), dir=tmp_path, devices="cpu", memory_cap=4 * CAP)
    result = again.fit(retry_failed=True)
    assert result["wrong"].status == "done"
    assert result["wrong"].verified == ""
    assert result["right"].verified.startswith("first step equal")


def test_a_member_of_a_group_that_would_be_trained_otherwise_fails_alone() -> None:
    from loadmaster.train.backbone.group import open_group, steps
    from tests.train.lora_trials import NUM_LAYERS, lora
    from tests.train.lora_trials import build as made
    from tests.train.lora_trials import loss as usual

    models: list[nn.Module] = []

    def build() -> nn.Module:
        models.append(made())
        return models[-1]

    def loss(out: Any, targets: Any) -> Any:
        weights = [p for p in models[-1].parameters() if p.requires_grad]
        return usual(out, targets) + 1e-2 * sum(p.square().sum() for p in weights)

    trials = [
        lora("a", seed=1),
        lora("odd", seed=2, build=build, loss=loss),
        lora("c", accumulate=2, rng="counter"),
    ]
    device = CpuDevice(cap_bytes=1 << 20)
    group = open_group(trials, device=device, cuts=range(NUM_LAYERS + 2), num_places=3)
    losses: dict[str, list[float]] = {"a": [], "c": []}
    for number, told in enumerate(steps(group, 99)):
        for each in told:
            if each.state.trial.name == "odd":
                assert number == 0
                assert "the gradient of '1.down'" in str(each.error)
            elif not each.over:
                losses[each.state.trial.name].append(each.loss)
    for state in group.states:
        assert state.verified == "first step equal to that of the model itself (loss and 12 gradients)"
        assert losses[state.trial.name] == list(lt.reference(state.trial).losses)
    assert len(group.states) == 2
    group.leave()
    assert device.arena.used_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("cap_bytes", [1 << 30, 300 << 20])
def test_on_a_gpu_what_is_right_passes_what_is_wrong_fails_and_the_numbers_stay(
    precision: str, cap_bytes: int
) -> None:
    from loadmaster.shards.device.cuda_device import CudaDevice

    def build() -> nn.Module:
        parts = [nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Dropout(0.1)) for _ in range(24)]
        return nn.Sequential(*parts)

    def rows() -> Any:
        made = torch.Generator().manual_seed(1)
        return [(torch.randn(64, 512, generator=made), torch.randn(64, 512, generator=made))] * 4

    made: list[Any] = []

    def kept() -> nn.Module:
        made.append(build())
        return made[-1]

    def penalty(out: Any, target: Any) -> Any:
        first = next(made[-1].parameters())
        return mse(out.float(), target) + 0.1 * first.square().sum().to(out.device)

    def ran(**more: Any) -> tuple[str, dict[str, Any]]:
        device = CudaDevice("cuda:0", cap_bytes=cap_bytes)
        given: dict[str, Any] = {"data": rows, "precision": precision, "loss": lambda o, y: mse(o.float(), y)}
        runner = lt.open_runner(
            trial(more.pop("build", build), **(given | more)), device=device, optimizer_placement="device"
        )
        try:
            list(runner.steps(device, 99))
            return runner.verified, {name: t.clone() for name, t in runner.state_dict().items()}
        finally:
            runner.close()

    verified, with_check = ran()
    assert verified.startswith("first step equal to that of the model itself"), verified
    _, without = ran(verify=False)
    assert all(torch.equal(tensor, without[name]) for name, tensor in with_check.items())
    with pytest.raises(VerifyError, match=r"the gradient of '0.0.weight'"):
        ran(build=kept, loss=penalty)


def test_parameters_that_the_optimizer_does_not_have_stay_as_they_are_and_are_not_compared() -> None:
    def matrices(weights: Any) -> Any:  # Muon, for one, takes no others
        return torch.optim.SGD([each for each in weights if each.dim() == 2], lr=0.02)

    def build() -> nn.Module:
        return nn.Sequential(*layers())

    torch.manual_seed(0)
    model = build()
    optimizer = matrices(list(model.parameters()))
    for x, y in data():
        model.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    found = weights_after(trial(build, optim=lambda weights: matrices(list(weights))))
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
