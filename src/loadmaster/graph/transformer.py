"""A GPT-2-like transformer's full training step: parameters, forward, backward, updates.

As fine as a graph exported from PyTorch: reshapes, slices and transposes are ops of their own
(views: no time, no memory), attention is written out, the output projection shares the token
embedding's weight. The defaults are GPT-2 small. Three layers are made op by op and the middle
one is repeated, so a million ops take seconds. Flops of a matmul are exact; the elementwise
ones are counts of a plain implementation.
"""

import math
from dataclasses import dataclass

from loadmaster.core.errors import InputError
from loadmaster.core.graph import Dtype, Graph
from loadmaster.graph.repeat import repeat_layers
from loadmaster.graph.tape import Tape, Value

MOST_OPS = 10_000_000
MOST_LAYERS = MOST_OPS // 120
_LAYER = "h."  # op names and modules of layer 3 start with 'h.3.'
_FLOATS = (Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16, Dtype.FLOAT64, Dtype.FLOAT8)


def transformer(
    *,
    num_layers: int = 12,
    width: int = 768,
    num_heads: int = 12,
    seq: int = 1024,
    batch: int = 8,
    vocab: int = 50257,
    dtype: Dtype = Dtype.FLOAT32,
    name: str = "",
) -> Graph:
    """One training step on `batch` sequences of `seq` tokens."""
    sizes = {"num_layers": num_layers, "width": width, "num_heads": num_heads, "seq": seq}
    for label, size in {**sizes, "batch": batch, "vocab": vocab}.items():
        if size < 1:
            raise InputError(f"a transformer with {label} = {size} has nothing to compute; give >= 1")
    if width % num_heads:
        raise InputError(f"width {width} does not split into {num_heads} heads; give a multiple")
    if dtype not in _FLOATS:
        raise InputError(f"a transformer cannot be trained in {dtype.name.lower()}; give a float type")
    if num_layers > MOST_LAYERS:
        raise InputError(f"{num_layers} layers are more than {MOST_OPS} ops; give at most {MOST_LAYERS}")
    shape = _Shape(width, num_heads, seq, batch, vocab, dtype)
    title = name or f"transformer {num_layers} layers, width {width}"
    template = _training_step(title, min(num_layers, 3), shape)
    return repeat_layers(template, num_layers, prefix=_LAYER) if num_layers > 3 else template


def transformer_with_ops(num_ops: int, seed: int = 0) -> Graph:
    """GPT-2 small with as many layers as come nearest to `num_ops`; nothing is random here."""
    if not 1 <= num_ops <= MOST_OPS:
        raise InputError(f"cannot generate {num_ops} ops; ask for 1 to {MOST_OPS}")
    one, two = (transformer(num_layers=layers).num_ops for layers in (1, 2))
    num_layers = max(1, round(1 + (num_ops - one) / (two - one)))
    return transformer(num_layers=num_layers, name=f"transformer {num_ops}")


@dataclass(frozen=True, slots=True)
class _Shape:
    width: int
    num_heads: int
    seq: int
    batch: int
    vocab: int
    dtype: Dtype


def _training_step(name: str, num_layers: int, shape: _Shape) -> Graph:
    return _Model(Tape(name), num_layers, shape).training_step()


