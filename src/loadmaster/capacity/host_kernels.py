"""Host kernels: a step over GPUs and CPUs, its ops on a CPU counted with the memory of the CPU's kernels.

Attention, dropout and recurrent layers run other kernels on a CPU than on a GPU, and keep other tensors for
their backward pass. A graph is captured for one kind. So a plan for GPU kernels stands only if no such op is
on a CPU. Else the step is asked for with the CPU's kernels everywhere: exact on CPUs, and on GPUs at least
what is needed, since the kernels of a GPU never keep more.
"""

from dataclasses import replace

import numpy as np

from loadmaster.capacity.fit_search import FitSearch
from loadmaster.capacity.step_setting import StepSetting
from loadmaster.capacity.verdict import Verdict, judge_cluster
from loadmaster.core.arrays import Bools, Floats
from loadmaster.core.cluster import Cluster
from loadmaster.core.graph import Graph
from loadmaster.core.problem import Problem


def judge_mixed_cluster(search: FitSearch, setting: StepSetting, problem: Problem) -> Verdict:
    """All devices of a problem, GPUs and CPUs, each with its own kernels."""
    verdict = judge_cluster(search, problem)
    if not search.is_model or not verdict.fits or not is_mixed(problem.cluster):
        return verdict
    on_host = problem.cluster.on_host[problem.cluster.kind[verdict.plan.device]]
    if not on_host.any():
        return verdict
    other = search.problem(replace(setting, target="cpu"), problem.cluster)
    if not (find_kernel_ops(problem.graph, other.graph) & on_host).any():
        return verdict
    return judge_cluster(search, other)


def is_mixed(cluster: Cluster) -> bool:
    """Whether there are CPUs and other devices."""
    on_host = cluster.on_host[cluster.kind]
    return bool(on_host.any() and not on_host.all())


def find_kernel_ops(one: Graph, other: Graph) -> Bools:
    """[N] ops of the first graph whose kernels take other memory in the second, of the same step."""
    if one.op_name != other.op_name:
        return np.ones(one.num_ops, dtype=bool)  # other ops altogether
    return np.asarray(count_made_bytes(one) != count_made_bytes(other))


def count_made_bytes(graph: Graph) -> Floats:
    """[N] what each op makes, and what it needs while it runs."""
    own = graph.tensor_storage == np.arange(len(graph.tensor_op))
    made = np.bincount(graph.tensor_op[own], weights=graph.tensor_bytes[own], minlength=graph.num_ops)
    return np.asarray(made + graph.workspace_bytes, dtype=np.float64)
