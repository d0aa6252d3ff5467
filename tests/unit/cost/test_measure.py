"""Measured costs: what is timed, what is not, and what becomes of the rest. No test holds a stopwatch."""

import functools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="measuring needs the extra [torch]")
from torch import nn  # noqa: E402

import loadmaster as lm  # noqa: E402
from loadmaster.cli.app import complete_arguments  # noqa: E402
from loadmaster.cluster.parse import parse_cluster  # noqa: E402
from loadmaster.cluster.probe import LocalDevice, is_chip, local_devices  # noqa: E402
from loadmaster.core.arrays import Floats  # noqa: E402
from loadmaster.core.cluster import Cluster  # noqa: E402
from loadmaster.core.errors import CostError, InputError, ProblemError, UnknownNameError  # noqa: E402
from loadmaster.core.graph import Dtype, Graph, Phase  # noqa: E402
from loadmaster.core.problem import Origin  # noqa: E402
from loadmaster.cost.busy_machine import CALM  # noqa: E402
from loadmaster.cost.database import CostDatabase, CostRow, open_database  # noqa: E402
from loadmaster.cost.fit import Samples, fit_roofline  # noqa: E402
from loadmaster.cost.keys import COPIES, GAPS, GRAD, NO_KEY, WHOLE_STEP, collect_keys  # noqa: E402
from loadmaster.cost.measure import match_chips, measure_costs, measured_share  # noqa: E402
from loadmaster.cost.roofline import roofline_costs, takes_no_time  # noqa: E402
from loadmaster.cost.signature import PlainWord, TensorSpec, parse_signature  # noqa: E402
from loadmaster.cost.timed.after_forward import CannotRebuild  # noqa: E402
from loadmaster.cost.timed.rebuild import rebuild_call  # noqa: E402
from loadmaster.cost.timed.stopwatch import Job, measure_jobs  # noqa: E402
from loadmaster.cost.timed.timing import time_call  # noqa: E402
from tests.integration.command_line import Say  # noqa: E402
from tests.torch_models import example  # noqa: E402

