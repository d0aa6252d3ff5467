"""From a Question to a Problem: read the source, choose devices and costs, and settle what is asked."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from loadmaster.cluster.local import auto_shorthand, is_here
from loadmaster.cluster.parse import parse_cluster, with_reserve
from loadmaster.core.choices import parse_choice
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import ProblemError, UnknownNameError
from loadmaster.core.graph import Graph
from loadmaster.core.pins import resolve_pins
from loadmaster.core.pipelines.schedule import AUTO as AUTO_PIPELINE
from loadmaster.core.pipelines.schedule import OF_THROUGHPUT, parse_schedule
from loadmaster.core.problem import Links, Load, Objective, Problem, Split, Workload
from loadmaster.core.question import Question
from loadmaster.core.run import ignore_progress
from loadmaster.core.units import parse_bytes
from loadmaster.cost.cost_request import (
    AUTO,
    COSTS,
    MEASURED,
    apply_optimizer,
    load_or_measure_costs,
    measure_seconds,
    measure_unasked,
)
from loadmaster.cost.roofline import roofline_costs
from loadmaster.graph.models import CaptureOptions
from loadmaster.graph.origin import batch_of_graph
from loadmaster.graph.source import is_model, read_source


def build_problem(
    question: Question,
    *,
    tell: Callable[[str], None] | None = None,
    progress: Callable[[str, float], None] = ignore_progress,
) -> Problem:
    """The problem that a question describes; `tell` is told what was measured."""
    if question.costs not in COSTS:
        raise UnknownNameError("costs", str(question.costs), COSTS)
    budget_s = measure_seconds(question.measure_budget)
    if isinstance(question.devices, str) and question.devices.strip().lower() == AUTO:
        question = replace(question, devices=auto_shorthand())
    devices, max_bytes = question.devices, question.max_bytes
    named = parse_cluster(devices, max_bytes=max_bytes) if devices is not None else None
    if named is None and is_model(question.source):  # said before it is captured, which takes long
        raise ProblemError(_name_devices(question.source))
    workload = read_workload(_complete_step(question, named))
    graph, cluster, given = workload.graph, workload.cluster, workload.costs
    if not is_model(question.source):
        graph = apply_optimizer(graph, question.optimizer or workload.optimizer, question.precision)
    if named is not None:
        cluster, given = named, None
    if cluster is None:
        raise ProblemError(_name_devices(graph.name))
    if question.reserve_bytes:
        cluster = with_reserve(cluster, parse_bytes(question.reserve_bytes))
    processes = _most_cpus(cluster) if question.pipeline else 1
    if question.costs == MEASURED:
        if given is not None:
            raise ProblemError(f"source {graph.name!r} brings its own times; leave measuring out")
        given = load_or_measure_costs(
            graph, cluster, budget_s, question.database, tell, progress, processes=processes
        )
    elif question.costs == AUTO and given is None and is_here(devices):
        given = measure_unasked(graph, cluster, question.database, tell, progress, processes=processes)
    pipeline = None if question.pipeline == AUTO_PIPELINE else question.pipeline
    if question.pipeline == AUTO_PIPELINE:
        question = replace(question, objective=_step_for_auto(question.objective))
    asked = choose_objective(question.objective, pipeline, workload.objective)
    own = named is None  # links and pins speak of the source's own devices
    own_split = workload.split if asked == workload.objective else None
    return Problem(
        graph=graph,
        cluster=cluster,
        costs=given if given is not None else roofline_costs(graph, cluster),
        objective=asked,
        links=parse_choice(Links, question.links) or (workload.links if own else Links.SHARED),
        split=parse_choice(Split, question.split) or own_split or default_split(asked),
        load=parse_choice(Load, question.load) or workload.load or Load.SUM,
        pinned=resolve_pins(graph, cluster, question.pin or {}, workload.pinned if own else None),
        pipeline=pipeline or (workload.pipeline if pipeline is None and asked == workload.objective else ""),
    )


def _name_devices(source: object) -> str:
    name = repr(source) if isinstance(source, str) else type(source).__name__
    return f"source {name} brings no devices; name some, e.g. --devices '2xA100-80GB'"


def _most_cpus(cluster: Cluster) -> int:
    """The most CPU devices of one host: in a pipeline each is a process with its share of the cores."""
    own = cluster.host[cluster.on_host[cluster.kind]]
    return max(Counter(own.tolist()).values(), default=1)


def _step_for_auto(objective: Objective | str | None) -> Objective:
    """The objective of `--pipeline auto`, which is no other's."""
    if parse_choice(Objective, objective) == Objective.THROUGHPUT:
        raise ProblemError(
            "pipeline 'auto' weighs whole steps against each other, not objective 'throughput'; leave that"
            " out, or ask for a steady state, e.g. 1f1b:8"
        )
    return Objective.STEP


def batch_of(graph: Graph, question: Question | None) -> int | None:
    """How many samples a captured step has, None where nobody knows."""
    if question is not None and question.batch is not None and is_model(question.source):
        return question.batch
    return batch_of_graph(graph)


def revise_problem(
    problem: Problem,
    *,
    objective: Objective | str | None,
    links: Links | str | None,
    split: Split | str | None,
    pipeline: str | None,
) -> Problem:
    """The same problem asked differently; it keeps what is None."""
    if pipeline == AUTO_PIPELINE:
        objective, pipeline = _step_for_auto(objective), ""
    asked = choose_objective(objective, pipeline, problem.objective)
    kept = problem.split if asked == problem.objective else default_split(asked)
    staged = pipeline or (problem.pipeline if pipeline is None and asked == problem.objective else "")
    wanted = (asked, parse_choice(Links, links) or problem.links, parse_choice(Split, split) or kept, staged)
    if wanted == (problem.objective, problem.links, problem.split, problem.pipeline):
        return problem
    return replace(problem, objective=asked, links=wanted[1], split=wanted[2], pipeline=staged)


def read_workload(question: Question) -> Workload:
    """The source of a question; a model is captured as the question says."""
    if not is_model(question.source):  # its precision is about optimizer state, which is added later
        question = replace(question, precision="fp32")
    return read_source(
        question.source,
        format=question.format,
        max_bytes=question.max_bytes,
        asked=CaptureOptions.of(question),
    )


def target_of(cluster: Cluster) -> str:
    """Whose kernels a step on these devices runs."""
    return "cpu" if cluster.on_host[cluster.kind].all() else "cuda"


def choose_objective(
    objective: Objective | str | None, pipeline: str | None, default: Objective
) -> Objective:
    """The objective that is named; '1f1b:8' alone is about throughput, other schedules are about a step."""
    named = parse_choice(Objective, objective)
    if named is not None or not pipeline:
        return named or default
    schedule = parse_schedule(pipeline)
    steady = schedule.name in OF_THROUGHPUT and schedule.stages_per_rank == 1
    return Objective.THROUGHPUT if steady else Objective.STEP


def default_split(objective: Objective) -> Split:
    """What a plan must look like where nobody says."""
    return Split.CHAIN if objective == Objective.THROUGHPUT else Split.FREE


def _complete_step(question: Question, named: Cluster | None) -> Question:
    """A captured step has the kernels of the devices; of the two mixed precisions bf16 is meant."""
    if not is_model(question.source):
        return question
    if question.target is None and named is not None:
        question = replace(question, target=target_of(named))
    return replace(question, precision="bf16-mixed") if question.precision == "mixed" else question
