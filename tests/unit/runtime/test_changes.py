"""Python that changes between two calls of a placed model: the numbers are those of the unplaced model."""

import array
import collections
import contextvars
import functools
import gc
import itertools
import multiprocessing
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")
from torch import nn  # noqa: E402

import loadmaster as lm  # noqa: E402
from loadmaster.runtime.place_request import is_run_by_hooks  # noqa: E402
from loadmaster.zoo.example import Example  # noqa: E402
from tests.placing import captured, first_difference, placed, random_plan, trained  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 8
HERE = sys.modules[__name__]


def attention_fn(x: Any) -> Any:
    return x.tanh()


def other_fn(x: Any) -> Any:
    return x.sin()


def scaled(x: Any, by: float = 2.0, *, more: float = 0.5) -> Any:
    return x * by + more


def _closed_over(factor: float) -> Callable[[Any], Any]:
    def inner(x: Any) -> Any:
        return x * factor

    return inner


closed = _closed_over(3.0)
FACTORS = {"all": [1.0, 2.0], "name": "tanh"}
ARRAY = np.array([1.0, 2.0])
GLOBAL = torch.ones(WIDTH)
SETTING = 1.5
TABLE = {"act": attention_fn}
CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
OF_THREAD = threading.local()
OF_THREAD.by = 1.0
BYTES, NUMBERS = bytearray(b"\x01"), array.array("d", [1.0])
SHARED = multiprocessing.Value("d", 1.0)  # as a curriculum's worker has it
BEHIND = {"by": 1.0}
READ_ONLY = types.MappingProxyType(BEHIND)
PRIOR = torch.distributions.Normal(0.0, 1.0)


@functools.cache
def cached() -> float:
    return FACTORS["all"][1]


class Options(collections.UserDict[str, float]):
    """Settings, as libraries of them are written."""


class Subject:
    """What a weak table has a value for."""


OPTIONS, SUBJECT = Options(by=1.0), Subject()
WEAK = weakref.WeakKeyDictionary({SUBJECT: 1.0})


@functools.singledispatch
def dispatched(kind: Any, x: Any) -> Any:
    return x * 1.0


class Scale:
    """A helper that is no module, with a name that says nothing of settings."""

    kind = 1.0

    def __init__(self) -> None:
        self.by, self.deep = 2.0, SimpleNamespace(value=[1.0])

    def apply(self, x: Any) -> Any:
        return x * self.by * self.kind * self.deep.value[0]


class Slotted:
    __slots__ = ("by",)

    def __init__(self) -> None:
        self.by = 2.0


HELPER, SLOTTED = Scale(), Slotted()


class Inner(nn.Module):
    bias_by = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.finish(self.fc(x)) * self.bias_by

    def finish(self, x: Any) -> Any:
        return x + 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Inner(), nn.Linear(WIDTH, WIDTH)
        self.scale, self.table = Scale(), [1.0, 2.0]

    def forward(self, x: Any) -> Any:
        y = scaled(attention_fn(self.inner(x)))
        y = self.scale.apply(closed(y)) + HELPER.apply(y) * SLOTTED.by
        y = TABLE["act"](y * 0.01) * SETTING * self.table[0] * cached()
        y = y * float(ARRAY[0]) + GLOBAL if FACTORS["name"] == "tanh" else y
        y = dispatched(self.scale, y) * CONTEXT.get() * OF_THREAD.by * BYTES[0] * NUMBERS[0] * SHARED.value
        y = y * READ_ONLY["by"] * OPTIONS["by"] * WEAK[SUBJECT] + PRIOR.mean
        y = y * float(os.environ.get("A_FACTOR", "1"))
        return nn.functional.relu(self.last(y))


def both(kind: Any = Net) -> tuple[Any, Any, Any]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind())
    example = Example(models[1], (torch.randn(4, WIDTH),))
    return models[0], placed(example, random_plan(captured(example), 2, 3)), example.args[0]


