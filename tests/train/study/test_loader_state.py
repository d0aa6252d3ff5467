"""Loaders with a state of their own go on in place; a state that is not JSON is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

import loadmaster.train as lt
from loadmaster.core.errors import InputError
from tests.train.lora_trials import lora, tokens
from tests.train.small_trials import Rows, digest, trial
from tests.train.study.test_study import Stop


class Placed(Rows):
    """Says where it stands (a tensor among it), and counts what it gives."""

    given = 0

    def __init__(self, num_batches: int = 10) -> None:
        super().__init__(num_batches)
        self._at, self._order = 0, torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Any:
        if not len(self._order):
            self._order = torch.randperm(len(self._x))
        for at in range(self._at, len(self._x)):
            self._at = at + 1
            type(self).given += 1
            yield self._x[self._order[at]], self._y[self._order[at]]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at, "order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at, self._order = state["at"], state["order"]


def study(folder: Path, one: Any, **options: Any) -> lt.Study:
    return lt.Study([one], dir=folder / "run", devices="cpu", **options)


@pytest.mark.parametrize("after", [3, 13])
def test_a_loader_with_a_state_goes_on_in_place_to_the_weights_of_the_reference(
    after: int, tmp_path: Path
) -> None:
    one = trial("a", data=Placed, evaluate=None)
    wanted = digest(lt.reference(one).state_dict)
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, one, callbacks=[Stop(after, "interrupt")]).fit()
    Placed.given = 0
    result = study(tmp_path, one).fit()
    assert digest(result["a"].state_dict()) == wanted
    # one batch each time the model is looked at; none is skipped by reading it
    assert Placed.given <= 20 - after + 2


def test_a_member_of_a_group_goes_on_in_place(tmp_path: Path) -> None:
    class Tokens(Placed):
        def __init__(self) -> None:
            super().__init__(4)
            batches = tokens(3)
            self._x = torch.stack([x for x, _ in batches])
            self._y = torch.stack([y for _, y in batches])

    one = lora("a", data=Tokens)
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, one, callbacks=[Stop(3, "interrupt")]).fit()
    result = study(tmp_path, one).fit()
    assert digest(result["a"].state_dict()) == digest(lt.reference(one).state_dict)


def test_a_state_that_is_not_json_is_refused_by_name_before_the_start(tmp_path: Path) -> None:
    class Odd(Placed):
        def state_dict(self) -> dict[str, Any]:
            return {"at": object()}

    with pytest.raises(InputError, match=r"loader of trial 'a' \(Odd\) has a state that is not JSON"):
        study(tmp_path, trial("a", data=Odd)).plan()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_the_loader_of_torchdata_goes_on_in_place(tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    rows = Rows(12)
    pairs = [(rows._x[at][0], rows._y[at][0]) for at in range(12)]
    one = trial(
        "a", data=lambda: stateful.StatefulDataLoader(pairs, batch_size=2, shuffle=True), evaluate=None
    )
    wanted = digest(lt.reference(one).state_dict)
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, one, callbacks=[Stop(4, "interrupt")]).fit()
    assert digest(study(tmp_path, one).fit()["a"].state_dict()) == wanted
