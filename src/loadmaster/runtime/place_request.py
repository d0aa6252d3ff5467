"""Place requests: what a user gives to `lm.place` is checked, and a model is put on a finished Placement.

The story is told by `api.place`: check, make a plan where only inputs are given (`capture_step` captures the
model for it), place.
"""

import copy
import os
import warnings
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import nn

from loadmaster.cluster.probe import local_devices
from loadmaster.core.errors import GraphError, InputError, PlanError, UnknownNameError
from loadmaster.core.findings import describe_findings
from loadmaster.core.graph import Graph
from loadmaster.core.io import load
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.reasons import why_none_fits_in_short
from loadmaster.core.run import Budget
from loadmaster.graph.capture import DEFAULT_OPTIMIZER, capture
from loadmaster.modules.checkpoint import Checkpoint
from loadmaster.modules.fake_model import rebuild_modules
from loadmaster.runtime.finite_loss import HOWS, WARN
from loadmaster.runtime.graph_engine.engine import CannotExportError, require_graph
from loadmaster.runtime.placed import AUTO, ENGINES, HOOKS, Options, Placed, build_placed_model
from loadmaster.runtime.shortage import Replan
from loadmaster.runtime.verify.unplaced import Loss
from loadmaster.runtime.verify.verification import Verification, parse_batch

FIRST_STEP = "first-step"


class PlaceOptions(TypedDict, total=False):
    """What `lm.place` may be asked beside model, plan or inputs, and devices."""

    kwargs: Mapping[str, Any] | None  # example inputs by name, where there is no plan yet
    optimizer: Any  # a class or name to plan for; an instance is adopted, too
    assume: float  # stands for values that the model reads and that nobody can know
    loss: Loss | None  # one number of what the model gives, where that is not its own loss
    budget: Budget | float | str  # for the search of a plan
    accumulate: int  # forward and backward passes before an optimizer step, to plan for
    costs: str  # 'auto' (measured for 2 s where devices are here), 'measured' or 'roofline'
    spill: str | None  # 'host': weights may stay in host memory while their ops run on a GPU
    engine: str  # 'graph', 'hooks' (module by module) or 'auto': the graph where there is one
    presum: bool  # add gradients where they are made, and send one: fewer copies, other rounding
    output_device: str | torch.device | None
    verify: str | None  # 'first-step'
    compile: bool | str  # torch.compile of each part on one device; True, or a backend's name
    on_nan: str | None  # a loss that is not a number: 'warn' (default), 'raise', or None: nobody looks
    weights: str | os.PathLike[str] | None  # a safetensors file or checkpoint's folder to fill the model from


def check_place_request(model: Any, wishes: Mapping[str, Any]) -> None:
    """Refuse what is not a model, and options that do not exist or have an unknown value."""
    unknown = sorted(set(wishes) - set(PlaceOptions.__annotations__))
    if unknown:
        raise UnknownNameError("argument of place", unknown[0], PlaceOptions.__annotations__)
    require_model(model)
    if wishes.get("engine", AUTO) not in ENGINES:
        raise UnknownNameError("engine", str(wishes["engine"]), ENGINES)
    if wishes.get("verify") not in (None, FIRST_STEP):
        raise UnknownNameError("verify", str(wishes["verify"]), (FIRST_STEP,))
    if wishes.get("on_nan") not in (None, *HOWS):
        raise UnknownNameError("on_nan", str(wishes["on_nan"]), HOWS)
    _require_passes(wishes.get("accumulate", 1), training=model.training)
    _choose_backend(wishes.get("compile", False))
    _resolve_output_device(wishes.get("output_device"))


def _require_passes(accumulate: Any, *, training: bool) -> None:
    """Refuse a number of passes that is none, or that nothing accumulates."""
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise InputError(f"accumulate is {accumulate!r}; give the number of passes before an optimizer step")
    if accumulate > 1 and not training:
        raise InputError(
            f"accumulate is {accumulate}, but the model is in eval mode; call model.train() first"
        )


