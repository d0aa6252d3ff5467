"""Odd models that people bring, tiny: a model, its inputs, and the options of capture that it needs."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra [torch]")
from torch import nn  # noqa: E402
from torch.nn import functional as f  # noqa: E402
from torch.nn.utils import parametrizations, rnn  # noqa: E402


class Odd(NamedTuple):
    """What `capture` is given."""

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012


MODELS: dict[str, Callable[[], Odd]] = {}
OWN_GRADIENTS = ("own gradient", "hooks", "a hook on a tensor")
READS_VALUES = ("item", "array", "experts", "mask")  # of weights or floating inputs: a real run says them
NOT_EXPORTED = (*READS_VALUES, "ctc", "packed", "object input", "vmap", *OWN_GRADIENTS)


def odd(name: str) -> Callable[[Callable[[], Odd]], Callable[[], Odd]]:
    def add(build: Callable[[], Odd]) -> Callable[[], Odd]:
        MODELS[name] = build
        return build

    return add


class With(nn.Module):
    """Parts by name, and a function of them and the inputs."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def x(*shape: int) -> Any:
    return torch.randn(*shape)


class Square(torch.autograd.Function):
    """The user's own gradient."""

    @staticmethod
    def forward(ctx: Any, value: Any, factor: float) -> Any:
        ctx.save_for_backward(value)
        ctx.factor = factor
        return value * value * factor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (value,) = ctx.saved_tensors
        return 2 * value * grads[0] * ctx.factor, None


