"""The command line from the outside: fresh processes, compiled kernels already on disk."""

import sys
from pathlib import Path

from benchmarks.measure import Report, command_s

SUITE = "command"


def run(report: Report) -> None:
    """All figures of the suite."""
    program = str(Path(sys.executable).with_name("loadmaster"))
    help_s = command_s([program, "--help"], repeats=9)
    report.add(SUITE, "loadmaster --help", help_s, "s", aim="< 0.3", reached=help_s < 0.3)
    plan = [program, "plan", "gen:transformer:1500", "--devices", "V100-16GB, T4, RTX2080, cpu-64GB"]
    plan_s = command_s([*plan, "--budget", "500ms", "--json"], repeats=5)
    name = "loadmaster plan --budget 500ms, 1,471 ops, 4 unequal devices"
    report.add(SUITE, name, plan_s, "s", aim="< 2", reached=plan_s < 2)
