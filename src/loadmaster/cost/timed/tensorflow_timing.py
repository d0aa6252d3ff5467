"""TensorFlow timing: fills the database with the times of TensorFlow ops on this machine's CPU. [tensorflow]

An op is timed as it runs in a step: in a function, without Python in between and without TensorFlow's own
optimiser. The function runs the op some times, one after the other and on data of its own each time; what a
function with as many arguments and one such op takes is taken off, so that calling it is not counted. Both
give one tensor: a tensor that Python gets costs more than many an op. Other work on the machine is not
counted: wall time or processor time, whichever is less.
"""

import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context as eager_context  # options of a single call are nowhere else
from tensorflow.python.framework import op_def_registry  # which inputs are lists is nowhere else

import tensorflow as tf
from loadmaster.cluster.probe import LocalDevice
from loadmaster.core.arrays import Floats
from loadmaster.core.graph import Graph
from loadmaster.cost.busy_machine import BUSY, CALM, BusyWatch
from loadmaster.cost.database import CostDatabase, CostRow, today
from loadmaster.cost.keys import Keys
from loadmaster.cost.signature import PlainWord, Signature, TensorSpec, Value, parse_signature

_WAY = "one result"
_COPIES = 8
_ROUNDS = 7
_LONG_S = 5e-3  # an op that takes longer is timed with fewer copies
_MOST_BYTES = 2**31
_LONGEST_REASON = 200
Say = Callable[[str, float], None]


def version() -> str:
    """As rows write it, beside torch's; rows of another way of timing are not read."""
    return f"tensorflow {tf.__version__} ({_WAY})"


def measure_missing(
    graph: Graph,
    keys: Keys,
    plain_s: Floats,
    here: LocalDevice,
    database: CostDatabase,
    *,
    budget_s: float,
    say: Say,
) -> tuple[dict[str, CostRow], int, float]:
    """Rows of the keys that are known or can be measured in time, how many are new, and the seconds spent."""
    began = time.perf_counter()
    known = database.get(keys.text, here.chip, version())
    if not here.on_host or budget_s <= 0:
        return known, 0, 0.0
    share = keys.count * plain_s[keys.first]
    order = [at for at in np.argsort(-share, kind="stable").tolist() if keys.text[at] not in known]
    rows: list[CostRow] = []
    watch = BusyWatch(threads=1)
    with tf.init_scope():
        for number, at in enumerate(order):
            if time.perf_counter() - began > budget_s:
                break
            say(f"measuring op {number + 1} of {len(order)} on {here.chip}", number / len(order))
            if graph.bytes_moved[keys.first[at]] * _COPIES < _MOST_BYTES:
                rows.append(_measure_row(keys.text[at], here.chip, watch))
    database.put(rows)
    found = sum(row.seconds is not None for row in rows)
    return database.get(keys.text, here.chip, version()), found, time.perf_counter() - began


def _measure_row(key: str, chip: str, watch: BusyWatch) -> CostRow:
    try:
        seconds, spread, count = time_signature(key)
    except Exception as problem:  # TensorFlow may raise anything on an op out of its place
        text = f"{type(problem).__name__}: {' '.join(str(problem).split())[:_LONGEST_REASON]}"
        return CostRow(key, chip, version(), today(), None, reason=text)
    moment = BUSY if watch.is_busy_now() else CALM
    return CostRow(key, chip, version(), today(), seconds, spread, count, moment=moment)


def time_signature(key: str) -> tuple[float, float, int]:
    """Seconds of one run of the op behind a key, their spread, and how many runs were timed."""
    signature = parse_signature(key)
    if signature is None or signature.op[0] != "tf":
        raise ValueError("its signature cannot be read")
    once, _ = _time_function(signature, 1, 1)
    copies = _COPIES if once < _LONG_S else 2
    base, _ = _time_function(signature, 1, 1 + copies)
    many, spread = _time_function(signature, 1 + copies, 1 + copies)
    return max((many - base) / copies, 1e-8), spread, _ROUNDS * copies


