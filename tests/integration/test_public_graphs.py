"""The public graphs beside the repository load, add up to their published totals and round-trip.

Their files are not ours and are never copied here; without them these tests skip.
"""

from pathlib import Path

import numpy as np
import pytest

from loadmaster.core import io
from loadmaster.core.graph import NO_GROUP, Graph, Phase, edges
from loadmaster.core.problem import Links, Load, Objective, Problem, Split, Workload
from loadmaster.graph.formats import msr, nodelink, own
from loadmaster.graph.source import read_source
from tests import msr_splits

GRAPHS = Path(__file__).resolve().parents[2].parent / "shared" / "graphs"

# nodes, edges, k, and "one accelerator": the sum of all accelerator times (six digits)
MSR_THROUGHPUT = {
    "LayerGraphs/bert24_inference": (32, 55, 6, 92.406),
    "LayerGraphs/bert24_training": (64, 110, 6, 217.813),
    "LayerGraphs/gnmt_inference": (96, 122, 6, 182.563),
    "LayerGraphs/inceptionv3_inference": (326, 363, 6, 310.969),
    "LayerGraphs/resnet50_inference": (177, 193, 6, 201.450),
    "LayerGraphs/resnet50_training": (354, 386, 6, 462.381),
    "OperatorGraphs/bert_l-3_inference": (235, 250, 3, 49.3526),
    "OperatorGraphs/bert_l-3_training": (600, 817, 3, 122.987),
    "OperatorGraphs/bert_l-6_inference": (418, 448, 3, 77.4615),
    "OperatorGraphs/bert_l-6_training": (1071, 1462, 3, 192.917),
    "OperatorGraphs/resnet50_inference": (604, 619, 6, 325.132),
    "OperatorGraphs/resnet50_training": (1243, 1806, 6, 684.891),
}
MSR_LATENCY = {  # k, memory of an accelerator in MiB
    "LayerGraphs/bert24_inference": (5, 600),
    "LayerGraphs/gnmt_inference": (6, 600),
    "LayerGraphs/inceptionv3_inference": (12, 2048),
    "OperatorGraphs/bert_l-3_inference": (4, 600),
    "OperatorGraphs/bert_l-12_inference": (8, 2048),
    "OperatorGraphs/resnet50_inference": (9, 600),
}
EXPERTS = {  # graph, split, published max-load of the experts' split (six digits)
    "bert24_inference": ("bert24_inference", 20.084),
    "bert24_training": ("bert24_training", 49.4049),
    "gnmt_inference": ("gnmt_inference", 46.2085),
    "inceptionv3_inference": ("inceptionv3_inference", 102.482),
    "resnet50_inference": ("resnet50_inference", 43.9183),
    "resnet50_training": ("resnet50_inference", 112.108),
}
PIPEDREAM = {  # forward nodes, forward edges, sum of forward and backward milliseconds
    "alexnet": (23, 23, 721.223),
    "gnmt": (48, 58, 89.416),
    "resnet18": (71, 79, 733.367),
    "squeezenet1_0": (68, 76, 760.003),
    "vgg16": (41, 41, 690.507),
}


def shared(*parts: str) -> Path:
    path = GRAPHS.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{'/'.join(parts)} is not there; the public graphs lie beside the repository")
    return path


def problem_of(work: Workload) -> Problem:
    assert work.cluster is not None
    assert work.costs is not None
    free = np.full(work.graph.num_ops, -1)
    return Problem(
        work.graph, work.cluster, work.costs, work.objective, work.links, Split.FREE, Load.SUM, free
    )


def assert_round_trips(graph: Graph) -> None:
    for module, write in ((own, io.encode), (nodelink, nodelink.write)):
        again = module.read(write(graph), graph.name).graph
        assert (again.digest, again.name) == (graph.digest, graph.name)


@pytest.mark.parametrize("name", MSR_THROUGHPUT)
def test_msr_throughput_graph_has_its_published_totals(name: str) -> None:
    num_nodes, num_edges, k, one_accelerator = MSR_THROUGHPUT[name]
    work = read_source(shared("msr", "throughput-inputs", f"{name}.json"))
    problem = problem_of(work)
    assert (work.graph.num_ops, len(edges(work.graph)[0])) == (num_nodes, num_edges)
    assert float(f"{problem.costs.compute_s[:, 0].sum():.6g}") == one_accelerator
    assert problem.cluster.num_devices == k + 1
    assert problem.cluster.memory_bytes[0] == 17_185_374_208
    assert (problem.objective, problem.links) == (Objective.THROUGHPUT, Links.HOST)
    assert_round_trips(work.graph)


