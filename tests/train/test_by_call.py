"""Models that run their own forward, weights brought around calls: the bits of a plain loop."""

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import loadmaster.train as lt
from loadmaster.core.errors import DeviceMemoryError, InputError, RunError, VerifyError
from loadmaster.shards.device.cpu_device import CpuDevice
from loadmaster.shards.model.built_model import build_trial
from loadmaster.train.execute.runner import open_runner

WIDTH, VOCAB = 16, 96


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.drop(self.down(torch.tanh(self.up(self.norm(value)))))


class Net(nn.Module):
    """Embedding, layers, tied head; takes a dict with labels and gives its own loss."""

    def __init__(self, layers: int = 4, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        if tied:
            self.head.weight = self.embed.weight

    def run(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = layer(value)
        return value

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(self.run(self.embed(ids)) * self.scale))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batches(count: int = 4, *, rows: int = 3) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(5)
    found = [torch.randint(0, VOCAB, (rows, 7), generator=made) for _ in range(count)]
    return [{"ids": each, "labels": each.flip(1)} for each in found]


def trial_of(build: Callable[[], nn.Module] = Net, **fields: Any) -> lt.Trial:
    given: dict[str, Any] = {
        "name": "net",
        "build": build,
        "data": batches,
        "optim": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
        "seed": 4,
    }
    return lt.Trial(**(given | fields))


def plain(trial: lt.Trial) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loop that anyone would write."""
    torch.manual_seed(trial.seed)
    random.seed(trial.seed)
    np.random.seed(trial.seed)
    model = trial.build().train()
    optimizer = trial.optim([each for each in model.parameters() if each.requires_grad])
    losses, waiting, steps = [], [], list(trial.data())
    for at, batch in enumerate(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=trial.precision == "bf16"):
            loss = model(**batch)["loss"]
        waiting.append(loss.item())
        (loss / trial.accumulate if trial.accumulate > 1 else loss).backward()
        if (at + 1) % trial.accumulate == 0:
            if trial.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), trial.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(each / len(waiting) for each in waiting))
            waiting = []
    return losses, model.state_dict()


def by_call(
    trial: lt.Trial,
    placement: Any = "device",
    *,
    again: Any = "every other",
    jitter_s: float = 0.0,
    num_slots: int = 2,
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """By shards; by hand, so that weights do come and go."""
    device = CpuDevice(cap_bytes=1 << 28, jitter_s=jitter_s)
    runner = open_runner(trial, device=device, placement=placement, num_slots=num_slots)
    try:
        assert runner.state.chain.by_call
        calls = runner.state.facts.calls
        wanted = {"every other": lambda at: at % 2 == 0, "all": lambda at: True, "none": lambda at: False}[
            again
        ]
        chosen = tuple(may and wanted(at) for at, may in enumerate(calls.may_recompute))
        runner.config = replace(runner.config, recompute=chosen)
        losses = [done.loss for done in runner.steps(device, 99)]
        state = {name: each.clone() for name, each in runner.state_dict().items()}
        return losses, state, runner.state
    finally:
        runner.close()
        device.close()


def check(trial: lt.Trial, **how: Any) -> Any:
    wanted, weights = plain(trial)
    losses, state, kept = by_call(trial, **how)
    assert losses == wanted
    assert [name for name, each in weights.items() if not torch.equal(each, state[name])] == []
    return kept


@pytest.mark.parametrize("again", ["none", "every other", "all"])
@pytest.mark.parametrize("placement", ["device", "host", "pinned"])
def test_own_forward_trains_with_the_bits_of_a_plain_loop(placement: str, again: str) -> None:
    kept = check(trial_of(), placement=placement, again=again)
    assert kept.verified.startswith("first step equal")


def test_late_copies_change_nothing() -> None:
    check(trial_of(), jitter_s=2e-3, num_slots=3)


@pytest.mark.parametrize(
    "fields", [{"accumulate": 2}, {"clip_norm": 0.1}, {"accumulate": 2, "clip_norm": 0.1}]
)
@pytest.mark.parametrize("placement", ["device", "host", "pinned"])
def test_accumulation_and_clipping_by_call_are_those_of_a_plain_loop(placement: str, fields: Any) -> None:
    check(trial_of(**fields), placement=placement)


@pytest.mark.parametrize("again", ["none", "all"])
def test_autocast_by_call_is_that_of_a_plain_loop(again: str) -> None:
    check(trial_of(precision="bf16"), again=again)


def test_untied_model_without_a_rest_trains() -> None:
    class Bare(Net):
        def __init__(self) -> None:
            super().__init__(tied=False)
            del self.scale
            self.scale = 1.0

    check(trial_of(Bare))


class Shuffled(Net):
    """The order of calls, and which layers are called, is another at every step."""

    def __init__(self) -> None:
        super().__init__(6)
        self.turn = 0

    def run(self, value: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        order = random.Random(self.turn).sample(range(6), 6 if self.turn == 1 else 4)
        for at in order:
            value = self.layers[at](value)
        return value


@pytest.mark.parametrize("again", ["none", "every other"])
def test_order_of_calls_that_changes_at_every_step_is_followed(again: str) -> None:
    check(trial_of(Shuffled, data=lambda: batches(6)), again=again, placement="device", num_slots=2)


class Twice(Net):
    """Layers are called twice, as ALBERT does."""

    def run(self, value: torch.Tensor) -> torch.Tensor:
        return super().run(super().run(value))


@pytest.mark.parametrize("again", ["none", "all"])
def test_layer_called_twice_is_stepped_once(again: str) -> None:
    check(trial_of(Twice), again=again)


class Peeking(Net):
    """A layer also runs without gradients."""

    def run(self, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hint = self.layers[2](value)
        return super().run(value + 0.1 * hint)


@pytest.mark.parametrize("again", ["none", "all"])
def test_layer_under_no_grad_is_run(again: str) -> None:
    check(trial_of(Peeking), again=again)


class Threaded(Net):
    """A layer runs in another thread."""

    def run(self, value: torch.Tensor) -> torch.Tensor:
        found = []
        worker = threading.Thread(target=lambda: found.append(self.layers[1](value)))
        worker.start()
        worker.join()
        return self.layers[3](self.layers[2](self.layers[0](found[0])))


def test_layer_in_another_thread_is_run() -> None:
    check(trial_of(Threaded), again="none")


class Scaling(Layer):
    """Saves nothing of its input."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value * 2.0)


class Writing(Net):
    """A layer's input is written in place after the call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaling() for _ in range(4))

    def run(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            given = value * 1.0
            made = layer(given)
            given.add_(1.0)
            value = made + given
        return value


def test_shard_whose_input_is_written_in_place_is_not_run_again() -> None:
    trial = trial_of(Writing)
    built = build_trial(trial, device=torch.device("cpu"))
    calls = built.facts.calls
    assert calls is not None
    layers = [at for at, name in enumerate(built.chain.block_name) if name.startswith("layers")]
    assert not any(calls.may_recompute[at] for at in layers)
    check(trial, again="all")


class Outside(Net):
    """A weight of a layer is also read outside of its calls."""

    def run(self, value: torch.Tensor) -> torch.Tensor:
        value = super().run(value)
        return value + nn.functional.linear(value, self.layers[1].up.weight[:WIDTH])


def test_weight_read_outside_of_its_layer_stays() -> None:
    kept = check(trial_of(Outside))
    names = {kept.chain.parameter_name[number] for number in kept.chain.rest}
    assert "layers.1.up.weight" in names


class Counted(Net):
    """Batch norm, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(7)) for _ in range(3)
        )
        self.register_buffer("seen", torch.zeros(()))

    def run(self, value: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.0)
        for each in self.between:
            value = value + each(value)
        return super().run(value)