CPU = torch.device("cpu")
HERE = parse_cluster("cpu-8GB")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database that knows a whole step: measuring one takes longer than all the ops of these tests."""
    place, date = tmp_path / "costs.sqlite", "2026-01-01T00:00:00Z"
    with open_database(place) as database:
        database.put(CostRow(key, chip(), str(torch.__version__), date, 1.0) for key in WHOLE_STEP)
    return place


def settle(database: CostDatabase) -> None:
    """As if all had been measured in a calm moment, however busy the machine that tests is."""
    database.put([replace(row, moment=CALM) for row in database.rows()])


def chip() -> str:
    """The name under which this CPU, with its threads of the moment, is measured."""
    return local_devices()[0].chip


@functools.cache
def captured(name: str) -> Graph:
    made = example(name)
    return lm.capture(made.model, made.args, made.kwargs, loss=made.loss)


def perceptron(**options: Any) -> Graph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return lm.capture(model, (torch.randn(3, 8),), **options)


# ---- signatures


def test_a_signature_is_read_word_by_word() -> None:
    found = parse_signature(
        "aten.cat.default (float32[3,2],int64[3,2]/1,3,bool[]) -1 dim=None x=torch.float32 y=mean"
    )
    assert found is not None
    assert found.op == ("aten", "cat", "default")
    words = [TensorSpec("float32", (3, 2), (2, 1)), TensorSpec("int64", (3, 2), (1, 3))]
    words.append(TensorSpec("bool", (), ()))
    assert found.args == (words, -1)
    assert found.kwargs == {"dim": None, "x": PlainWord("torch.float32"), "y": PlainWord("mean")}
    assert found.tensors == words


def test_an_expanded_tensor_takes_the_memory_it_looks_at() -> None:
    found = parse_signature("aten.div.Scalar float32[3,16,32]/16,1,0 1e-05")
    assert found is not None
    assert found.tensors[0].num_bytes == 4 * 48
    assert found.args[1] == 1e-5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "param float32[3]",
        "<built-in function getitem> (float32[3]) 0",
        "aten.cat.default (float32[3]",
        "aten.add.Tensor float32[2,2]/1",
        "aten.add.Tensor float32[2]float32[2]",
        "aten.x.y " + "(" * 50,
        "aten.cat.default " + "float32[3] " * 400,
    ],
)
def test_what_capture_does_not_write_is_not_read(text: str) -> None:
    assert parse_signature(text) is None


# ---- keys


def test_equal_work_is_one_key_and_gradients_make_another() -> None:
    graph = perceptron()
    keys = collect_keys(graph)
    assert sum(keys.count) == (keys.of_op != NO_KEY).sum()
    assert len(set(keys.text)) == len(keys.text)
    for op in np.flatnonzero(keys.of_op != NO_KEY):
        text = keys.text[keys.of_op[op]]
        assert text.endswith(GRAD) == (graph.phase[op] == Phase.FORWARD)
    assert not any(text.endswith(GRAD) for text in collect_keys(perceptron(train=False)).text)


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        ("sgd", "sgd"),
        ("momentum", "momentum"),
        ("adam", "adamw"),
        ("adamw", "adamw"),
        (lambda weights: torch.optim.AdamW(weights, fused=True), "adamw_fused"),
        (lambda weights: torch.optim.SGD(weights, lr=0.1, fused=True), "sgd_fused"),
    ],
)
def test_an_update_is_known_by_what_its_optimizer_keeps(optimizer: Any, name: str) -> None:
    updates = [
        text for text in collect_keys(perceptron(optimizer=optimizer)).text if text.startswith("update")
    ]
    assert sorted(updates) == sorted(f"update {name} float32[{s}]" for s in ("16,8", "16", "4,16", "4"))


def test_an_optimizer_that_is_not_known_is_left_to_the_roofline() -> None:
    assert not any(text.startswith("update") for text in collect_keys(perceptron(optimizer="adafactor")).text)


# ---- rebuilding


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "resnet", "lstm"])
def test_every_op_of_the_tiny_models_runs_on_its_own(name: str) -> None:
    graph = captured(name)
    keys = collect_keys(graph)
    for text in keys.text:
        signature = parse_signature(text.removesuffix(GRAD))
        if text.startswith("update"):
            continue
        assert signature is not None
        grad = text.endswith(GRAD) and "cumsum" not in text  # an integer has no gradient
        with torch.set_grad_enabled(grad):
            rebuild_call(signature, CPU, grad=grad)()


def test_indices_stay_inside_what_they_index() -> None:
    for text in (
        "aten.embedding.default float32[7,3] int64[1000]",
        "aten.index.Tensor float32[5,9] (int64[1000],int64[1000])",
        "aten.index.Tensor float32[5,9] (None,int64[1000])",
        "aten.gather.default float32[4,6] 1 int64[4,500]",
        "aten.gather.default float32[4,6] -1 int64[4,500]",
        "aten.cross_entropy_loss.default float32[500,11] int64[500]",
        "aten.embedding_dense_backward.default float32[500,3] int64[500] 7 -1 False",
        "aten.scatter_add.default float32[4,6] 0 int64[4,6] float32[4,6]",
        "aten.max_pool2d_with_indices_backward.default float32[2,3,4,4] float32[2,3,8,8] (2,2) (2,2) (0,0)"
        " (1,1) False int64[2,3,4,4]",
        "aten.index_put.default float32[96,32] (int64[96]) float32[96,32] True",
    ):
        signature = parse_signature(text)
        assert signature is not None
        rebuild_call(signature, CPU, grad=False, copies=3)()  # torch checks bounds on the CPU


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("aten.from_file.default nets.bin", "not run on its own"),
        ("evil.rm.default float32[2]", "not run on its own"),
        ("aten.no_such_op.default float32[2]", "this torch has no"),
        ("aten.relu.default float99[2]", "no dtype float99"),
        ("aten.relu.default float32[2] 3 4", "takes 1 arguments"),
        ("aten.relu.default float32[2] odd=1", "no argument odd"),
        ("aten._to_copy.default float32[2] dtype=torch.load", "is not a dtype"),
    ],
)
def test_what_cannot_be_rebuilt_says_why(text: str, match: str) -> None:
    signature = parse_signature(text)
    assert signature is not None
    with pytest.raises(CannotRebuild, match=match):
        rebuild_call(signature, CPU, grad=False)


def test_what_is_too_large_for_this_machine_is_left_out() -> None:
    huge = Job("aten.relu.default float32[1000000,1000000,1000]", 1, 1e-6, 10)
    rows = list(measure_jobs([huge], "cpu", "chip", budget_s=5, say=lambda *_: None))
    assert rows == []


def test_measuring_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    jobs = [Job("aten.dropout.default float32[64] 0.5 True @grad", 1, 1e-6, 256)]
    *_, row = measure_jobs(jobs, "cpu", "chip", budget_s=5, say=lambda *_: None)
    assert row.seconds is not None
    assert torch.equal(torch.rand(4), expected)


# ---- timing


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_timing_is_the_median_of_the_calls() -> None:
    timing = time_call(lambda: busy(0.002), CPU)
    assert timing.seconds >= 0.0019  # two clocks
    assert timing.count >= 3
    assert timing.issue_s == 0.0


# ---- the fit


def law(flops: Floats, moved: Floats) -> Floats:
    return np.maximum(flops / 3e10, moved / 5e9) + 4e-6


def samples(num: int, seed: int) -> Samples:
    rng = np.random.default_rng(seed)
    flops, moved = 10 ** rng.uniform(4, 10, num), 10 ** rng.uniform(3, 8, num)
    flops[rng.random(num) < 0.4] = 0.0
    return Samples(law(flops, moved), flops, moved, np.zeros(num, dtype=np.int8))


def test_the_fit_finds_the_law_behind_exact_samples() -> None:
    fitted = fit_roofline(samples(200, 0), np.full(len(Dtype), 1e11), 2e10)
    assert fitted is not None
    assert fitted.flops_per_s[Dtype.FLOAT32] == pytest.approx(3e10, rel=0.05)
    assert fitted.bytes_per_s == pytest.approx(5e9, rel=0.05)
    assert fitted.overhead_s == pytest.approx(4e-6, rel=0.1)
    other = samples(50, 1)
    guessed = fitted.seconds(other.flops, other.bytes_moved, other.dtype)
    assert np.median(np.abs(guessed / other.seconds - 1)) < 0.05


def test_a_tenth_of_wild_samples_does_not_pull_the_fit() -> None:
    exact = samples(200, 2)
    seconds = exact.seconds.copy()
    seconds[::10] *= 50
    fitted = fit_roofline(replace(exact, seconds=seconds), np.full(len(Dtype), 1e11), 2e10)
    assert fitted is not None
    assert fitted.flops_per_s[Dtype.FLOAT32] == pytest.approx(3e10, rel=0.15)
    assert fitted.bytes_per_s == pytest.approx(5e9, rel=0.15)


def test_too_few_samples_fit_nothing() -> None:
    assert fit_roofline(samples(3, 0), np.full(len(Dtype), 1e11), 2e10) is None


# ---- costs


def test_every_op_of_a_model_is_measured_once_and_never_again(path: Path) -> None:
    graph = perceptron()
    with open_database(path) as database:
        (one,) = measure_costs(graph, HERE, database, budget_s=60).kinds
        settle(database)
        first, again = (measure_costs(graph, HERE, database, budget_s=60) for _ in range(2))
    (other,) = again.kinds
    assert one.num_new == one.num_known == one.num_keys
    assert (other.num_new, other.num_known) == (0, one.num_keys)
    assert first.costs.digest == again.costs.digest
    costs = first.costs
    works = ~takes_no_time(graph)
    assert (costs.compute_s[works] > 0).all()
    assert (costs.origin[works] == Origin.MEASURED).all()
    assert (costs.compute_s[graph.phase == Phase.PARAM] == 0).all()
    assert (costs.issue_s == 0).all()  # the host runs them itself
    assert (costs.rel_error[works] >= 0.05).all()


def test_a_second_model_measures_only_what_is_new(path: Path) -> None:
    graph = perceptron()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Tanh())
    wider = lm.capture(model, (torch.randn(3, 8),))
    new = set(collect_keys(wider).text) - set(collect_keys(graph).text)
    with open_database(path) as database:
        measure_costs(graph, HERE, database, budget_s=60)
        settle(database)
        found = measure_costs(wider, HERE, database, budget_s=60)
    assert found.kinds[0].num_new == len(new)
    assert any("tanh" in text for text in new)


def test_the_time_of_an_op_is_that_of_its_row_and_what_lies_between_ops(path: Path) -> None:
    graph = perceptron()
    keys = collect_keys(graph)
    date, version = "2026-01-01T00:00:00Z", torch.__version__
    rows = [
        CostRow(text, chip(), version, date, 1e-3 * (at + 1), 0.2, 9) for at, text in enumerate(keys.text)
    ]
    rows += [
        CostRow(key, chip(), version, date, gap)
        for key, gap in zip(GAPS, (0.5, 0.25, 0.4, 0.75, 0.1, 0.125), strict=True)
    ]
    rows += [CostRow(key, chip(), version, date, 1.0) for key in (*WHOLE_STEP, *COPIES)]
    with open_database(path) as database:
        database.put(rows)
        found = measure_costs(graph, HERE, database, budget_s=60)
    assert found.kinds[0].num_new == 0
    num_updates = int((graph.phase == Phase.UPDATE).sum())
    gap = {Phase.FORWARD: 0.5, Phase.BACKWARD: 0.25, Phase.UPDATE: 0.1 + 0.4 / num_updates}
    for op in np.flatnonzero(keys.of_op != NO_KEY):
        expected = 1e-3 * (keys.of_op[op] + 1) + gap[Phase(int(graph.phase[op]))]
        assert found.costs.compute_s[op, 0] == pytest.approx(expected)
        assert found.costs.rel_error[op] == 0.2


def test_an_op_in_mixed_precision_has_the_gap_of_mixed_precision(path: Path) -> None:
    graph = lm.capture(torch.nn.Linear(4, 4), torch.zeros(2, 4), autocast=torch.bfloat16)
    keys = collect_keys(graph)
    date, version = "2026-01-01T00:00:00Z", torch.__version__
    gaps = zip(GAPS, (0.5, 0.25, 0.0, 0.75, 0.0, 0.125), strict=True)
    rows = [CostRow(text, chip(), version, date, 1e-3) for text in keys.text]
    rows += [CostRow(key, chip(), version, date, gap) for key, gap in gaps]
    with open_database(path) as database:
        database.put(rows)
        found = measure_costs(graph, HERE, database, budget_s=0)
    mixed = [op for op in range(graph.num_ops) if "linear" in graph.op_kind[op] and keys.of_op[op] != NO_KEY]
    assert mixed
    for op in mixed:
        forward = graph.phase[op] == Phase.FORWARD
        assert found.costs.compute_s[op, 0] == pytest.approx(1e-3 + (0.75 if forward else 0.125))


def test_without_time_to_measure_the_roofline_is_fitted_to_what_is_known(path: Path) -> None:
    graph = captured("gpt2")
    keys = collect_keys(graph)
    version, date = torch.__version__, "2026-01-01T00:00:00Z"
    plain = roofline_costs(graph, HERE).compute_s[keys.first, 0]
    works = plain > 0
    known = [at for at in np.flatnonzero(works).tolist() if at % 2]
    rows = [CostRow(keys.text[at], chip(), version, date, 10 * float(plain[at]), 0.0, 9) for at in known]
    with open_database(path) as database:
        database.put(rows)
        found = measure_costs(graph, HERE, database, budget_s=0)
    assert found.kinds[0].num_known == len(known)
    assert found.kinds[0].fitted is not None
    measured_op = keys.measurable & np.isin(keys.of_op, known)
    assert ((found.costs.origin == Origin.MEASURED) == measured_op).all()
    guessed = works[np.clip(keys.of_op, 0, None)] & keys.measurable & ~measured_op
    guessed &= graph.phase != Phase.UPDATE
    ratio = found.costs.compute_s[guessed, 0] / roofline_costs(graph, HERE).compute_s[guessed, 0]
    assert np.median(ratio) == pytest.approx(10, rel=0.1)  # ten times slower, as the samples were


def test_what_takes_most_of_the_step_is_measured_first() -> None:
    work = ((10, 1, 1e-6), (20, 100, 1e-6), (30, 1, 1e-5), (40, 3, 1.0))
    jobs = [Job(f"aten.relu.default float32[{n}]", count, expected, 8 * n) for n, count, expected in work]
    rows = list(measure_jobs(jobs, "cpu", "chip", budget_s=2.0, say=lambda *_: None))
    order = [row.signature.partition("[")[2].rstrip("]") for row in rows]
    assert order[:3] == ["20", "30", "10"]  # 40 would not end in time; the others have their turn again
    assert "40" not in order


def test_an_op_that_cannot_run_is_remembered_with_its_reason(path: Path) -> None:
    graph = perceptron(train=False)
    broken = tuple(text.replace("float32[16,8]", "float32[16,9]") for text in graph.signature_table)
    with open_database(path) as database:
        found = measure_costs(replace(graph, signature_table=broken), HERE, database, budget_s=60)
        failed = [row for row in database.rows() if row.seconds is None]
    assert len(failed) == 1
    assert "RuntimeError" in failed[0].reason
    assert found.kinds[0].num_known == found.kinds[0].num_keys - 1
    assert np.isfinite(found.costs.compute_s).all()


def test_a_graph_without_signatures_is_refused(path: Path) -> None:
    graph = replace(perceptron(), signature=np.full(perceptron().num_ops, -1), signature_table=())
    with open_database(path) as database, pytest.raises(CostError, match="no op with a signature"):
        measure_costs(graph, HERE, database)


# ---- which device a kind is


def test_a_kind_is_a_chip_of_that_name() -> None:
    assert is_chip("H200", "NVIDIA H200")
    assert is_chip("A100-80GB", "NVIDIA A100-SXM4-80GB")
    assert is_chip("RTX 3090", "NVIDIA GeForce RTX 3090")
    assert is_chip("RTX3090", "NVIDIA GeForce RTX 3090")
    assert is_chip("GTX1080Ti", "NVIDIA GeForce GTX 1080 Ti")
    assert not is_chip("RTX2080", "NVIDIA GeForce RTX 2080 Ti")
    assert not is_chip("A100-80GB", "NVIDIA A100-SXM4-40GB")
    assert not is_chip("T4", "NVIDIA T400")
    assert not is_chip("", "NVIDIA H200")


def test_a_cpu_preset_is_this_machine_where_nothing_else_is_foreign() -> None:
    cpu, gpu = (
        LocalDevice("cpu0", "", 1, "Xeon, 8 threads", "cpu"),
        LocalDevice("gpu0", "", 1, "H200", "cuda:0"),
    )
    assert match_chips(parse_cluster("cpu"), (cpu,)) == [cpu]
    assert match_chips(parse_cluster("H200, cpu64"), (cpu, gpu)) == [gpu, cpu]
    assert match_chips(parse_cluster("V100, cpu64"), (cpu, gpu)) == [None, None]
    assert match_chips(parse_cluster("H200, V100"), (cpu, gpu)) == [gpu, None]


def gpu_rows(graph: Graph, chip: str) -> list[CostRow]:
    return [CostRow(text, chip, "2.11", "2026-01-01T00:00:00Z", 2e-6, 0.0, 9, issue_s=7e-6)
            for text in collect_keys(graph).text]  # fmt: skip


def test_rows_of_another_machine_serve_kinds_that_are_not_here(path: Path) -> None:
    graph, cluster = perceptron(), parse_cluster("V100")
    with open_database(path) as database:
        database.put(gpu_rows(graph, "Tesla V100-SXM2-16GB"))
        found = measure_costs(graph, cluster, database, budget_s=60)
    works = ~takes_no_time(graph)
    assert found.kinds[0].chip == "Tesla V100-SXM2-16GB"
    assert (found.costs.compute_s[works, 0] == 2e-6).all()
    assert (found.costs.compute_s[~works, 0] == 0).all()  # a view launches nothing
    assert (found.costs.issue_s[collect_keys(graph).measurable] == 7e-6).all()  # but is issued


def test_a_step_of_short_kernels_is_predicted_to_wait_for_its_launches(path: Path) -> None:
    graph = perceptron()
    with open_database(path) as database:
        database.put(gpu_rows(graph, "Tesla V100"))
    problem = lm.problem(graph, "V100", costs="measured", database=path)
    step_s = lm.plan(problem, algorithm="single_device", budget="5x").score_s
    launches = int(collect_keys(graph).measurable.sum())
    assert step_s is not None
    assert step_s == pytest.approx(launches * 7e-6, rel=0.1)


# ---- the interface


def test_the_plan_says_how_much_of_its_time_was_measured(path: Path) -> None:
    graph = perceptron()
    said: list[str] = []
    problem = lm.problem(
        graph, "cpu-8GB", costs="measured", measure_budget=60, database=path, tell=said.append
    )
    placement = lm.plan(problem, algorithm="single_device", budget="5x")
    assert placement.plan is not None
    assert measured_share(problem, placement.plan) > 0.99
    plain = lm.problem(graph, "cpu-8GB")
    assert measured_share(plain, placement.plan) == 0.0
    assert len(said) == 1
    assert "ops measured" in said[0]


def test_bad_words_about_costs_are_refused(path: Path) -> None:
    graph = perceptron()
    with pytest.raises(UnknownNameError, match="unknown costs 'guess'"):
        lm.problem(graph, "cpu", costs="guess")
    with pytest.raises(InputError, match="not a time"):
        lm.problem(graph, "cpu", costs="measured", measure_budget="200x")
    with pytest.raises(InputError, match="not positive"):
        lm.problem(graph, "cpu", costs="measured", measure_budget=-1)
    with pytest.raises(ProblemError, match="its own times"):
        lm.problem("gen:chain:5", costs="measured", database=path)
    with pytest.raises(CostError, match="no op with a signature"):
        lm.problem("gen:chain:5", "cpu", costs="measured", database=path)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["plan", "x", "--measure"], ["plan", "x", "--measure", "30s"]),
        (["plan", "--measure", "x"], ["plan", "--measure", "30s", "x"]),
        (["plan", "--measure", "--json", "x"], ["plan", "--measure", "30s", "--json", "x"]),
        (["plan", "--measure", "10", "x"], ["plan", "--measure", "10", "x"]),
        (["plan", "--measure", "500ms", "x"], ["plan", "--measure", "500ms", "x"]),
        (["plan", "--measure=5s", "x"], ["plan", "--measure=5s", "x"]),
    ],
)
def test_measure_alone_means_half_a_minute(given: list[str], meant: list[str]) -> None:
    assert complete_arguments(given) == meant


def test_the_command_line_measures_once(say: Say) -> None:
    source = "import torch\ndef build():\n    return torch.nn.Linear(4, 4), (torch.zeros(2, 4),)\n"
    Path("net.py").write_text(source)
    plan = ["plan", "net.py:build", "-d", "cpu-8GB", "-a", "single_device", "--measure", "4s"]
    for news in ("new", "0 new"):
        code, out, err = say(*plan, "--database", "own.sqlite", "--json")
        assert code == 0, err
        assert json.loads(out)["measured_share"] > 0.99
        assert news in err
        with open_database("own.sqlite") as database:
            settle(database)
    code, _, err = say("plan", "net.py:build", "-d", "cpu", "--database", "own.sqlite")
    assert code == 2
    assert "only --measure uses" in err


@pytest.mark.gpu
def test_a_gpu_is_measured_in_device_time_and_launch_time(path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    gpu = local_devices()[1]
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024), nn.LayerNorm(1024))
    graph = lm.capture(model, (torch.randn(64, 1024),), target="cuda")
    cluster = gpu_cluster(gpu)
    with open_database(path) as database:
        found = measure_costs(graph, cluster, database, budget_s=60)
        settle(database)
        again = measure_costs(graph, cluster, database, budget_s=60)
    assert found.kinds[0].measured_share > 0.9
    assert again.kinds[0].num_new == 0
    works = ~takes_no_time(graph) & collect_keys(graph).measurable
    assert (found.costs.compute_s[works, 0] > 0).all()
    assert (found.costs.compute_s[works, 0] < 1e-2).all()
    assert (found.costs.issue_s[works] > 0).all()
    assert torch.cuda.memory_allocated() < 2**28  # a library may keep its workspace


@pytest.mark.gpu
def test_a_slow_host_is_not_taken_for_a_slow_kernel() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda:0")
    x = torch.ones(16, device=device)

    def lazily() -> None:
        busy(2e-4)
        x.add_(1)

    timing = time_call(lazily, device)
    assert timing.issue_s >= 2e-4
    assert timing.seconds < 5e-5


@pytest.mark.gpu
def test_a_large_product_takes_as_long_as_its_flops() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda:0")
    signature = parse_signature("aten.mm.default bfloat16[8192,8192] bfloat16[8192,8192]")
    assert signature is not None
    timing = time_call(rebuild_call(signature, device, grad=False), device)
    assert 5e12 < 2 * 8192**3 / timing.seconds < 2e15
    assert timing.issue_s < timing.seconds


def gpu_cluster(gpu: LocalDevice) -> Cluster:
    """A cluster of one GPU under its own name."""
    return replace(parse_cluster("H200"), kind_name=(gpu.chip,))
