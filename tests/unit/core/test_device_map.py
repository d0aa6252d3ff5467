"""Plans as Hugging Face device maps, both ways, with `accelerate` as the judge."""

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="device maps are of modules")
accelerate = pytest.importorskip("accelerate", reason="the judge of device maps")

import loadmaster as lm  # noqa: E402
from loadmaster.core.check import check_plan  # noqa: E402
from loadmaster.core.errors import InputError, PlanError  # noqa: E402
from loadmaster.core.graph import Phase  # noqa: E402
from loadmaster.core.plan import plan_of  # noqa: E402
from tests.placing import first_difference, trained  # noqa: E402
from tests.torch_models import example, example_graph  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = "2xRTX3090, cpu-64GB"


def problem(name: str = "gpt2", devices: str = DEVICES) -> lm.Problem:
    return lm.problem(example_graph(name), devices)


def by_blocks(question: lm.Problem) -> Any:
    """The first block and the embeddings on device 0, the second on 1, the head on 2."""

    def at(path: str) -> int:
        return 1 if "h.1" in path else 2 if "ln_f" in path or "lm_head" in path else 0

    graph = question.graph
    import numpy as np

    where = [at(m or n) for m, n in zip(graph.module, graph.op_name, strict=True)]
    return plan_of(np.array(where, dtype=np.int32))


def test_a_map_has_few_entries_and_the_devices_of_the_plan() -> None:
    question = problem()
    assert by_blocks(question).to_device_map(question) == {
        "transformer.wte": 0,
        "transformer.wpe": 0,
        "transformer.drop": 0,
        "transformer.h.0": 0,
        "transformer.h.1": 1,
        "transformer.ln_f": "cpu",
        "lm_head": "cpu",
    }


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "resnet"])
def test_a_map_is_in_the_order_of_the_modules(name: str) -> None:
    modules = [path for path, _ in example(name).model.named_modules()]
    question = problem(name)
    placement = lm.plan(question, algorithm="round_robin")
    paths = [path for path in placement.to_device_map() if path in modules]
    assert len(paths) > 3
    blocks = [path for path in paths if path.rpartition(".")[2].isdecimal()]
    assert blocks == sorted(blocks, key=modules.index)
    heads = list(dict.fromkeys(path.split(".")[0] for path in paths))
    assert heads == sorted(heads, key=modules.index)


def test_parts_without_weights_stand_between_their_neighbours() -> None:
    layers = [
        torch.nn.Linear(8, 8),
        torch.nn.ReLU(),
        torch.nn.Linear(8, 8),
        torch.nn.Tanh(),
        torch.nn.Linear(8, 8),
    ]
    model = torch.nn.Sequential(*layers)
    question = lm.problem(lm.capture(model, (torch.zeros(2, 8),)), "cpu#0-1MB, cpu#1-1MB")
    import numpy as np

    modules = question.graph.module
    plan = plan_of(np.array([int((m or "0")[0] in "234l") for m in modules], dtype=np.int32))
    assert list(plan.to_device_map(question)) == ["0", "1", "2", "3", "4"]


def test_everything_on_one_device_is_one_entry() -> None:
    question = problem()
    placement = lm.plan(question, algorithm="single_device")
    assert list(placement.to_device_map()) == [""]


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert", "vit", "resnet", "lstm"])
def test_a_map_goes_to_a_plan_and_back(name: str) -> None:
    question = problem(name)
    first = lm.plan(question, algorithm="round_robin")
    assert first.plan is not None
    given = first.to_device_map()
    plan = lm.Plan.from_device_map(given, question)
    assert [v for v in check_plan(question, plan) if v.rule != "memory"] == []
    graph = question.graph
    at = {name: int(d) for name, d in zip(graph.op_name, plan.device, strict=True)}
    votes = {name for name in given if name in at}  # weights by name
    assert all(given[name] == ([0, 1, "cpu"][at[name]]) for name in votes)
    assert plan.to_device_map(question) == lm.Plan.from_device_map(
        plan.to_device_map(question), question
    ).to_device_map(question), "a map that came from a map stays itself"


def test_accelerate_runs_a_model_under_our_map() -> None:
    built = example("gpt2")
    built.model.eval()
    question = problem("gpt2", "cpu#0-64MB, cpu#1-64MB, cpu#2-64MB")
    given = by_blocks(question).to_device_map(question)
    assert set(given.values()) == {"cpu"}
    assert len(given) > 1
    accelerate.utils.check_device_map(built.model, given)
    wanted = built.model(**built.kwargs)
    other = copy.deepcopy(built.model)
    other.tie_weights()
    dispatched = accelerate.dispatch_model(other, given, main_device="cpu", force_hooks=True)
    found = dispatched(**built.kwargs)
    assert torch.equal(wanted.logits, found.logits)
    assert dispatched.hf_device_map == given


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_what_accelerate_infers_becomes_a_plan(name: str) -> None:
    built, question = example(name), problem(name)
    sizes = accelerate.utils.compute_module_sizes(built.model)
    room = {0: sizes[""] // 2, 1: sizes[""] // 2, "cpu": 10 * sizes[""]}
    given = accelerate.infer_auto_device_map(built.model, max_memory=room)
    assert len(set(given.values())) > 1
    plan = lm.Plan.from_device_map(given, question)
    graph = question.graph
    assert [v for v in check_plan(question, plan) if v.rule != "memory"] == []
    for op in range(graph.num_ops):
        if graph.phase[op] == Phase.PARAM and graph.op_kind[op] == "param":
            name_of = graph.op_name[op]
            entry = max((path for path in given if name_of.startswith(path)), key=len)
            assert given[entry] == [0, 1, "cpu"][plan.device[op]]


def test_a_plan_of_a_map_trains_with_the_models_numbers() -> None:
    built, plain = example("gpt2"), example("gpt2")
    question = problem("gpt2", "cpu#0-64MB, cpu#1-64MB")
    given = {"transformer.wte": "cpu#0", "transformer.wpe": "cpu#0", "transformer.h.0": "cpu#0"}
    given |= {"transformer.h.1": "cpu#1", "transformer.ln_f": "cpu#1", "lm_head": "cpu#1"}
    plan = lm.Plan.from_device_map(given, question)
    assert set(plan.device.tolist()) == {0, 1}
    with pytest.raises(InputError, match=r"lm.plan\(problem, algorithm=plan\)"):
        lm.place(built.model, plan)
    answer = lm.plan(question, algorithm=plan)
    assert answer.plan is not None
    assert answer.plan.device.tolist() == plan.device.tolist()
    assert answer.score_s == lm.simulate(question, answer.plan).step_s
    model = lm.place(built.model, answer)
    assert first_difference(trained(plain.model, plain, steps=2), trained(model, built, steps=2)) == ""


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "is a dict"),
        ({"": 7}, r"on '7', the devices are gpu0, gpu1, cpu0"),
        ({"": "disk"}, "can be on the host"),
        ({"": 0, "transformer.h.99": 0}, "'transformer.h.99', which graph"),
        ({"transformer.h": 0}, "does not mention weight 'transformer.wte.weight'"),
    ],
)
def test_maps_that_say_nothing_useful_are_refused(given: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        lm.Plan.from_device_map(given, problem())


def test_a_device_with_several_parts_must_be_named_by_part() -> None:
    with pytest.raises(PlanError, match=r"cpu#0, cpu#1 are parts of; name one"):
        lm.Plan.from_device_map({"": "cpu"}, problem("gpt2", "cpu#0-64MB, cpu#1-64MB"))