def same(plain: Any, model: Any, x: Any) -> bool:
    outs, grads = [], []
    for one in (plain, model):
        torch.manual_seed(7)
        outs.append(one(x))
        outs[-1].sum().backward()
        grads.append([weight.grad.clone() for weight in one.parameters()])
        one.zero_grad()
    return torch.equal(*outs) and all(map(torch.equal, *grads))


def _wrap_call(monkeypatch: Any, model: Any) -> None:
    before = Inner.__call__
    monkeypatch.setattr(Inner, "__call__", lambda self, x: before(self, x) * 2)


def _wrap_own_forward(monkeypatch: Any, model: Any) -> None:
    before = model.inner.forward
    monkeypatch.setattr(model.inner, "forward", lambda x: before(x) * 2)


def _wrap_torchs_forward(monkeypatch: Any, model: Any) -> None:
    before = model.last.forward
    monkeypatch.setattr(model.last, "forward", lambda x: before(x) * 2)


def _set(*path: Any) -> Callable[[Any, Any], None]:
    """Set an attribute of something, of the model where it is named first."""
    *owners, name, value = path

    def change(monkeypatch: Any, model: Any) -> None:
        owner = model if owners[0] is None else owners[0]
        for each in owners[1:]:
            owner = getattr(owner, each)
        monkeypatch.setattr(owner, name, value)

    return change


_UNDO: list[Callable[[], None]] = []


def _set_item(owner: Callable[[Any], Any], key: Any, value: Any) -> Callable[[Any, Any], None]:
    def change(monkeypatch: Any, model: Any) -> None:
        held = owner(model)
        if isinstance(held, dict | os._Environ):
            monkeypatch.setitem(held, key, value)
            return
        before = held[key]
        held[key] = value
        _UNDO.append(lambda: held.__setitem__(key, before))

    return change


def _clear_cache(monkeypatch: Any, model: Any) -> None:
    monkeypatch.setitem(FACTORS, "all", [1.0, 5.0])
    cached.cache_clear()


def _fill_global(monkeypatch: Any, model: Any) -> None:
    monkeypatch.setattr(HERE, "GLOBAL", torch.full((WIDTH,), 2.0))


def _dispatch(monkeypatch: Any, model: Any) -> None:
    dispatched.register(Scale, lambda kind, x: x * 3.0)
    _UNDO.append(lambda: dispatched.register(Scale, dispatched.dispatch(object)) and None)


def _set_context(monkeypatch: Any, model: Any) -> None:
    CONTEXT.set(3.0)
    _UNDO.append(lambda: CONTEXT.set(1.0) and None)