@pytest.mark.parametrize("again", ["none", "all"])
def test_buffers_are_written_once(again: str) -> None:
    check(trial_of(Counted), again=again)


def test_user_hooks_are_kept_and_called_once() -> None:
    seen: list[str] = []

    def build() -> nn.Module:
        net = Net()
        net.layers[1].register_forward_hook(lambda module, given, out: seen.append("forward"))
        net.layers[1].register_full_backward_hook(lambda module, grads, outs: seen.append("backward"))
        net.register_forward_hook(lambda module, given, out: seen.append("model"))
        return net

    _, _, kept = by_call(trial_of(build, verify=False), again="all")
    at = kept.chain.block_name.index("layers.1")
    assert not kept.facts.calls.may_recompute[at]
    seen.clear()
    by_call(trial_of(build, verify=False, max_steps=1), again="all")
    profiled = 1  # on fake tensors, where memory is planned
    assert [seen.count(each) - profiled for each in ("forward", "backward", "model")] == [1, 1, 1]


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].compile(backend="eager")


def test_compiled_child_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"layers\.1.*compile"):
        build_trial(trial_of(Compiled), device=torch.device("cpu"))


class Checkpointed(Net):
    """Checkpoints its layers as transformers does, where it is asked to."""

    gradient_checkpointing = True

    def run(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.gradient_checkpointing:
                value = torch.utils.checkpoint.checkpoint(layer, value, use_reentrant=False)
            else:
                value = layer(value)
        return value


def test_checkpointing_that_is_on_already_is_not_done_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = check(trial_of(Checkpointed), again="all")
    assert kept.chain.model.gradient_checkpointing  # off only while it trains

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the model checkpoints by itself")

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", never)
    by_call(trial_of(Checkpointed, verify=False), again="all")


def test_modules_without_parameters_are_no_shards() -> None:
    class Acts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.acts = nn.ModuleList(nn.GELU() for _ in range(4))

        def run(self, value: torch.Tensor) -> torch.Tensor:
            for act, layer in zip(self.acts, self.layers, strict=True):
                value = act(layer(value))
            return value

    kept = check(trial_of(Acts))
    assert not any(name.startswith("acts") for name in kept.chain.block_name)


def test_module_whose_forward_is_bypassed_is_found_out() -> None:
    class Bypass(Net):
        def run(self, value: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                value = layer.forward(value)
            return value

    check(trial_of(Bypass))  # its layers are opened, and their children are called


def test_parameter_without_gradient_is_named_and_left_alone() -> None:
    class Spare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(WIDTH, WIDTH)

    with pytest.warns(RuntimeWarning, match=r"spare\.weight"):
        check(trial_of(Spare))


def test_forward_that_differs_from_step_to_step_by_itself_fails_the_check() -> None:
    class Odd(Net):
        def run(self, value: torch.Tensor) -> torch.Tensor:
            Odd.turn = getattr(Odd, "turn", 0) + 1
            return super().run(value) * torch.linspace(1.0, 1.0 + Odd.turn, WIDTH)

    with pytest.raises(VerifyError):
        by_call(trial_of(Odd))


def test_loss_that_the_output_does_not_hold_is_said() -> None:
    class Silent(Net):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"logits": super().forward(ids, labels)["logits"]}

    with pytest.raises(InputError, match="holds no loss"):
        build_trial(trial_of(Silent), device=torch.device("cpu"))


def test_error_of_the_models_own_is_raised_as_it_is() -> None:
    class Broken(Net):
        def run(self, value: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        build_trial(trial_of(Broken), device=torch.device("cpu"))


def test_counted_random_numbers_need_blocks() -> None:
    with pytest.raises(InputError, match="counter"):
        build_trial(trial_of(rng="counter"), device=torch.device("cpu"))


def test_cap_of_a_third_of_the_need_holds() -> None:
    def build() -> nn.Module:
        return Net(12)

    trial = trial_of(build)
    roomy = CpuDevice(cap_bytes=1 << 30)
    whole = open_runner(trial, device=roomy)
    need = whole.plan.peak_bytes
    whole.close()
    roomy.close()
    device = CpuDevice(cap_bytes=need // 3)
    runner = open_runner(trial, device=device)
    try:
        losses = [done.loss for done in runner.steps(device, 99)]
        state = {name: each.clone() for name, each in runner.state_dict().items()}
        assert device.arena.peak_bytes <= need // 3
        assert "pinned" in runner.plan.placement or runner.plan.layout.recompute
    finally:
        runner.close()
        device.close()
    wanted, weights = plain(trial)
    assert losses == wanted
    assert all(torch.equal(each, state[name]) for name, each in weights.items())


def test_cap_below_the_largest_part_is_refused_with_its_name() -> None:
    device = CpuDevice(cap_bytes=10_000)
    with pytest.raises(DeviceMemoryError, match="raise memory_cap"):
        open_runner(trial_of(), device=device)
    device.close()


def test_killed_and_resumed_study_by_call_has_the_same_weights(tmp_path: Any) -> None:
    def trial() -> lt.Trial:
        return trial_of(data=lambda: batches(6))

    first = lt.Study(trial(), dir=tmp_path / "whole", devices="cpu", memory_cap="1MiB").fit()
    halted = lt.Study(
        trial(),
        dir=tmp_path / "parts",
        devices="cpu",
        memory_cap="1MiB",
        checkpoint_every=1,
        callbacks=[_Stop(3)],
    )
    with pytest.raises(RunError, match="enough"):
        halted.fit()
    moved = tmp_path / "elsewhere"
    (tmp_path / "parts").rename(moved)  # to another machine, say
    again = lt.Study(trial(), dir=moved, devices="cpu", memory_cap="1MiB", checkpoint_every=1).fit()
    left, right = first["net"].state_dict(), again["net"].state_dict()
    assert again["net"].step == 6
    assert all(torch.equal(left[name], right[name]) for name in left)


class _Stop:
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, trial: str, done: Any) -> None:
        if done.step == self._step:
            raise RuntimeError("enough")


def test_scalar_parameter_is_stepped_by_the_fused_kernel() -> None:
    class Tempered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.5))

        def run(self, value: torch.Tensor) -> torch.Tensor:
            return super().run(value) * self.temperature

    for placement in ("device", "host", "pinned"):
        check(trial_of(Tempered), placement=placement)


def test_recurrent_layers_keep_the_bits_of_a_plain_loop() -> None:
    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))

        def run(self, value: torch.Tensor) -> torch.Tensor:
            for cell in self.cells:
                value = value + cell(value)[0]
            return super().run(value)

    check(trial_of(Recurrent), again="all")