def verify_plan(model: nn.Module, given: Any, batch: Any, *, loss: Loss | None, seed: int) -> Verification:
    """One batch under a plan and without, on a copy of the model."""
    require_model(model)
    args, kwargs = parse_batch(batch)
    placement = load_placement(given)
    made = place_on_plan(_copy_model(model), placement, {"loss": loss})
    return made.verify(*args, seed=seed, **kwargs)


def require_model(model: Any) -> None:
    """Refuse what is no model, by what it is."""
    if isinstance(model, nn.Module):
        if isinstance(model, Placed):
            raise InputError("the model is placed already; place the original model")
        if type(model).__name__ == "OptimizedModule":
            raise InputError("this model is wrapped by torch.compile; place the module before that")
        if "forward" in vars(model):
            raise InputError(
                f"this {type(model).__name__} has a forward that replaces the one of its class (set by hand"
                " or by accelerate), and it would run instead of the plan; place the model first and wrap"
                " what lm.place gives; or write a module that calls this one"
            )
        return
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InputError(f"{model.__name__} is a class; pass an instance, {model.__name__}(...)")
    given = f"the text {model!r}" if isinstance(model, str) else f"a {type(model).__name__}"
    raise InputError(f"{given} is not a model; pass an nn.Module instance")


def refuse_planning_options(devices: Any, wishes: PlaceOptions) -> None:
    """Refuse options that only matter for planning, if there is a plan already."""
    optimizer = wishes.get("optimizer")
    answered = {
        "devices": (devices != AUTO, "has its devices already"),
        "spill": (wishes.get("spill") is not None, "says what is spilled"),
        "budget": (wishes.get("budget") is not None, "has been searched for"),
        "assume": (wishes.get("assume") is not None, "has its branches already"),
        "costs": (wishes.get("costs") is not None, "has its costs already"),
        "kwargs": (bool(wishes.get("kwargs")), "has its inputs already"),
        "accumulate": (wishes.get("accumulate") is not None, "says how many passes a step has"),
        "optimizer": (
            optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer),
            "was made for an optimizer (an instance, made before, would be adopted)",
        ),
    }
    for name, (given, why) in answered.items():
        if given:
            raise InputError(f"the plan {why}; leave {name} out, or pass inputs to plan again")


def _copy_model(model: nn.Module) -> nn.Module:
    """The model with weights of its own; what cannot be copied is shared."""
    try:
        return copy.deepcopy(model)
    except Exception:  # a lock, a file, a generator
        tensors = [*model.parameters(), *model.buffers()]
        return rebuild_modules(model, {id(tensor): copy.deepcopy(tensor) for tensor in tensors})


def load_placement(given: Any) -> Placement:
    """The Placement that is given, or lies in the file that is named; inputs are refused."""
    placement = resolve_placement(given)
    if placement is None:
        raise InputError(f"{type(given).__name__} is not a plan; give a Placement (lm.plan) or its file")
    return placement


def resolve_placement(given: Any) -> Placement | None:
    """The Placement that is given, or lies in the file that is named; None where inputs are given."""
    if isinstance(given, str | os.PathLike):
        given = load(given)
        if not isinstance(given, Placement):
            raise InputError(f"the file holds a {type(given).__name__}; it must hold what lm.plan returns")
    if isinstance(given, Placement):
        return given
    if isinstance(given, torch.Tensor | tuple | list | Mapping):
        return None
    if isinstance(given, Plan):
        raise InputError(
            "a bare Plan does not name its ops; pass what lm.plan(problem, algorithm=plan) returns"
            " of it: the same plan, with its problem and its score"
        )
    raise InputError(
        f"{type(given).__name__} is neither a plan nor inputs; give a Placement, its file, or"
        " example inputs as a tensor, a tuple or a dict"
    )


def _resolve_output_device(asked: Any) -> torch.device | None:
    """Where outputs shall come; refuses what this machine does not have."""
    if asked is None:
        return None
    has = [device.torch_name for device in local_devices()]
    try:
        where = torch.device(asked)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        where = None
    known = where is not None and (
        where.type == "cpu" or str(where) in has or (str(where) == "cuda" and "cuda:0" in has)
    )
    if not known:
        raise InputError(f"output_device is {asked!r}, this machine has {', '.join(has)}; name one of them")
    return where


