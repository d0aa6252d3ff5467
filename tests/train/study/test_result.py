"""How a result is read: by name, one after the other, and not by number."""

import pytest

from loadmaster.core.errors import InputError
from loadmaster.train.coordination.result import Result, TrialResult, TrialStatus


def test_trials_of_a_result_are_read_in_order_and_by_name() -> None:
    trials = tuple(
        TrialResult(name, TrialStatus.DONE, 3, loss, {}, 1.0, 0) for name, loss in (("a", 2.0), ("b", 1.0))
    )
    result = Result(trials)
    assert [each.name for each in result] == ["a", "b"]
    assert len(result) == 2
    assert result["b"].loss == 1.0
    with pytest.raises(InputError, match="0 is not the name of a trial"):
        result[0]  # type: ignore[index]