class Unfakeable(Square):
    """A gradient that needs values, so that autograd cannot run it on fake tensors."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (value,) = ctx.saved_tensors
        assert value.data_ptr()
        return 2 * value * grads[0] * ctx.factor, None


@odd("own gradient")
def _() -> Odd:
    return Odd(
        With(lambda m, v: m.b(Square.apply(m.a(v), 3.0)), a=nn.Linear(8, 8), b=nn.Linear(8, 4)), (x(16, 8),)
    )


@odd("weight norm")
def _() -> Odd:
    return Odd(
        nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 2)), (x(4, 8),)
    )


@odd("spectral norm")
def _() -> Odd:
    return Odd(nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 16)), nn.Linear(16, 2)), (x(4, 8),))


@odd("attention module")
def _() -> Odd:
    return Odd(
        With(lambda m, v: m.a(v, v, v)[0], a=nn.MultiheadAttention(16, 4, dropout=0.1)), (x(6, 2, 16),)
    )


@odd("transformer encoder")
def _() -> Odd:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return Odd(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (x(2, 6, 16),))


@dataclasses.dataclass
class Answer:
    scores: Any
    inner: Any


@odd("dataclass output")
def _() -> Odd:
    return Odd(With(lambda m, v: Answer(m.a(v), {"more": [m.a(v).relu()]}), a=nn.Linear(8, 4)), (x(4, 8),))


class Pair(NamedTuple):
    one: Any
    other: Any


@odd("named tuple output")
def _() -> Odd:
    return Odd(With(lambda m, v: Pair(m.a(v), [m.a(v).relu(), None]), a=nn.Linear(8, 4)), (x(4, 8),))


@odd("dictionary input")
def _() -> Odd:
    batch = {"x": x(4, 8), "more": {"scale": x(4, 1), "count": 3}}
    return Odd(With(lambda m, b: m.a(b["x"]) * b["more"]["scale"], a=nn.Linear(8, 4)), (batch,))


class Batch:
    def __init__(self) -> None:
        self.x, self.y = x(4, 8), torch.arange(4) % 4


@odd("object input")
def _() -> Odd:
    return Odd(With(lambda m, b: f.cross_entropy(m.a(b.x), b.y), a=nn.Linear(8, 4)), (Batch(),))


@odd("keywords, None and plain values")
def _() -> Odd:
    def run(m: Any, *, v: Any, mask: Any, mode: str, scale: float) -> Any:
        return m.a(v) * scale if mask is None and mode == "a" else v

    return Odd(With(run, a=nn.Linear(8, 4)), (), {"v": x(4, 8), "mask": None, "mode": "a", "scale": 2.0})


@odd("complex numbers")
def _() -> Odd:
    weight = nn.Parameter(torch.randn(8, 5, dtype=torch.complex64))
    return Odd(
        With(lambda m, v: torch.fft.irfft(torch.fft.rfft(v) * m.w).pow(2).mean(), w=weight), (x(8, 8),)
    )


@odd("bfloat16 weights")
def _() -> Odd:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).bfloat16()
    return Odd(model, (x(4, 8).bfloat16(),))


@odd("embedding bag")
def _() -> Odd:
    model = With(lambda m, t, o: m.b(m.a(t, o)), a=nn.EmbeddingBag(50, 8), b=nn.Linear(8, 2))
    return Odd(model, (torch.randint(0, 50, (12,)), torch.tensor([0, 4, 8])))


@odd("bidirectional GRU")
def _() -> Odd:
    return Odd(With(lambda m, v: m.a(v)[0], a=nn.GRU(8, 16, 2, bidirectional=True)), (x(7, 3, 8),))


@odd("packed")
def _() -> Odd:
    def run(m: Any, v: Any, lengths: Any) -> Any:
        packed = rnn.pack_padded_sequence(v, lengths, batch_first=True, enforce_sorted=False)
        return rnn.pad_packed_sequence(m.a(packed)[0], batch_first=True)[0]

    return Odd(With(run, a=nn.LSTM(8, 16, batch_first=True)), (x(3, 7, 8), torch.tensor([7, 5, 2])))


@odd("transposed convolution, group norm")
def _() -> Odd:
    layers = nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1)
    return Odd(nn.Sequential(*layers), (x(2, 3, 16, 16),))


@odd("in place")
def _() -> Odd:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten()
    return Odd(nn.Sequential(*layers, nn.Linear(512, 2)), (x(2, 3, 8, 8),))


@odd("buffers that change")
def _() -> Odd:
    def run(m: Any, v: Any) -> Any:
        y = m.a(v)
        m.count += 1
        m.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y - m.mean

    return Odd(With(run, a=nn.Linear(8, 4), count=torch.zeros(1), mean=torch.zeros(4)), (x(6, 8),))


@odd("frozen and unused parts")
def _() -> Odd:
    model = With(lambda m, v: m.c(m.a(v)), a=nn.Linear(8, 16), b=nn.Linear(40, 40), c=nn.Linear(16, 4))
    model.a.requires_grad_(False)
    return Odd(model, (x(6, 8),))


class Lion(torch.optim.Optimizer):
    """One moment, the sign of it; an argument without a default."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state.setdefault("moment", torch.zeros_like(weight))
                sign = state["moment"].clone().mul_(0.9).add(weight.grad, alpha=0.1).sign_()
                weight.add_(sign, alpha=-group["lr"])
                state["moment"].mul_(0.99).add_(weight.grad, alpha=0.01)


@odd("an optimizer of the user's own that has stepped")
def _() -> Odd:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = Lion(model.parameters(), 0.1)
    model(x(4, 8)).sum().backward()
    optimizer.step()
    return Odd(model, (x(4, 8),), {}, {"optimizer": optimizer})


@odd("one module used thrice")
def _() -> Odd:
    layer = nn.Linear(8, 8)
    return Odd(nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), layer), (x(4, 8),))


@odd("hooks")
def _() -> Odd:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[0].register_forward_hook(lambda *given: given[2] * 2)
    model[0].register_full_backward_hook(lambda *given: None)
    model[2].weight.register_hook(lambda grad: grad.clamp(-1, 1))
    return Odd(model, (x(4, 8),))


@odd("a hook on a tensor")
def _() -> Odd:
    def run(m: Any, v: Any) -> Any:
        y = m.a(v)
        y.register_hook(lambda grad: grad * 0.5)
        return y

    return Odd(With(run, a=nn.Linear(8, 4)), (x(6, 8),))


@odd("compiled")
def _() -> Odd:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return Odd(torch.compile(model, backend="eager"), (x(4, 8),))


@odd("functional call")
def _() -> Odd:
    def run(m: Any, v: Any) -> Any:
        weights = {name: weight * 2 for name, weight in m.a.named_parameters()}
        return torch.func.functional_call(m.a, weights, (v,))

    return Odd(With(run, a=nn.Linear(8, 4)), (x(4, 8),))


