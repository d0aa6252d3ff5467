"""Outputs on another device than the inputs: ordinary but for what they say when devices do not match.

'meta' stands for the other device, so that no GPU is needed.
"""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch.nn.functional import cross_entropy  # noqa: E402

from loadmaster.core.errors import RunError  # noqa: E402
from loadmaster.runtime.outputs import Output, mark_outputs  # noqa: E402

ELSEWHERE = torch.zeros(1, device="meta")


def test_an_output_where_the_inputs_were_is_itself() -> None:
    out = {"scores": torch.ones(2)}
    assert mark_outputs(out, (torch.zeros(1),))["scores"] is out["scores"]


def test_a_model_without_tensor_inputs_gives_what_it_gives() -> None:
    out = torch.ones(2)
    assert mark_outputs(out, ((), {"flag": True})) is out


def test_labels_elsewhere_are_told_both_devices_and_two_remedies() -> None:
    scores = mark_outputs(torch.randn(2, 3), (ELSEWHERE,))
    labels = torch.zeros(2, dtype=torch.long, device="meta")
    with pytest.raises(
        RunError, match=r"output is on cpu.* on meta; .*labels\.to\(output\.device\).*output_device"
    ):
        cross_entropy(scores, labels)


def test_other_errors_are_torchs_own() -> None:
    scores = mark_outputs(torch.randn(2, 3), (ELSEWHERE,))
    with pytest.raises(RuntimeError, match="size of tensor"):
        scores + torch.ones(2, 5)


def test_gradients_are_those_of_an_ordinary_tensor() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    inputs, labels = torch.randn(2, 4), torch.tensor([0, 2])
    plain = cross_entropy(inputs @ weight.T, labels)
    plain.backward()
    wanted, weight.grad = weight.grad, None
    loss = cross_entropy(mark_outputs(inputs @ weight.T, (ELSEWHERE,)), labels)
    loss.backward()
    assert type(loss) is torch.Tensor
    assert torch.equal(loss, plain)
    assert torch.equal(weight.grad, wanted)


def test_a_loss_that_the_model_gives_itself_is_ordinary() -> None:
    loss = torch.ones(3, requires_grad=True).sum()
    assert mark_outputs(loss, (ELSEWHERE,)) is loss


def test_an_output_can_be_shown_saved_and_copied() -> None:
    out = mark_outputs(torch.arange(3.0), (ELSEWHERE,))
    assert isinstance(out, Output)
    assert "2." in f"{out}"
    assert out.tolist() == [0.0, 1.0, 2.0]
    assert pickle.loads(pickle.dumps(out)).tolist() == out.tolist()
    assert copy.deepcopy(out).tolist() == out.tolist()
    assert type(out.detach()) is torch.Tensor