def _time_function(signature: Signature, copies: int, sets: int) -> tuple[float, float]:
    """The lower quartile of calls of a function that runs an op some times, and how far they lie apart."""
    function, data = make_function(signature, copies, sets)
    context = eager_context.context()
    config = config_pb2.ConfigProto()
    config.CopyFrom(context.config)
    config.graph_options.rewrite_options.disable_meta_optimizer = True  # it drops what gives no result
    before, context.function_call_options = (
        context.function_call_options,
        eager_context.FunctionCallOptions(config_proto=config),
    )
    try:
        return _time_calls(lambda: function(*data))
    finally:
        context.function_call_options = before


def _time_calls(call: Callable[[], Any]) -> tuple[float, float]:
    call()
    rounds = []
    for _ in range(_ROUNDS):
        wall, used = time.perf_counter(), time.process_time()
        call()
        rounds.append(min(time.perf_counter() - wall, max(time.process_time() - used, 1e-9)))
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return low, (high - low) / 2 / low if low > 0 else 0.0


def make_function(signature: Signature, copies: int, sets: int) -> tuple[Any, list[Any]]:
    """A function of so many sets of data that runs the op on the first ones and gives the last result."""
    operation = getattr(tf.raw_ops, signature.op[1])
    draw = np.random.default_rng(0)
    data = [
        [_make_tensor(word, draw) for word in signature.args if isinstance(word, TensorSpec)]
        for _ in range(sets)
    ]
    flat = [tensor for one in data for tensor in one]

    def body(*tensors: Any) -> Any:
        rest, last = iter(tensors), None
        before: list[Any] = []
        for _ in range(copies):
            inputs = [
                next(rest) if isinstance(word, TensorSpec) else _constant(word) for word in signature.args
            ]
            with tf.control_dependencies(before):
                made = operation(**_arguments(signature, inputs, operation))
            outputs = [part for part in tf.nest.flatten(made) if tf.is_tensor(part)]
            last, before = outputs[0], [outputs[0].op]
        return last

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in flat]
    function = tf.function(body, autograph=False, input_signature=specs).get_concrete_function()
    return function, flat


def _arguments(signature: Signature, inputs: list[Any], operation: Any) -> dict[str, Any]:
    """Inputs and attributes by the names that the op gives them."""
    definition = op_def_registry.get(signature.op[1])
    names = list(definition.input_arg)
    several = len(inputs) - sum(not (name.number_attr or name.type_list_attr) for name in names)
    rest, found = iter(inputs), dict[str, Any]()
    takes = list(inspect.signature(operation).parameters)  # inputs come first; some have other names there
    for given, name in zip(takes, names, strict=False):
        listed = bool(name.number_attr or name.type_list_attr)
        found[given] = [next(rest) for _ in range(several)] if listed else next(rest)
    for name, value in signature.kwargs.items():
        if name in takes:
            found[name] = _attribute(value)
    return found


def _attribute(value: Value) -> Any:
    if not isinstance(value, PlainWord):
        return value
    known = getattr(tf, value.text, None)
    return known if isinstance(known, tf.DType) else value.text


def _constant(word: Value) -> Any:
    """'(int32,1,0,2)': the dtype, the number of axes, the values."""
    if not isinstance(word, list) or len(word) < 2 or not isinstance(word[0], PlainWord):
        raise ValueError(f"an argument {word!r} is not understood")
    kind, axes, values = word[0].text, word[1], word[2:]
    if axes == 0:
        return tf.constant(values[0], kind)
    if axes != 1:
        raise ValueError("a constant of several axes")
    return tf.constant(np.array(values, dtype=kind))


def _make_tensor(word: TensorSpec, draw: Any) -> Any:
    """Floats from a normal distribution; whole numbers are 0, which is inside everything."""
    kind = tf.as_dtype(word.dtype)
    if kind.is_floating or kind.is_complex:
        values = tf.constant(draw.standard_normal(word.shape), tf.float32)
        return values if kind == tf.float32 else tf.cast(values, kind)
    if kind == tf.bool:
        return tf.constant(draw.random(word.shape) < 0.5)
    return tf.zeros(word.shape, kind)
