"""Plan quality: every generator, size, cluster and link setting, against the bound and published plans.

`BENCH_BUDGET_S` is auto's budget (10 s), `BENCH_SIZES` the sizes (1000,5000,10000). Step times are
simulated. *First come* is the published evaluation: the devices of a plan, its order forgotten.
"""

import math
from collections.abc import Iterable, Mapping

from benchmarks import published
from benchmarks.cases import CLUSTERS, EQUAL, Case, budget_s, every_case, problem_of, sizes
from benchmarks.measure import Report
from benchmarks.question import Question, question_of, warm
from loadmaster.core.placement import Placement
from loadmaster.core.run import Budget
from loadmaster.placers.registry import placer

SUITE = "quality"
CONSTRUCTORS = ("m_topo", "m_etf", "m_sct", "heft", "cpop", "chain_balance", "round_robin", "single_device")
QUARTER = "refine(m_etf)"
FIRST_COME = ("m_etf", "m_sct")
MOST_OVER_PUBLISHED = {"m_etf": 1.01, "m_sct": 1.05}
WORTHWHILE = 1.03  # a best published value this far above the bound can be beaten
BEATEN = 0.99
LEAST_GAIN = 0.90
ENOUGH = 1.01  # of the bound: auto stops there
_ROUNDING = 1 + 1e-9
Times = Mapping[str, float | None]  # seconds by column; None: does not fit


def run(report: Report) -> None:
    """All figures of the suite, then what they say together."""
    warm()
    report.add(SUITE, "budget of auto", budget_s(), "s")
    found: dict[Case, Times] = {}
    for case in every_case(sizes()):
        found[case] = _measure(report, case)
        _check_case(report, case, found[case])
    for cluster in CLUSTERS:
        _mean(report, cluster, [times for case, times in found.items() if case.cluster == cluster])
    unequal = [times for case, times in found.items() if case.cluster != EQUAL]
    _mean(report, "unequal clusters", unequal, most=LEAST_GAIN)


def _measure(report: Report, case: Case) -> Times:
    """Every column of a case."""
    question = question_of(problem_of(case))
    times: dict[str, float | None] = {"serial": question.serial_s}
    answers = {name: question.ask(placer(name)) for name in CONSTRUCTORS}
    answers[QUARTER] = question.ask(placer("refine", start="m_etf"), Budget(seconds=budget_s() / 4))
    answers["auto"] = question.ask(placer("auto"), Budget(seconds=budget_s()))
    times["bound"] = max(answer.bound_s for answer in answers.values())
    times |= {name: answer.score_s for name, answer in answers.items()}
    times |= _first_come(question, case, answers["auto"])
    for name, seconds in times.items():
        short = answers[name].shortfall_bytes.sum() / 2**30 if name in answers else 0.0
        value, unit = (1e3 * seconds, "ms") if seconds is not None else (float(short), "GiB short")
        report.add(SUITE, f"{case}: {name}", value, unit)
    return times


def _first_come(question: Question, case: Case, best: Placement) -> dict[str, float | None]:
    """First come first served, as published plans were scored: where there are some, or might be."""
    if case.cluster != EQUAL or case.links not in published.LINKS:
        return {}
    times = {f"{name} first come": question.ask(placer(name, first_come=True)).score_s for name in FIRST_COME}
    times["auto first come"] = None if best.plan is None else question.first_come_s(best.plan)
    return times


def _check_case(report: Report, case: Case, times: Times) -> None:
    auto, bound = _known(times["auto"]), _known(times["bound"])
    for name, names in (("best constructor", CONSTRUCTORS), (QUARTER, (QUARTER,))):
        other = min(_known(times[column]) for column in names)
        _ratio(report, f"{case}: auto / {name}", auto / other, most=1.0, enough=auto <= ENOUGH * bound)
    theirs = published.step_ms(case.generator, case.num_ops, case.links) if case.cluster == EQUAL else {}
    if not theirs:
        return
    for name, most in MOST_OVER_PUBLISHED.items():
        best = min(theirs[column] for column in published.KINDS[name] if column in theirs)
        ratio = 1e3 * _known(times[f"{name} first come"]) / best
        _ratio(report, f"{case}: {name} first come / better published", ratio, most=most)
    best = min(theirs.values())
    most_of_best = BEATEN if best > WORTHWHILE * 1e3 * bound else None
    _ratio(report, f"{case}: auto / best published", 1e3 * auto / best, most=most_of_best)


def _mean(report: Report, what: str, rows: Iterable[Times], *, most: float | None = None) -> None:
    """Geometric mean of auto over m_etf; a case that m_etf has no plan for says nothing."""
    ratios = [_known(row["auto"]) / _known(row["m_etf"]) for row in rows if row["m_etf"] is not None]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        _ratio(report, f"{what}: auto / m_etf, geometric mean", mean, most=most)


def _ratio(report: Report, name: str, ratio: float, *, most: float | None, enough: bool = False) -> None:
    """Note a ratio that should be at most so much; `enough`: it is as good as it need be anyway."""
    known = math.isfinite(ratio)  # else auto has no plan
    ratio = ratio if known else 0.0
    reached = known and (most is None or enough or ratio <= most * _ROUNDING)
    if most is None:
        report.add(SUITE, name, ratio, "x")
    else:
        report.add(SUITE, name, ratio, "x", aim=f"<= {most:g}", reached=reached)


def _known(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