@odd("vmap")
def _() -> Odd:
    return Odd(
        With(lambda m, v: torch.vmap(lambda r: (r @ m.w).relu())(v), w=nn.Parameter(x(8, 4))), (x(4, 8),)
    )


@odd("einsum, cumsum, sort, topk")
def _() -> Odd:
    def run(m: Any, v: Any) -> Any:
        y = torch.einsum("bi,iok->bko", v, m.w).cumsum(1).logsumexp(-1)
        return y.topk(2, -1)[0].sum() + y.sort(-1)[0][:, 0].sum()

    return Odd(With(run, w=nn.Parameter(x(8, 4, 3))), (x(4, 8),))


@odd("scatter, index_put, where")
def _() -> Odd:
    def run(m: Any, v: Any, at: Any) -> Any:
        y = m.a(v)
        z = torch.zeros(4, 16, device=v.device).scatter_add(1, at, y).clone()
        z[at[:, 0]] = y * 2
        return z.index_add(0, at[:, 1] % 4, y).masked_fill(z > 1, 0.0).where(z > 0, y)

    return Odd(With(run, a=nn.Linear(8, 16)), (x(4, 8), torch.randint(0, 4, (4, 16))))


@odd("random numbers and made tensors")
def _() -> Odd:
    def run(m: Any, v: Any) -> Any:
        y = m.a(v + m.b(torch.arange(v.shape[1], device=v.device)) + torch.tensor([1.0] * 8))
        return (y + torch.randn_like(y)) * torch.bernoulli(torch.full_like(y, 0.5))

    return Odd(With(run, a=nn.Linear(8, 16), b=nn.Embedding(20, 8)), (x(2, 5, 8),))


@odd("item")
def _() -> Odd:
    def run(m: Any, v: Any) -> Any:
        y = m.a(v)
        most = y.abs().max().item()
        print("the most is", most)
        return y / most if most > 0 else y

    return Odd(With(run, a=nn.Linear(8, 16)), (x(2, 5, 8),))


@odd("list")
def _() -> Odd:
    def run(m: Any, v: Any, lengths: Any) -> Any:
        return torch.cat([m.a(v[at, :n]) for at, n in enumerate(lengths.tolist())])

    return Odd(With(run, a=nn.Linear(8, 8)), (x(3, 5, 8), torch.tensor([5, 2, 3])))


@odd("array")
def _() -> Odd:
    return Odd(
        With(lambda m, v: m.a(v) * float(m.a(v).detach().numpy().sum() > 0), a=nn.Linear(8, 8)), (x(3, 5, 8),)
    )


@odd("experts")
def _() -> Odd:
    def run(m: Any, v: Any) -> Any:
        share, choice = m.gate(v).softmax(-1).max(-1)
        out = torch.zeros_like(v)
        for number, expert in enumerate(m.experts):
            rows = torch.where(choice == number)[0]
            if len(rows):
                out.index_add_(0, rows, expert(v[rows]) * share[rows, None])
        return out

    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    return Odd(With(run, gate=nn.Linear(8, 3), experts=experts), (x(12, 8),))


@odd("mask")
def _() -> Odd:
    def run(m: Any, v: Any) -> Any:
        y = m.a(v)
        return y[(y > 0).any(1)].sum() + y[y > 0].sum()

    return Odd(With(run, a=nn.Linear(8, 8)), (x(12, 8),))


@odd("unique")
def _() -> Odd:
    def run(m: Any, tokens: Any) -> Any:
        found, at = torch.unique(tokens, return_inverse=True)
        return m.a(found)[at]

    return Odd(With(run, a=nn.Embedding(20, 8)), (torch.randint(0, 20, (4, 5)),))


@odd("ctc")
def _() -> Odd:
    def run(m: Any, v: Any, labels: Any) -> Any:
        return f.ctc_loss(m.a(v).log_softmax(-1), labels, torch.full((2,), 12), torch.full((2,), 4))

    return Odd(With(run, a=nn.Linear(8, 10)), (x(12, 2, 8), torch.randint(1, 10, (2, 4))))


@odd("an input with a gradient")
def _() -> Odd:
    return Odd(nn.Linear(8, 4), (x(4, 8).requires_grad_(),))