CHANGES: dict[str, Callable[[Any, Any], None]] = {
    "forward of a class": _set(Inner, "forward", lambda self, x: self.fc(x) * 3),
    "forward of a class of torch's": _set(
        nn.Linear, "forward", lambda self, x: x @ self.weight.T - self.bias
    ),
    "forward of a module": _wrap_own_forward,
    "forward of a module of torch's": _wrap_torchs_forward,
    "__call__ of a class": _wrap_call,
    "__call__ of all modules": _set(
        nn.Module, "__call__", lambda self, *args: nn.Module._wrapped_call_impl(self, *args) * 1.5
    ),
    "method of a class": _set(Inner, "finish", lambda self, x: x - 1.0),
    "method of a module": _set(None, "inner", "finish", lambda x: x - 1.0),
    "class attribute": _set(Inner, "bias_by", 2.0),
    "function in globals": _set(HERE, "attention_fn", other_fn),
    "function of torch's": _set(torch.nn.functional, "relu", torch.sin),
    "value in globals": _set(HERE, "SETTING", 0.5),
    "tensor in globals": _fill_global,
    "function in a table": _set_item(lambda _: TABLE, "act", other_fn),
    "text in a table": _set_item(lambda _: FACTORS, "name", "sin"),
    "number in an array": _set_item(lambda _: ARRAY, 0, 4.0),
    "number in a list of a module": _set_item(lambda model: model.table, 0, 4.0),
    "default argument": _set(scaled, "__defaults__", (5.0,)),
    "default argument by name": _set_item(lambda _: scaled.__kwdefaults__, "more", 5.0),
    "code of a function": _set(attention_fn, "__code__", other_fn.__code__),
    "closure": lambda patch, _: patch.setattr(closed.__closure__[0], "cell_contents", 5.0),  # type: ignore[attr-defined]
    "functools cache": _clear_cache,
    "attribute of a module's helper": _set(None, "scale", "by", 5.0),
    "attribute deep in a helper": _set_item(lambda model: model.scale.deep.value, 0, 5.0),
    "method of a helper's class": _set(Scale, "apply", lambda self, x: x - self.by),
    "method of a helper": _set(None, "scale", "apply", lambda x: x - 1.0),
    "class attribute of a helper": _set(Scale, "kind", 3.0),
    "attribute of a global helper": _set(HELPER, "by", 5.0),
    "attribute in a slot": _set(SLOTTED, "by", 5.0),
    "context variable": _set_context,
    "value of a thread": _set(OF_THREAD, "by", 3.0),
    "byte array": _set_item(lambda _: BYTES, 0, 3),
    "array of numbers": _set_item(lambda _: NUMBERS, 0, 3.0),
    "value shared with a process": _set(SHARED, "value", 3.0),
    "what a read-only view shows": _set_item(lambda _: BEHIND, "by", 3.0),
    "own kind of UserDict": _set_item(lambda _: OPTIONS.data, "by", 3.0),
    "value in a weak table": _set_item(lambda _: WEAK.data, weakref.ref(SUBJECT), 3.0),
    "single dispatch": _dispatch,
    "distribution of torch's": _set(PRIOR, "loc", torch.tensor(0.5)),
    "environment": _set_item(lambda _: os.environ, "A_FACTOR", "3"),
}


QUICK = (
    "context variable",
    "forward of a class",
    "forward of a module",
    "function in globals",
    "functools cache",
)


@pytest.mark.parametrize(
    "what", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in CHANGES]
)
def test_a_change_in_python_between_two_calls_is_seen(what: str, monkeypatch: Any) -> None:
    cached.cache_clear()
    plain, model, x = both()
    assert same(plain, model, x)
    before = plain(x).detach()
    assert not model.notes
    with monkeypatch.context() as patch:
        for one in (plain, model):
            CHANGES[what](patch, one)
        assert not torch.equal(before, plain(x)), "the change changes something"
        assert same(plain, model, x)
        assert model.notes, "it is said"
    while _UNDO:
        _UNDO.pop()()
    cached.cache_clear()
    assert same(plain, model, x)
    assert torch.equal(before, model(x)), "and seen when it is taken back"


@pytest.mark.slow
def test_a_global_tensor_that_is_written_to_is_seen() -> None:
    plain, model, x = both()
    assert same(plain, model, x)
    GLOBAL.mul_(3)
    assert same(plain, model, x)
    GLOBAL.fill_(1)


class Counts(nn.Module):
    """Counts in an object that nobody would take for settings."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.state = nn.Linear(WIDTH, WIDTH), Scale()

    def forward(self, x: Any) -> Any:
        self.state.by += 1.0
        return self.fc(x) * self.state.by


def test_a_forward_that_counts_in_an_object_is_run_module_by_module() -> None:
    plain, model, x = both(Counts)
    assert [same(plain, model, x) for _ in range(3)] == [True] * 3
    assert any("changes" in note and "by" in note for note in model.notes)


class Draws(nn.Module):
    def __init__(self, source: Any) -> None:
        super().__init__()
        self.fc, self.source = nn.Linear(WIDTH, WIDTH), source

    def forward(self, x: Any) -> Any:
        drawn = next(self.source) if hasattr(self.source, "__next__") else self.source.random()
        return self.fc(x) * drawn


@pytest.mark.parametrize(
    "make", [itertools.count, lambda: random.Random(3), lambda: np.random.default_rng(3)]
)
def test_a_generator_of_the_users_own_is_asked_at_every_call(make: Any) -> None:
    torch.manual_seed(0)
    plain = Draws(make())
    torch.manual_seed(0)
    again = Example(Draws(make()), (torch.randn(4, WIDTH),))
    model = placed(again, random_plan(captured(again), 2, 3))
    model(*again.args)
    model.source, plain.source = make(), make()  # planning may have drawn
    for _ in range(3):
        assert torch.equal(plain(*again.args), model(*again.args))


OUTSIDE = nn.Linear(WIDTH, WIDTH)


class Around(nn.Module):
    """Reads a module that is none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return OUTSIDE(self.fc(x))