@pytest.mark.parametrize("name", MSR_LATENCY)
def test_msr_latency_graph_brings_its_devices(name: str) -> None:
    k, mib = MSR_LATENCY[name]
    work = read_source(shared("msr", "latency-inputs", f"{name}.json"))
    cluster = problem_of(work).cluster
    assert cluster.device_name == (*(f"acc{d}" for d in range(k)), *(f"cpu{d}" for d in range(8)))
    assert cluster.memory_bytes[0] == mib * 2**20
    assert_round_trips(work.graph)


@pytest.mark.parametrize("name", ["bert24_training", "resnet50_training"])
def test_every_backward_layer_of_a_training_graph_has_its_forward_layer(name: str) -> None:
    graph = read_source(shared("msr", "throughput-inputs", "LayerGraphs", f"{name}.json")).graph
    backward = np.flatnonzero(graph.phase == Phase.BACKWARD)
    assert 2 * len(backward) == graph.num_ops
    for op in backward.tolist():
        assert graph.op_name[op] == f"{graph.op_name[graph.mirror[op]]}grad"
        assert graph.group[op] == graph.group[graph.mirror[op]] != NO_GROUP


@pytest.mark.parametrize("name", EXPERTS)
def test_the_experts_split_has_its_published_load(name: str) -> None:
    split, published = EXPERTS[name]
    data = shared("msr", "throughput-inputs", "LayerGraphs", f"{name}.json").read_bytes()
    work = msr.read(data, name)
    expert = shared("msr", "human-experts", f"{split}_expert.json").read_bytes()
    device = msr_splits.read_split(expert, work, ids=msr_splits.ids_in_op_order(data))
    problem = problem_of(work)
    load = problem.device_compute_s[np.arange(len(device)), device].copy()
    loads = np.bincount(device, load, minlength=problem.cluster.num_devices)
    for tensor in range(work.graph.num_tensors):
        home = device[work.graph.tensor_op[tensor]]
        users = set(device[work.graph.use_op[work.graph.use_tensor == tensor]].tolist()) - {home}
        for touched in users | ({home} if users else set()):  # each side pays one hop; a CPU none
            loads[touched] += 0 if touched >= 6 else problem.costs.transfer_s[tensor]
    assert float(f"{loads.max():.6g}") == published


@pytest.mark.parametrize("name", PIPEDREAM)
def test_pipedream_profile_has_its_published_totals(name: str) -> None:
    num_nodes, num_edges, total_ms = PIPEDREAM[name]
    work = read_source(shared("pipedream", f"{name}.txt"))
    graph, problem = work.graph, problem_of(work)
    source, target = edges(graph)
    forward = graph.phase == Phase.FORWARD
    assert (int(forward.sum()), int((forward[source] & forward[target]).sum())) == (num_nodes, num_edges)
    assert problem.costs.compute_s.sum() * 1e3 == pytest.approx(total_ms, abs=5e-4)
    assert int((graph.phase == Phase.BACKWARD).sum()) == num_nodes
    order = [int(graph.mirror[op]) for op in np.flatnonzero(graph.phase == Phase.BACKWARD)]
    assert order == np.flatnonzero(forward)[::-1].tolist()  # backward in reverse, as autograd runs it
    assert_round_trips(graph)


def test_no_public_graph_is_left_out() -> None:
    shared("msr")
    found = {path.relative_to(GRAPHS).as_posix() for path in GRAPHS.glob("msr/*-inputs/*/*.json")}
    found |= {path.relative_to(GRAPHS).as_posix() for path in GRAPHS.glob("pipedream/*.txt")}
    tested = {f"msr/throughput-inputs/{name}.json" for name in MSR_THROUGHPUT}
    tested |= {f"msr/latency-inputs/{name}.json" for name in MSR_LATENCY}
    tested |= {f"pipedream/{name}.txt" for name in PIPEDREAM}
    assert found == tested
