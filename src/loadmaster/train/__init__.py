"""Many models, too few devices: training shard by shard, with weights in host memory (`lt`)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadmaster.shards.spec.trial import Trial as Trial
    from loadmaster.train.backbone.group import open_group as open_group
    from loadmaster.train.backbone.group import steps as _group_steps
    from loadmaster.train.coordination.callbacks import Callback as Callback
    from loadmaster.train.coordination.callbacks import CsvLogger as CsvLogger
    from loadmaster.train.coordination.callbacks import JsonlLogger as JsonlLogger
    from loadmaster.train.coordination.callbacks import TensorBoardLogger as TensorBoardLogger
    from loadmaster.train.coordination.patience import Patience as Patience
    from loadmaster.train.coordination.remote_loggers import MlflowLogger as MlflowLogger
    from loadmaster.train.coordination.remote_loggers import WandbLogger as WandbLogger
    from loadmaster.train.coordination.result import Result as Result
    from loadmaster.train.coordination.searchers import Asha as Asha
    from loadmaster.train.coordination.searchers import Decision as Decision
    from loadmaster.train.coordination.searchers import RunAll as RunAll
    from loadmaster.train.coordination.searchers import Searcher as Searcher
    from loadmaster.train.coordination.searchers import SuccessiveHalving as SuccessiveHalving
    from loadmaster.train.execute.runner import interleave as interleave
    from loadmaster.train.execute.runner import open_runner as open_runner
    from loadmaster.train.one_model import train as train
    from loadmaster.train.optuna_search import OptunaSearch as OptunaSearch
    from loadmaster.train.optuna_search import optimize as optimize
    from loadmaster.train.plain_loop import reference as reference
    from loadmaster.train.study import Study as Study

    group_steps = _group_steps

_HOME = {
    "Asha": "train.coordination.searchers",
    "Callback": "train.coordination.callbacks",
    "CsvLogger": "train.coordination.callbacks",
    "Decision": "train.coordination.searchers",
    "JsonlLogger": "train.coordination.callbacks",
    "MlflowLogger": "train.coordination.remote_loggers",
    "OptunaSearch": "train.optuna_search",
    "Patience": "train.coordination.patience",
    "Result": "train.coordination.result",
    "RunAll": "train.coordination.searchers",
    "Searcher": "train.coordination.searchers",
    "Study": "train.study",
    "SuccessiveHalving": "train.coordination.searchers",
    "TensorBoardLogger": "train.coordination.callbacks",
    "Trial": "shards.spec.trial",
    "WandbLogger": "train.coordination.remote_loggers",
    "group_steps": "train.backbone.group",
    "interleave": "train.execute.runner",
    "open_group": "train.backbone.group",
    "open_runner": "train.execute.runner",
    "optimize": "train.optuna_search",
    "reference": "train.plain_loop",
    "train": "train.one_model",
}
_NAME_AT_HOME = {"group_steps": "steps"}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Fetch a public name from its home."""
    if name not in _HOME:
        raise AttributeError(f"module 'loadmaster.train' has no attribute {name!r}")
    return getattr(import_module(f"loadmaster.{_HOME[name]}"), _NAME_AT_HOME.get(name, name))


def __dir__() -> list[str]:
    """Public names, also those not fetched yet."""
    return list(__all__)