def _choose_backend(asked: Any) -> str:
    if isinstance(asked, str):
        known = torch.compiler.list_backends(exclude_tags=())
        if asked not in known:
            raise UnknownNameError("backend of torch.compile", asked, known)
        return asked
    return "inductor" if asked else ""


def capture_step(model: nn.Module, given: Any, wishes: PlaceOptions, *, target: str) -> Graph:
    """The graph of a model on example inputs: a training step, or inference in eval mode.

    Where hooks are asked for, the model's own Python runs it: what its variables hold is in the graph.
    """
    args, kwargs = parse_batch(given)
    kwargs |= dict(wishes.get("kwargs") or {})

    def capture_by(path: str | None) -> Graph:
        return capture(
            model,
            args,
            kwargs,
            optimizer=wishes.get("optimizer", DEFAULT_OPTIMIZER) if model.training else None,
            loss=wishes.get("loss"),
            train=model.training,
            accumulation=wishes.get("accumulate", 1),
            target=target,
            assume=wishes.get("assume", 1.0),
            path=path,
        )

    try:
        graph = capture_by("traced" if wishes.get("engine") == HOOKS else None)
    except GraphError:
        if wishes.get("engine") != HOOKS:
            raise
        graph = capture_by(None)
    if graph.assumptions or graph.warnings:
        told = describe_findings(graph.assumptions, graph.warnings, graph.notes)
        warnings.warn("\n".join(told), RuntimeWarning, stacklevel=3)
    return graph


def is_run_by_hooks(model: nn.Module, given: Any, wishes: PlaceOptions) -> bool:
    """Whether hooks will run a model on these inputs, module by module, so that it is planned for them."""
    asked = wishes.get("engine", AUTO)
    if asked != AUTO:
        return asked == HOOKS
    args, kwargs = parse_batch(given)
    try:
        require_graph(model, tuple(args), {**kwargs, **(wishes.get("kwargs") or {})})
    except CannotExportError:
        return True
    return False


def require_plan(placement: Placement) -> Plan:
    """The plan of a placement; refuses one that has none, or none that can be run."""
    plan = placement.plan
    if plan is None:
        raise PlanError(f"{why_none_fits_in_short(placement)}; lm.fit says which change is the cheapest")
    graph, cluster = placement.problem.graph, placement.problem.cluster
    if len(plan.device) == graph.num_ops and plan.device.max(initial=0) >= cluster.num_devices:
        op = int(plan.device.argmax())
        raise PlanError(
            f"the plan has {graph.op_name[op]!r} on device {plan.device[op]}, but only {cluster.num_devices}"
            " devices, counted from 0; plan again, or repair the file"
        )
    if plan.pipeline is not None:
        raise PlanError(
            "the plan has a pipeline, whose stages are processes; run it with lm.launch,"
            " or with: loadmaster run"
            " PLAN --launch local"
        )
    if plan.recompute.any():
        raise PlanError("the plan has recomputation, which is run in pipelines only; plan without it")
    return plan


def place_on_plan(
    model: nn.Module, placement: Placement, wishes: PlaceOptions, *, replan: Replan | None = None
) -> Placed:
    """The model on the devices of a plan; `replan` is what `Placed.plan_that_fits` asks for another one."""
    cluster, plan = placement.problem.cluster, require_plan(placement)
    options = Options(
        engine=wishes.get("engine", AUTO),
        presum=wishes.get("presum", False),
        output_device=_resolve_output_device(wishes.get("output_device")),
        loss=wishes.get("loss"),
        verify=wishes.get("verify") == FIRST_STEP,
        on_nan=wishes.get("on_nan", WARN),
        compile=_choose_backend(wishes.get("compile", False)),
    )
    source, optimizer = wishes.get("weights"), wishes.get("optimizer")
    made = build_placed_model(
        model,
        placement.problem.graph,
        plan,
        cluster,
        predicted_bytes=placement.peak_bytes.tolist(),
        options=options,
        weights=Checkpoint(source) if source is not None else None,
    )
    made._placement, made._replan = placement, replan
    if isinstance(optimizer, torch.optim.Optimizer):
        made.adopt(optimizer)
    return made
