"""Study page: losses, who ran when and how busy every device and its bus were, from the journal of a
study."""

from collections import defaultdict
from collections.abc import Sequence
from math import isfinite

from loadmaster.core.answers.study_log import StudyLog
from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.report import curves
from loadmaster.report.page import Card, Page, Rows, Section, render_page

_MOST_POINTS = 400
_MOST_BARS = 1200  # on a device


def render_study_page(log: StudyLog) -> bytes:
    """The HTML file."""
    done = sum(trial.status == "done" for trial in log.trials)
    failed = [trial for trial in log.trials if trial.status == "failed"]
    ended = [trial for trial in log.trials if trial.losses and isfinite(trial.losses[-1][1])]
    best = min(ended, key=lambda trial: trial.losses[-1][1], default=None)
    total = sum(trial.seconds for trial in log.trials)
    cards = [
        Card("trials done", f"{done} of {len(log.trials)}", f"{len(failed)} failed", "bad" if failed else ""),
        Card("training", format_seconds(log.wall_s), f"{format_seconds(total)} of steps"),
    ]
    if best is not None:
        cards.append(Card("lowest loss at the end", f"{best.losses[-1][1]:.5g}", best.name))
    page = Page(
        title=f"Study {log.name}",
        subtitle=f"{len(log.trials)} trials, {sum(trial.step for trial in log.trials):,} steps",
        cards=cards,
        notes=log.notes,
        troubles=[
            f"{trial.name} failed: {trial.error.strip().splitlines()[-1]}" for trial in failed if trial.error
        ],
        sections=[_trial_section(log), *_loss_section(log), *_when_section(log), *_device_section(log)],
    )
    return render_page(page)


def _trial_section(log: StudyLog) -> Section:
    numbers = ("steps", "last loss", "tokens/s", "time", "up", "down")
    rows = [
        (
            trial.name,
            trial.status,
            str(trial.step),
            f"{trial.losses[-1][1]:.5g}" if trial.losses else "-",
            f"{trial.num_tokens / trial.seconds:,.0f}" if trial.seconds else "-",
            format_seconds(trial.seconds),
            format_bytes(trial.bytes_up) if trial.bytes_up else "-",
            format_bytes(trial.bytes_down) if trial.bytes_down else "-",
            ", ".join(f"{name} {value:.5g}" for name, value in trial.metrics.items()) or "-",
        )
        for trial in log.trials
    ]
    lead = "The result of every trial. Up and down: bytes to the device and back to the host."
    return Section(
        "trials", "Trials", lead, [Rows(("trial", "status", *numbers, "evaluated"), rows, numbers)]
    )


def _loss_section(log: StudyLog) -> list[Section]:
    lines = [(trial.name, _thin(trial.losses)) for trial in log.trials]
    lines = [(name, points) for name, points in lines if points]
    if not lines:
        return []
    chart = curves.line_chart(lines, title="Loss of every trial", across="step")
    key = [(f"d{at % 8}{' dashed' * (at >= 8)}", name) for at, (name, _) in enumerate(lines[:40])]
    return [Section("losses", "Losses", "The loss at the end of every turn.", figures=[chart], key=key)]


def _thin(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    every = max(1, len(points) // _MOST_POINTS)
    return [*points[::every], *(points[-1:] if (len(points) - 1) % every else [])]


def _when_section(log: StudyLog) -> list[Section]:
    if not log.turns:
        return []
    colour = {trial.name: at % 8 for at, trial in enumerate(log.trials)}
    bars = _merge_turns(log, colour)
    chart = curves.bar_lanes(bars, title="Which trial ran on which device")
    key = [(f"d{at}", name) for name, at in list(colour.items())[:40]]
    return [
        Section(
            "when", "Who ran when", "Which trial each device trained, over time.", figures=[chart], key=key
        )
    ]


def _merge_turns(log: StudyLog, colour: dict[str, int]) -> list[tuple[str, float, float, int, str]]:
    """Turns as bars; neighbours of a trial on a device that no picture could tell apart are one.

    Turns shorter than that, of whatever trial, go with the bar before them: at most so many bars are drawn.
    """
    apart_s = log.wall_s / _MOST_BARS
    found: dict[str, list[tuple[str, float, float, int, str]]] = defaultdict(list)
    for turn in sorted(log.turns, key=lambda turn: turn.start_s):
        bars = found[turn.device]
        near = bool(bars) and turn.start_s - bars[-1][2] < apart_s
        if near and (bars[-1][4] == turn.trial or turn.end_s - bars[-1][1] < apart_s):
            bars[-1] = (*bars[-1][:2], max(turn.end_s, bars[-1][2]), *bars[-1][3:])
        else:
            bars.append((turn.device, turn.start_s, turn.end_s, colour.get(turn.trial, 0), turn.trial))
    return [bar for bars in found.values() for bar in bars]


def _device_section(log: StudyLog) -> list[Section]:
    rows: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for turn in log.turns:
        seen = rows[turn.device]
        seen[0] += turn.seconds
        seen[1] += turn.bytes_up
        seen[2] += turn.bytes_down
    if not rows:
        return []
    numbers = ("busy", "in steps", "up", "down", "bus")
    wall = log.wall_s or 1.0
    table = Rows(
        ("device", *numbers),
        [
            (
                device,
                format_percent(min(1.0, busy / wall)),
                format_seconds(busy),
                format_bytes(up),
                format_bytes(down),
                f"{format_bytes((up + down) / wall)}/s",
            )
            for device, (busy, up, down) in rows.items()
        ],
        numbers,
    )
    lead = "How long each device computed steps, and what crossed its bus, from the first step to the last."
    return [Section("devices", "Devices and their bus", lead, [table])]
