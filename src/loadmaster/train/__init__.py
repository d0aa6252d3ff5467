"""Many models, too few devices: training shard by shard, with weights in host memory (`lt`)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadmaster.train.events import Callback as Callback
    from loadmaster.train.events import CsvLogger as CsvLogger
    from loadmaster.train.events import JsonlLogger as JsonlLogger
    from loadmaster.train.events import TensorBoardLogger as TensorBoardLogger
    from loadmaster.train.optuna_search import OptunaSearch as OptunaSearch
    from loadmaster.train.optuna_search import optimize as optimize
    from loadmaster.train.plain_loop import reference as reference
    from loadmaster.train.result import Result as Result
    from loadmaster.train.runner import interleave as interleave
    from loadmaster.train.runner import open_runner as open_runner
    from loadmaster.train.searchers import Asha as Asha
    from loadmaster.train.searchers import Decision as Decision
    from loadmaster.train.searchers import RunAll as RunAll
    from loadmaster.train.searchers import Searcher as Searcher
    from loadmaster.train.searchers import SuccessiveHalving as SuccessiveHalving
    from loadmaster.train.study import Study as Study
    from loadmaster.train.trial import Trial as Trial

_HOME = {
    "Asha": "searchers",
    "Callback": "events",
    "CsvLogger": "events",
    "Decision": "searchers",
    "JsonlLogger": "events",
    "OptunaSearch": "optuna_search",
    "Result": "result",
    "RunAll": "searchers",
    "Searcher": "searchers",
    "Study": "study",
    "SuccessiveHalving": "searchers",
    "TensorBoardLogger": "events",
    "Trial": "trial",
    "interleave": "runner",
    "open_runner": "runner",
    "optimize": "optuna_search",
    "reference": "plain_loop",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Fetch a public name from its home."""
    if name not in _HOME:
        raise AttributeError(f"module 'loadmaster.train' has no attribute {name!r}")
    return getattr(import_module(f"loadmaster.train.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """Public names, also those not fetched yet."""
    return list(__all__)
