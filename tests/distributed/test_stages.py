"""Stages in one process: cut, run one after the other, compared with the whole model."""

import copy
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from loadmaster.modules.loss import compute_loss
from loadmaster.runtime.distributed.pipeline.stage_cut import cut_stages
from loadmaster.runtime.distributed.pipeline.stages import Stage, build_stage, find_deferrable
from loadmaster.runtime.graph_engine.op_facts import collect_facts
from loadmaster.runtime.graph_engine.program import Program, export_program
from loadmaster.zoo.example import Example
from tests.distributed.pipelines import pipeline_placement
from tests.torch_models import example

CPU = torch.device("cpu")


def _cut(built: Example, stages: int, *, deferrable: bool = False) -> tuple[Program, Any, list[Stage]]:
    placement = pipeline_placement(built, stages, 4)
    program = export_program(built.model, built.args, built.kwargs, training=True)
    facts = collect_facts(program)
    outputs = list(next(node for node in program.graph.nodes if node.op == "output").args[0])
    needed = [one for one in outputs if isinstance(one, fx.Node)]
    assert placement.plan is not None
    cut = cut_stages(program, facts, placement.problem.graph, placement.plan, needed)
    made = [
        build_stage(
            program,
            facts,
            cut,
            index,
            built.model,
            where=CPU,
            outputs=outputs,
            instead=find_deferrable if deferrable else None,
        )
        for index in range(stages)
    ]
    return program, cut, made


def _train_by_stages(built: Example, program: Program, stages: list[Stage]) -> torch.Tensor:
    leaves, given, tape = tree_leaves((built.args, built.kwargs)), (), []
    for stage in stages:
        received = [one.detach().requires_grad_(one.requires_grad) for one in given]
        given = stage(*received, leaves=leaves)
        tape.append((received, given))
    loss = compute_loss(program.unflatten_outputs(given), built.loss)
    loss.backward()
    grads = [one.grad for one in tape[-1][0]]
    for received, out in reversed(tape[:-1]):
        pairs = [(one, grad) for one, grad in zip(out, grads, strict=True) if grad is not None]
        torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
        grads = [one.grad for one in received]
    return loss


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("gpt2", 3),
        ("resnet", 3),
        pytest.param("llama", 2, marks=pytest.mark.slow),
        pytest.param("t5", 3, marks=pytest.mark.slow),
        pytest.param("bert", 2, marks=pytest.mark.slow),
        pytest.param("vit", 2, marks=pytest.mark.slow),
        pytest.param("lstm", 2, marks=pytest.mark.slow),
    ],
)
def test_stages_one_after_the_other_give_the_gradients_of_the_whole_model(name: str, stages: int) -> None:
    built = example(name)
    whole = copy.deepcopy(built.model)
    program, cut, made = _cut(built, stages)
    torch.manual_seed(3)
    loss = _train_by_stages(built, program, made)
    torch.manual_seed(3)
    plain = compute_loss(whole(*built.args, **built.kwargs), built.loss)
    plain.backward()
    assert torch.allclose(loss, plain, rtol=1e-6)
    for (weight, one), other in zip(built.model.named_parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), weight
        if other.grad is not None:
            assert float((one.grad - other.grad).norm()) <= 1e-5 * float(other.grad.norm()) + 1e-12, weight
    for (buffer, one), other in zip(built.model.named_buffers(), whole.buffers(), strict=True):
        assert torch.equal(one, other), buffer
    assert all(cut.crossing)


def test_stages_have_the_models_own_parameters_under_their_own_names() -> None:
    built = example("gpt2")
    _, _, stages = _cut(built, 2)
    own = dict(built.model.named_parameters())
    seen = {name: one for stage in stages for name, one in stage.named_parameters()}
    assert seen.keys() == own.keys()
    assert all(seen[name] is own[name] for name in own)
    both = set(dict(stages[0].named_parameters())) & set(dict(stages[1].named_parameters()))
    assert both == {"transformer.wte.weight"}  # the tied embedding stands in the first and the last


class _Skips(torch.nn.Module):
    """The first activation is needed again at the end, and one op writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        y = torch.relu_(self.b(first))
        y = self.c(y + 1.0)
        return self.d(y) + first


def test_a_tensor_that_skips_a_stage_is_carried_through_it() -> None:
    torch.manual_seed(0)
    built = Example(_Skips(), (torch.randn(4, 8),), loss=None)
    whole = copy.deepcopy(built.model)
    program, cut, stages = _cut(built, 4)
    names = [[node.meta["op"] for node in cut.crossing[at]] for at in range(3)]
    assert all("linear" in crossing for crossing in names)
    _train_by_stages(built, program, stages)
    whole(*built.args).mean().backward()
    for one, other in zip(built.model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-5, atol=1e-8)


def test_gradients_of_weights_may_be_added_after_those_of_inputs() -> None:
    from loadmaster.runtime.distributed.pipeline.deferred_weights import DeferredWeights

    torch.manual_seed(0)
    built = Example(_Skips(), (torch.randn(4, 8),))
    _, _, stages = _cut(built, 2, deferrable=True)
    leaves, later = list(built.args), DeferredWeights()
    with later.watching():
        (out, *_) = stages[0](leaves=leaves)
    with later.holding():
        out.sum().backward()
    weights = [one for one in stages[0].parameters() if one.dim() == 2]
    assert all(one.grad is None for one in weights)
    later.add()
    assert any(one.grad is not None and one.grad.abs().sum() > 0 for one in weights)
