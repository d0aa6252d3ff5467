"""The live table of a study: trials with loss and tokens/s, devices with how busy they and their bus are."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.report.plain_text import escape_control_characters
from loadmaster.report.text_columns import columns, one_line

_EVERY_S = 20.0


@dataclass
class _Row:
    status: str = "waiting"
    step: int = 0
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    seconds: float = 0.0
    num_done: int = 0  # steps that were seen


@dataclass
class _Device:
    trial: str = ""
    busy_s: float = 0.0
    copy_s: float = 0.0  # of its busier direction
    num_bytes: int = 0


class _Watch:
    """Collects what callbacks tell."""

    def __init__(
        self,
        names: Sequence[str] = (),
        evaluated: Collection[str] | None = None,
        num_steps: Mapping[str, int] | None = None,
    ) -> None:
        self._num_steps = num_steps or {}
        self._evaluated = evaluated  # the others report a loss of their steps, which is shown already
        self.rows = {name: _Row() for name in names}
        self.devices: dict[str, _Device] = {}
        self.began = time.perf_counter()

    def on_device(self, device: str, trial: str, done: Any) -> None:
        """A step."""
        row = self.rows.setdefault(trial, _Row())
        row.status, row.step, row.loss = "running", done.step, done.loss
        row.num_tokens += done.num_tokens
        row.seconds += done.seconds
        row.num_done += 1
        seen = self.devices.setdefault(device, _Device())
        seen.trial = trial
        seen.busy_s += done.seconds
        seen.num_bytes += done.bytes_up + done.bytes_down
        sides = {"up": 0.0, "down": 0.0}
        for lane, _, start_s, end_s in done.spans:
            if lane in sides:
                sides[lane] += end_s - start_s
        seen.copy_s += max(sides.values())

    def on_report(self, trial: str, step: int, metrics: Mapping[str, float], decision: str) -> None:
        """A report."""
        row = self.rows.setdefault(trial, _Row())
        if self._evaluated is None or trial in self._evaluated:
            row.metrics = metrics
        row.status = "paused" if decision == "pause" else row.status

    def on_trial_end(self, trial: str, status: str, error: str) -> None:
        """An end."""
        self.rows.setdefault(trial, _Row()).status = status

    def trials_table(self) -> Table:
        """A row a trial."""
        table = columns(
            "trial",
            "status",
            "step",
            "loss",
            "eval",
            "tokens/s",
            *(("left",) if self._num_steps else ()),
            right=("step", "loss", "tokens/s", "left"),
        )
        for name, row in self.rows.items():
            table.add_row(
                one_line(name),
                row.status,
                str(row.step),
                "-" if row.loss is None else f"{row.loss:.5g}",
                escape_control_characters(
                    ", ".join(f"{key} {value:.5g}" for key, value in row.metrics.items())
                )
                or "-",
                f"{row.num_tokens / row.seconds:.4g}" if row.seconds else "-",
                *((self._format_left(name, row),) if self._num_steps else ()),
            )
        return table

    def _format_left(self, name: str, row: _Row) -> str:
        """Time left of a trial, at the pace of its steps so far."""
        left = self._num_steps.get(name, 0) - row.step
        if row.status != "running" or not row.num_done or left <= 0:
            return "-"
        return format_seconds(left * row.seconds / row.num_done)

    def devices_table(self) -> Table:
        """A row a device."""
        wall_s = max(time.perf_counter() - self.began, 1e-9)
        table = columns("device", "trial", "busy", "bus", "moved", right=("busy", "bus", "moved"))
        for name, seen in self.devices.items():
            table.add_row(
                name,
                one_line(seen.trial),
                format_percent(min(1.0, seen.busy_s / wall_s)),
                format_percent(min(1.0, seen.copy_s / wall_s)),
                format_bytes(seen.num_bytes),
            )
        return table


class LiveTable(_Watch):
    """Drawn again a few times a second while the study runs."""

    is_logger = True

    def __init__(
        self,
        console: Console,
        names: Sequence[str],
        evaluated: Collection[str] | None = None,
        num_steps: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(names, evaluated, num_steps)
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4, transient=True)

    def _draw(self) -> Group:
        return Group(self.trials_table(), self.devices_table())

    def __enter__(self) -> "LiveTable":
        """Begin to draw."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing."""
        self._live.stop()


class LineReporter(_Watch):
    """A line when a trial ends, and one now and then, where no terminal is."""

    is_logger = True

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console, self._said = console, time.perf_counter()

    def on_device(self, device: str, trial: str, done: Any) -> None:
        """A step; seldom said."""
        super().on_device(device, trial, done)
        now = time.perf_counter()
        if now - self._said >= _EVERY_S:
            self._said = now
            took = format_seconds(now - self.began)
            text = f"{took}: {trial} at step {done.step}, loss {done.loss:.5g} on {device}"
            self._console.print(escape_control_characters(text), style="dim", soft_wrap=True)

    def on_trial_end(self, trial: str, status: str, error: str) -> None:
        """Said always."""
        super().on_trial_end(trial, status, error)
        reason = f": {error.strip().splitlines()[0]}" if error.strip() else ""
        self._console.print(
            escape_control_characters(f"{trial}: {status}{reason}"), style="dim", soft_wrap=True
        )