class _Model:
    """Writes the forward pass on a tape."""

    def __init__(self, tape: Tape, num_layers: int, shape: _Shape) -> None:
        self.tape = tape
        self.num_layers = num_layers
        self.shape = shape
        self.weight: dict[str, Value] = {}

    def training_step(self) -> Graph:
        """Parameters first, as an exported graph lists them, then the rest in order."""
        self._declare_params()
        s, tape = self.shape, self.tape
        tokens = tape.constant("tokens", (s.batch, s.seq), dtype=Dtype.INT64)
        positions = tape.constant("positions", (s.seq,), dtype=Dtype.INT64)
        labels = tape.constant("labels", (s.batch * s.seq,), dtype=Dtype.INT64)
        mask = tape.constant("causal_mask", (s.seq, s.seq), dtype=Dtype.BOOL)
        x = self._embedding(tokens, "wte")
        x = self._bias(x, self._embedding(positions, "wpe"), "wpe", name="add")
        x = self._dropout(x, "drop")
        for layer in range(self.num_layers):
            x = self._attention(x, mask, f"{_LAYER}{layer}")
            x = self._mlp(x, f"{_LAYER}{layer}")
        return tape.finish(self._loss(self._layernorm(x, "ln_f"), labels))

    def _declare_params(self) -> None:
        w = self.shape.width
        self._param("wte.weight", self.shape.vocab, w)
        self._param("wpe.weight", self.shape.seq, w)
        for layer in range(self.num_layers):
            at = f"{_LAYER}{layer}"
            self._affine(f"{at}.ln_1", w)
            self._affine(f"{at}.attn.c_attn", w, 3 * w)
            self._affine(f"{at}.attn.c_proj", w, w)
            self._affine(f"{at}.ln_2", w)
            self._affine(f"{at}.mlp.c_fc", w, 4 * w)
            self._affine(f"{at}.mlp.c_proj", 4 * w, w)
        self._affine("ln_f", w)

    def _affine(self, module: str, *shape: int) -> None:
        self._param(f"{module}.weight", *shape)
        self._param(f"{module}.bias", shape[-1])

    def _param(self, name: str, *shape: int) -> None:
        module = name.rpartition(".")[0]
        self.weight[name] = self.tape.param(name, shape, module=module, dtype=self.shape.dtype)

    def _attention(self, x: Value, mask: Value, at: str) -> Value:
        s, attn = self.shape, f"{at}.attn"
        qkv = self._linear(self._layernorm(x, f"{at}.ln_1"), f"{attn}.c_attn")
        q, k, v = (self._heads(qkv, attn, part) for part in "qkv")
        heads, depth = s.batch * s.num_heads, s.width // s.num_heads
        k = self._view("transpose", k, (heads, depth, s.seq), attn, "k.turned")
        scores = self._matmul(q, k, attn, name="scores")
        scores = self._view("reshape", scores, (s.batch, s.num_heads, s.seq, s.seq), attn, "scores.split")
        scores = self._elementwise("scale", scores, attn, flops=1, backward=1)
        scores = self._elementwise("mask", scores, attn, flops=1, backward=1, other=mask)
        probs = self._elementwise("softmax", scores, attn, flops=5, backward=4, save_output=True)
        probs = self._dropout(probs, f"{attn}.attn_dropout")
        probs = self._view("reshape", probs, (heads, s.seq, s.seq), attn, "probs.joined")
        mixed = self._matmul(probs, v, attn, name="mixed")
        mixed = self._view("reshape", mixed, (s.batch, s.num_heads, s.seq, depth), attn, "mixed.split")
        mixed = self._view("transpose", mixed, (s.batch, s.seq, s.num_heads, depth), attn, "mixed.turned")
        mixed = self.tape.apply("contiguous", (mixed,), mixed.shape, module=attn, through=(mixed,))
        mixed = self._view("reshape", mixed, (s.batch, s.seq, s.width), attn, "mixed.merged")
        out = self._linear(mixed, f"{attn}.c_proj")
        return self._add(x, self._dropout(out, f"{attn}.resid_dropout"), attn)

    def _heads(self, qkv: Value, attn: str, part: str) -> Value:
        """[batch * heads, seq, depth] of q, k or v; all views."""
        s = self.shape
        depth = s.width // s.num_heads
        x = self._view("slice", qkv, (s.batch, s.seq, s.width), attn, part)
        x = self._view("reshape", x, (s.batch, s.seq, s.num_heads, depth), attn, f"{part}.heads")
        x = self._view("transpose", x, (s.batch, s.num_heads, s.seq, depth), attn, f"{part}.swapped")
        return self._view("reshape", x, (s.batch * s.num_heads, s.seq, depth), attn, f"{part}.joined")

    def _mlp(self, x: Value, at: str) -> Value:
        mlp = f"{at}.mlp"
        y = self._linear(self._layernorm(x, f"{at}.ln_2"), f"{mlp}.c_fc")
        y = self._elementwise("gelu", y, f"{mlp}.act", flops=10, backward=18, save_input=True)
        y = self._dropout(self._linear(y, f"{mlp}.c_proj"), f"{mlp}.dropout")
        return self._add(x, y, mlp)

    def _loss(self, x: Value, labels: Value) -> Value:
        s = self.shape
        x = self._view("reshape", x, (s.batch * s.seq, s.width), "lm_head", "flat")
        logits = self._matmul(x, self.weight["wte.weight"], "lm_head", tied=True)
        logs = self._elementwise("log_softmax", logits, "loss", flops=5, backward=4, save_output=True)
        rows = s.batch * s.seq
        return self.tape.apply(
            "nll_loss",
            (logs, labels),
            (),
            module="loss",
            flops=rows,
            backward_flops=rows,
            read_bytes=labels.num_bytes + rows * logs.dtype.itemsize,
            saved=(labels,),
            keep=True,
        )

    def _linear(self, x: Value, module: str) -> Value:
        """x @ weight + bias on rows, as PyTorch flattens it."""
        weight, bias = self.weight[f"{module}.weight"], self.weight[f"{module}.bias"]
        rows = math.prod(x.shape[:-1])
        y = self._view("reshape", x, (rows, x.shape[-1]), module, "flat")
        y = self._bias(self._matmul(y, weight, module), bias, module)
        return self._view("reshape", y, (*x.shape[:-1], y.shape[-1]), module, "unflat")

    def _matmul(self, x: Value, y: Value, module: str, *, name: str = "matmul", tied: bool = False) -> Value:
        """[..., m, k] @ [..., k, n], or [n, k] transposed when `tied`."""
        columns = y.shape[-2] if tied else y.shape[-1]
        flops = 2.0 * x.num_elements * columns
        shape = (*x.shape[:-1], columns)
        return self.tape.apply(
            "matmul_t" if tied else "matmul",
            (x, y),
            shape,
            module=module,
            name=name,
            flops=flops,
            backward_flops=2 * flops,
            saved=(x, y),
        )

    def _bias(self, x: Value, bias: Value, module: str, *, name: str = "add_bias") -> Value:
        """x plus something smaller that is repeated; its gradient is a sum over x's."""
        return self.tape.apply(
            "bias",
            (x, bias),
            x.shape,
            module=module,
            name=name,
            flops=x.num_elements,
            backward_flops=x.num_elements,
            through=(x,),
        )

    def _add(self, x: Value, y: Value, module: str) -> Value:
        """The residual connection around `module`."""
        size = x.num_elements
        return self.tape.apply(
            "add", (x, y), x.shape, module=module, name="residual", flops=size, through=(x, y)
        )

    def _view(self, kind: str, x: Value, shape: tuple[int, ...], module: str, name: str) -> Value:
        return self.tape.apply(kind, (x,), shape, module=module, name=name, through=(x,), view=True)

    def _layernorm(self, x: Value, module: str) -> Value:
        weight, bias = self.weight[f"{module}.weight"], self.weight[f"{module}.bias"]
        return self.tape.apply(
            "layernorm",
            (x, weight, bias),
            x.shape,
            module=module,
            flops=8 * x.num_elements,
            backward_flops=14 * x.num_elements,
            saved=(x, weight),
        )

    def _embedding(self, index: Value, module: str) -> Value:
        weight = self.weight[f"{module}.weight"]
        shape = (*index.shape, self.shape.width)
        size = math.prod(shape)
        return self.tape.apply(
            "embedding",
            (weight, index),
            shape,
            module=module,
            backward_flops=size,
            read_bytes=index.num_bytes + size * weight.dtype.itemsize,  # the rows looked up
            saved=(index,),
        )

    def _dropout(self, x: Value, module: str) -> Value:
        size = x.num_elements
        return self.tape.apply(
            "dropout", (x,), x.shape, module=module, flops=2 * size, backward_flops=size, save_mask=True
        )

    def _elementwise(
        self,
        kind: str,
        x: Value,
        module: str,
        *,
        flops: int,
        backward: int,
        other: Value | None = None,
        save_input: bool = False,
        save_output: bool = False,
    ) -> Value:
        """An op on every element, with flops per element; `other` is read both ways."""
        others = () if other is None else (other,)
        return self.tape.apply(
            kind,
            (x, *others),
            x.shape,
            module=module,
            flops=flops * x.num_elements,
            backward_flops=backward * x.num_elements,
            saved=(x, *others) if save_input else others,
            save_output=save_output,
        )
