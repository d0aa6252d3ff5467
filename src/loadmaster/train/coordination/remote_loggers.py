"""Loggers for services: Weights & Biases and MLflow, with one run per trial.

Their packages are imported when a logger is made. A logger that raises is told nothing more, with a warning,
and training goes on.
"""

from collections.abc import Mapping
from typing import Any

from loadmaster.core.errors import InputError


class WandbLogger:
    """Sends loss, tokens/s and metrics to Weights & Biases. Needs the package `wandb`."""

    is_logger = True

    def __init__(self, project: str, **options: Any) -> None:
        try:
            import wandb
        except ImportError:
            raise InputError("WandbLogger needs wandb; install it: pip install wandb") from None
        self._wandb, self._project, self._options = wandb, project, options
        self._runs: dict[str, Any] = {}

    def on_step(self, trial: str, done: Any) -> None:
        """The training loss, and how fast."""
        facts = {"train/loss": done.loss, "train/epoch": done.epoch}
        if done.seconds:
            facts["train/tokens_per_s"] = done.num_tokens / done.seconds
        self._run(trial).log(facts, step=done.step)

    def on_report(self, trial: str, step: int, metrics: Mapping[str, float], decision: str) -> None:
        """Every metric."""
        self._run(trial).log({f"eval/{name}": value for name, value in metrics.items()}, step=step)

    def on_close(self) -> None:
        """End all runs."""
        runs, self._runs = self._runs, {}
        for run in runs.values():
            run.finish()

    def _run(self, trial: str) -> Any:
        if trial not in self._runs:
            self._runs[trial] = self._wandb.init(
                project=self._project, name=trial, id=_plain_id(trial), resume="allow", reinit="create_new",
                **self._options,
            )  # fmt: skip
        return self._runs[trial]


class MlflowLogger:
    """Sends loss, tokens/s and metrics to MLflow. Needs the package `mlflow`."""

    is_logger = True

    def __init__(self, experiment: str, *, tracking_uri: str | None = None) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise InputError("MlflowLogger needs MLflow; install it: pip install mlflow") from None
        self._client = MlflowClient(tracking_uri=tracking_uri)
        self._name, self._experiment = experiment, ""
        self._runs: dict[str, str] = {}

    def on_step(self, trial: str, done: Any) -> None:
        """The training loss, and how fast."""
        self._log(trial, "train/loss", done.loss, done.step)
        if done.seconds:
            self._log(trial, "train/tokens_per_s", done.num_tokens / done.seconds, done.step)

    def on_report(self, trial: str, step: int, metrics: Mapping[str, float], decision: str) -> None:
        """Every metric."""
        for name, value in metrics.items():
            self._log(trial, f"eval/{name}", value, step)

    def on_close(self) -> None:
        """End all runs."""
        runs, self._runs = self._runs, {}
        for run in runs.values():
            self._client.set_terminated(run)

    def _log(self, trial: str, key: str, value: float, step: int) -> None:
        self._client.log_metric(self._run(trial), key, float(value), step=step)

    def _run(self, trial: str) -> str:
        if not self._experiment:
            known = self._client.get_experiment_by_name(self._name)
            self._experiment = known.experiment_id if known else self._client.create_experiment(self._name)
        if trial not in self._runs:
            self._runs[trial] = self._client.create_run(self._experiment, run_name=trial).info.run_id
        return self._runs[trial]


def _plain_id(trial: str) -> str:
    return "".join(each if each.isalnum() or each in "-_" else "-" for each in trial)[:64]
