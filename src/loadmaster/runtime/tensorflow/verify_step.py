"""Verify step: one step of a TensorFlow model under a plan and without, and whether the numbers are the same.

The placed step works on copies of the variables; the unplaced one on the user's own, which get their values
back. Results and variables are compared: to the bit, and up to rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import tensorflow as tf
from loadmaster.core.errors import InputError
from loadmaster.graph.tf_capture.steps import make_step
from loadmaster.graph.tf_capture.trace import Traced
from loadmaster.runtime.tensorflow.devices import locate_devices
from loadmaster.runtime.tensorflow.place_request import require_plan, resolve_placement
from loadmaster.runtime.tensorflow.placed_model import PlacedFunction
from loadmaster.runtime.tensorflow.placed_step import PlacedStep, loss_of

_TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}
_OF_LARGEST = 1e-6  # a difference this small beside the largest element is rounding
_SHOWN = 3
Values = dict[str, Any]  # arrays by name


@dataclass(frozen=True, slots=True)
class StepVerification:
    """What came of comparing."""

    loss: float
    reference_loss: float
    results: dict[str, float]  # largest difference of each result
    variables: dict[str, float]  # and of each variable after the step
    identical: bool  # to the bit
    finding: str  # what differs by more than rounding, '' = nothing

    @property
    def ok(self) -> bool:
        """Whether the numbers are the model's, up to rounding."""
        return not self.finding

    def __str__(self) -> str:
        """A few lines: the finding, and the variables that differ most."""
        worst = sorted(self.variables.items(), key=lambda item: -item[1])[:_SHOWN]
        shown = ", ".join(f"{name} {difference:.3g}" for name, difference in worst)
        same = "same numbers as the unplaced step" + (
            ", to the bit" if self.identical else ", up to rounding"
        )
        lines = [self.finding or same, f"loss {self.loss:.9g}, unplaced {self.reference_loss:.9g}"]
        if shown:
            lines.append(f"largest differences of variables after the step: {shown}")
        return "\n".join(lines)


def verify_step(model: Any, given: Any, batch: Any, *, loss: Any, seed: int) -> StepVerification:
    """One step on a batch under a plan and without; the model is left as it was."""
    if loss is not None:
        raise InputError("a TensorFlow step has its own loss (model.compile); leave loss out")
    if seed:
        raise InputError(
            "a TensorFlow model has its own seeds (tf.keras.utils.set_random_seed); leave seed out"
        )
    if isinstance(model, PlacedFunction):
        raise InputError("the model is placed already; verify the original model")
    placement = resolve_placement(given)
    if placement is None:
        raise InputError(f"a {type(given).__name__} is not a plan; pass what lm.plan returns, or its file")
    require_plan(placement)
    devices = locate_devices(placement.problem.cluster)
    step = make_step(model, batch)
    args = tf.nest.map_structure(
        lambda value: None if value is None else tf.convert_to_tensor(value), step.args
    )
    placed = PlacedStep(step, placement, devices, copies=True)
    traced = placed.traced_for(*args)
    got_results = _arrays(placed(*args))
    variables = _name_variables(traced, model)
    got = {name: placed.copy_of(variable).numpy() for name, variable in variables.items()}
    results, wanted = _run_unplaced(traced, args, variables)
    finding = _find_difference(results, got_results, "result") or _find_difference(wanted, got, "variable")
    if finding:
        again, others = _run_unplaced(traced, args, variables)
        if _find_difference(results, again, "") or _find_difference(wanted, others, ""):
            finding = (
                "the unplaced step gives other numbers each time, so nothing can be compared; seed its random"
                " numbers (tf.keras.utils.set_random_seed before the model is made)"
            )
    return StepVerification(
        loss_of(got_results),
        loss_of(results),
        _differences(results, got_results),
        _differences(wanted, got),
        identical=_same_bits(results, got_results) and _same_bits(wanted, got),
        finding=finding,
    )


def _name_variables(traced: Traced, model: Any) -> dict[str, Any]:
    """The variables of a step, by Keras's paths where it has them."""
    optimizer = getattr(model, "optimizer", None)
    known = [*(getattr(model, "variables", None) or ()), *(getattr(optimizer, "variables", None) or ())]
    paths = {id(one.value): str(one.path) for one in known if hasattr(one, "path")}
    held = [one for one in traced.captured if one.variable is not None]
    found = {paths.get(id(one.variable), one.node): one.variable for one in held}
    return found if len(found) == len(held) else {one.node: one.variable for one in held}


def _run_unplaced(traced: Traced, args: Any, variables: Mapping[str, Any]) -> tuple[Values, Values]:
    """Results and variables of a step as TensorFlow runs it; the variables have their values back."""
    before = {name: variable.numpy().copy() for name, variable in variables.items()}
    try:
        results = _arrays(traced.concrete(*args))
        return results, {name: variable.numpy().copy() for name, variable in variables.items()}
    finally:
        for name, variable in variables.items():
            variable.assign(before[name])


def _arrays(results: Any) -> Values:
    """The results of a step by name."""
    flat = tf.nest.flatten(results, expand_composites=True)
    names = list(results) if isinstance(results, dict) and len(results) == len(flat) else range(len(flat))
    named = zip(sorted(names) if isinstance(results, dict) else names, flat, strict=True)
    return {str(name): np.asarray(value) for name, value in named if value is not None}


def _find_difference(wanted: Values, given: Values, what: str) -> str:
    """The first value that differs by more than rounding."""
    for name, value in wanted.items():
        if not _is_close(value, given[name]):
            return f"{what} {name!r} differs from the unplaced step's by {_differ(value, given[name]):.3g}"
    return ""


def _is_close(wanted: Any, given: Any) -> bool:
    tolerance = _TOLERANCE.get(str(wanted.dtype))
    if wanted.shape != given.shape or wanted.dtype != given.dtype:
        return False
    if tolerance is None or not wanted.size:
        return bool(np.array_equal(wanted, given))
    one, other = wanted.astype(np.float64), given.astype(np.float64)
    largest = np.nanmax(np.abs(np.where(np.isinf(one), 0.0, one)), initial=0.0)
    near = np.abs(one - other) <= tolerance * np.abs(one) + _OF_LARGEST * largest
    return bool((near | (one == other) | (np.isnan(one) & np.isnan(other))).all())


def _differences(wanted: Values, given: Values) -> dict[str, float]:
    return {name: _differ(value, given[name]) for name, value in wanted.items()}


def _differ(wanted: Any, given: Any) -> float:
    """The largest difference; infinite of text or other shapes that are not equal."""
    if wanted.shape != given.shape or wanted.dtype.kind not in "fiubV" or wanted.dtype != given.dtype:
        return 0.0 if np.array_equal(wanted, given) else float("inf")
    return float(np.abs(wanted.astype(np.float64) - given.astype(np.float64)).max(initial=0.0))


def _same_bits(wanted: Values, given: Values) -> bool:
    return all(value.tobytes() == given[name].tobytes() for name, value in wanted.items())