def test_a_module_outside_of_the_model_is_trained_as_it_is_unplaced() -> None:
    plain, model, x = both(Around)
    grads = []
    for one in (plain, model):
        OUTSIDE.zero_grad()
        one(x).sum().backward()
        grads.append(OUTSIDE.weight.grad.clone())
    assert torch.equal(*grads)


def test_hooks_of_all_modules_are_called() -> None:
    plain, model, x = both()
    assert same(plain, model, x)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 1.5)
    try:
        assert same(plain, model, x)
    finally:
        handle.remove()
    assert same(plain, model, x)


def test_a_model_under_hooks_of_all_modules_is_planned_for_the_hook_engine() -> None:
    plain, _, x = both()
    assert not is_run_by_hooks(plain, x, {})
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 1.5)
    try:
        assert is_run_by_hooks(plain, x, {})
    finally:
        handle.remove()
    with Doubling():
        assert is_run_by_hooks(plain, x, {})


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is nn.functional.relu else out


def test_a_mode_around_the_call_is_heeded() -> None:
    plain, model, x = both()
    assert same(plain, model, x)
    with Doubling():
        assert torch.equal(plain(x), model(x))
    assert same(plain, model, x)


def test_two_values_in_turn_have_a_graph_each(monkeypatch: Any) -> None:
    plain, model, x = both()
    for value in (1.5, 0.5, 1.5, 0.5, 1.5):
        monkeypatch.setattr(HERE, "SETTING", value)
        assert same(plain, model, x)
    assert len(model._engine.graphs) == 2
    monkeypatch.setattr(HERE, "SETTING", float("1.5"))  # another object, the same value
    assert same(plain, model, x)
    assert len(model._engine.graphs) == 2


@pytest.mark.slow
def test_values_that_go_on_changing_are_run_module_by_module(monkeypatch: Any) -> None:
    plain, model, x = both()
    for value in range(8):
        monkeypatch.setattr(HERE, "SETTING", 1.0 + value)
        assert same(plain, model, x)
    assert any("SETTING" in note and "changes from call to call" in note for note in model.notes)


@pytest.mark.slow
def test_training_goes_on_with_another_forward(monkeypatch: Any) -> None:
    plain, model, x = both()
    example = Example(plain, (x,))
    assert first_difference(trained(plain, example, steps=2), trained(model, example, steps=2)) == ""
    monkeypatch.setattr(HERE, "attention_fn", other_fn)
    assert first_difference(trained(plain, example, steps=2), trained(model, example, steps=2)) == ""


def test_what_runs_when_memory_is_freed_is_not_the_models() -> None:
    """A collector's callback that counts was taken for a forward that changes what it reads."""
    count = [0]

    def counted(phase: str, _: Any) -> None:
        count[0] += 1

    class Collects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.linear(x)

    gc.callbacks.append(counted)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        model = Collects()
        mine: Any = lm.place(model, torch.zeros(2, 4), devices="cpu#0-64MB, cpu#1-64MB", budget="20x")
        mine(torch.zeros(2, 4))
        mine(torch.zeros(2, 4))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(counted)
    assert count[0]
    assert len(mine._engine.graphs) == 1
    assert not any("hooks" in note or "again" in note for note in mine.notes)
