"""loadmaster advise: how many devices a job should get, and replays of streams of jobs."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from loadmaster.cli import options as o

if TYPE_CHECKING:
    from loadmaster.advisor.replay import Row

SUMMARY = "How many devices should a job get? Advice, replays and benchmarks."


class _JobByDefault(TyperGroup):
    """`loadmaster advise job.toml ...` is `loadmaster advise job job.toml ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            _refuse_misspelt(args[0], tuple(self.commands))
            args = ["job", *args]
        return super().parse_args(ctx, args)


def _refuse_misspelt(word: str, commands: tuple[str, ...]) -> None:
    """A word that is nearly a command and no file is not taken for a job."""
    import difflib
    from pathlib import Path

    from loadmaster.core.errors import UnknownNameError

    plain = word.isascii() and word.isalpha()
    if plain and difflib.get_close_matches(word, commands, n=1, cutoff=0.7) and not Path(word).exists():
        raise UnknownNameError("command of advise", word, commands)


app = typer.Typer(help=SUMMARY, rich_markup_mode=None, pretty_exceptions_enable=False, cls=_JobByDefault)
Seeds = Annotated[int, typer.Option("--seeds", metavar="N", help="How many streams are drawn.")]
FirstSeed = Annotated[int, typer.Option("--first-seed", metavar="N", help="Seed of the first stream.")]
Throughputs = Annotated[
    str, typer.Option("--throughputs", metavar="FILE", help="Measured steps per second (Gavel's JSON).")
]
Policies = Annotated[
    str | None, typer.Option("--policy", "-p", metavar="NAMES", help="Comma-separated; default: all.")
]
Skip = Annotated[bool, typer.Option("--skip-malformed", help="Skip malformed trace lines and list them.")]
Kind = Annotated[str, typer.Option("--kind", metavar="NAME", help="Device kind of the measurements.")]
Elastic = Annotated[bool, typer.Option("--elastic", help="Jobs may be resized while they run.")]
DeadlineRange = Annotated[
    str,
    typer.Option(
        "--deadlines", metavar="NAME", help="default, tight or loose, relative to the job's own time."
    ),
]
Resize = Annotated[
    str,
    typer.Option("--resize", metavar="TIME", help="Lost at each change of size, e.g. 30s; with --elastic."),
]
PerHost = Annotated[int, typer.Option("--per-host", metavar="N", help="Devices of a host.")]


@app.command(name="job", short_help="Advice for one job (the default).")
def job(
    source: Annotated[
        str, typer.Argument(metavar="JOB", help="A job file (.toml), or a source as in: loadmaster plan.")
    ],
    devices: Annotated[
        str,
        typer.Option("--devices", "--cluster", "-d", metavar="CLUSTER", help="'16xA100-80GB' or a .toml."),
    ],
    state: Annotated[
        str | None,
        typer.Option("--state", metavar="FILE", help="Busy devices (JSON). Default: all are free."),
    ] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", metavar="TIME", help="Time from now, e.g. 6h. Default: none.")
    ] = None,
    steps: Annotated[float, typer.Option("--steps", metavar="N", help="Steps of the job.")] = 1.0,
    policy: Annotated[
        str, typer.Option("--policy", "-p", metavar="NAME", help="A name from: loadmaster advise policies.")
    ] = "smallest",
    batch: o.Batch = None,
    seq: o.Seq = None,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            metavar="NAME",
            help="throughput (pipelined micro-batches) or step (one step alone).",
        ),
    ] = "throughput",
    history: Annotated[
        str | None,
        typer.Option("--log", metavar="FILE", help="Log of earlier advice and outcomes, for the error bar."),
    ] = None,
    json: o.Json = False,
) -> None:
    """Advise on one job: admit or not, which devices, when it will be done, and what would help.

    Exit code 1: the job should not be admitted.
    """
    import math

    from loadmaster.advisor import files
    from loadmaster.advisor.ask import advise, layout_of
    from loadmaster.advisor.jobs.curve import measured_curve
    from loadmaster.advisor.jobs.job import Job
    from loadmaster.advisor.jobs.state import idle
    from loadmaster.advisor.policies.registry import policy as named
    from loadmaster.cli.console import print_json, progress, stdout
    from loadmaster.core.units import parse_seconds
    from loadmaster.report.plain_text import escape_control_characters

    by = named(policy)
    limit = None if deadline is None else parse_seconds(deadline)
    layout = layout_of(devices)
    where = idle(layout) if state is None else files.read_state(state, layout)
    asked: Any = source
    told: dict[str, Any] = {"steps": steps, "batch": batch, "seq": seq, "objective": objective}
    if source.endswith(".toml"):
        given = files.read_job(source)
        limit = given.deadline_s if limit is None else limit
        told = {"steps": given.steps, "batch": given.batch, "seq": given.seq, "objective": given.objective}
        asked = given.source
        if given.times:
            asked = Job(given.name, measured_curve(given.times), math.inf, given.value, given.requested)
    if state is not None:
        told["coming"], told["mean_gap_s"] = files.read_coming(state)
    if history is not None:
        from loadmaster.advisor.adapters.log import read_log, residuals_of

        told["residuals"] = residuals_of(read_log(history)[0])
    with progress("advising") as say:
        advice = advise(asked, where, deadline_s=limit, by=by, progress=say, **told)
    if json:
        print_json(advice.to_json())
    else:
        console = stdout()
        for line in str(advice).splitlines():
            console.print(escape_control_characters(line), soft_wrap=True)
        for line in advice.warnings:
            console.print(escape_control_characters(f"note: {line}"), style="yellow", soft_wrap=True)
        console.print(f"times: {advice.curve_origin}", style="dim")
    if not advice.admit:
        raise typer.Exit(1)


@app.command(name="policies", short_help="List the policies.")
def policies(json: o.Json = False) -> None:
    """List the policies."""
    from loadmaster.advisor.policies.registry import list_policies
    from loadmaster.cli.console import print_json, stdout
    from loadmaster.report.text_columns import columns, one_line

    found = list_policies()
    if json:
        print_json({"policies": [{"name": n, "summary": s} for n, s in found.items()]})
        return
    table = columns("policy", "what it does", whole=("policy",))
    for name, summary in found.items():
        table.add_row(one_line(name), one_line(summary, 200))
    stdout().print(table)


@app.command(name="replay", short_help="Replay a trace under several policies.")
def replay(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="Arrivals in Gavel's format.")],
    throughputs: Throughputs,
    devices: Annotated[
        str,
        typer.Option(
            "--devices", "--cluster", "-d", metavar="N", help="Devices, e.g. 48, or by kind: 32xv100,16xk80."
        ),
    ],
    policy: Policies = None,
    against: Annotated[
        str, typer.Option("--against", metavar="NAME", help="Show differences to this policy.")
    ] = "elasticflow",
    seeds: Seeds = 10,
    first_seed: FirstSeed = 0,
    deadlines: DeadlineRange = "default",
    kind: Kind = "v100",
    per_host: PerHost = 8,
    elastic: Elastic = False,
    resize: Resize = "0s",
    skip_malformed: Skip = False,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Also write a page.")] = None,
    json: o.Json = False,
) -> None:
    """Replay recorded jobs: deadlines met, promises broken and waiting of every policy, and a bound."""
    from loadmaster.advisor.replay_traces import parse_sizes

    _replay(
        trace,
        throughputs,
        [parse_sizes(devices, kind)],
        [1.0],
        policy,
        against,
        seeds,
        first_seed,
        deadlines,
        per_host,
        elastic,
        resize,
        skip_malformed,
        html,
        json,
    )


@app.command(name="whatif", short_help="The same trace on other sizes and deadlines.")
def whatif(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="Arrivals in Gavel's format.")],
    throughputs: Throughputs,
    devices: Annotated[
        str, typer.Option("--devices", "-d", metavar="N,N", help="Sizes to try, e.g. 32,48,64.")
    ],
    deadline_scale: Annotated[
        str, typer.Option("--deadline-scale", metavar="X,X", help="Factors on all deadlines, e.g. 0.8,1,1.5.")
    ] = "1",
    policy: Policies = "least-work,elasticflow",
    seeds: Seeds = 5,
    first_seed: FirstSeed = 0,
    deadlines: DeadlineRange = "default",
    kind: Kind = "v100",
    per_host: PerHost = 8,
    elastic: Elastic = False,
    resize: Resize = "0s",
    skip_malformed: Skip = False,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Also write a page.")] = None,
    json: o.Json = False,
) -> None:
    """Plan capacity: how many deadlines are met with more devices or longer deadlines."""
    sizes = [{kind: int(n)} for n in _numbers("--devices", devices)]
    scales = _numbers("--deadline-scale", deadline_scale)
    _replay(
        trace,
        throughputs,
        sizes,
        scales,
        policy,
        "elasticflow",
        seeds,
        first_seed,
        deadlines,
        per_host,
        elastic,
        resize,
        skip_malformed,
        html,
        json,
    )


@app.command(name="bench", short_help="The published cluster, its anchors and policies.")
def bench(
    world: Annotated[
        str,
        typer.Argument(metavar="WORLD", help="compat, fixed, own (compat without the leak) or real."),
    ],
    graphs: Annotated[
        str | None, typer.Option("--graphs", metavar="FOLDER", help="PipeDream's five profiles.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "-p",
            metavar="NAMES",
            help="Policies to compare; also rollout. Default: all but rollout.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="FILE", help="Also compare a learned policy (.safetensors)."),
    ] = None,
    traces: Annotated[
        str | None, typer.Option("--traces", metavar="FOLDER", help="real: Gavel's traces and throughputs.")
    ] = None,
    seeds: Seeds = 20,
    first_seed: FirstSeed = 0,
    poisson: Annotated[
        bool, typer.Option("--poisson", help="Poisson arrivals instead of fixed ones.")
    ] = False,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Also write a page.")] = None,
    json: o.Json = False,
) -> None:
    """Compare policies on the published cluster or on traces, beside a proven bound."""
    from loadmaster.advisor import bench
    from loadmaster.cli.console import progress
    from loadmaster.core.errors import InputError, UnknownNameError

    _require_seeds(seeds, first_seed)
    if world not in (*bench.WORLDS, "real"):
        raise UnknownNameError("world", world, (*bench.WORLDS, "real"))
    names = None if policy is None else [name.strip() for name in policy.split(",")]
    chosen = range(first_seed, first_seed + seeds)
    with progress("replaying") as say:
        if world == "real":
            if traces is None:
                raise InputError("bench real needs --traces FOLDER: *.trace and simulation_throughputs.json")
            rows = bench.bench_real(traces, chosen, names, progress=say)
            _show(rows, f"deadlines met, {seeds} streams", "met", html, json, "elasticflow")
            return
        if graphs is None:
            raise InputError(f"bench {world} needs --graphs FOLDER: PipeDream's five profiles")
        rows = bench.bench_world(world, graphs, chosen, names, weights=weights, poisson=poisson, progress=say)
    _show(rows, f"blocking, {world}, {seeds} streams", "blocking", html, json, "the best constant")


@app.command(name="score", short_help="Advice in a log against what happened.")
def score(
    log: Annotated[str, typer.Argument(metavar="LOG", help="Advice and outcomes, one JSON object a line.")],
    skip_malformed: Skip = False,
    json: o.Json = False,
) -> None:
    """Compare logged advice with outcomes: agreement, error of the predicted end, coverage, deadlines met."""
    from loadmaster.advisor.adapters.log import read_log, score_log
    from loadmaster.cli.console import print_json, stdout
    from loadmaster.report.tables import fields

    entries, skipped = read_log(log, skip_malformed=skip_malformed)
    answer = score_log(entries)
    if json:
        print_json(answer.to_json() | {"skipped": list(skipped)})
        return
    stdout().print(fields(answer.rows()))
    for line in skipped:
        stdout().print(f"skipped {line}", style="yellow", soft_wrap=True)


@app.command(name="shadow", short_help="Advice for a scheduler's queue, logged and never acted on.")
def shadow(
    scheduler: Annotated[str, typer.Argument(metavar="SCHEDULER", help="slurm, kubernetes or ray.")],
    log: Annotated[str, typer.Option("--log", metavar="FILE", help="Where advice is appended.")],
    queue: Annotated[
        str | None, typer.Option("--queue", metavar="FILE", help="Recorded JSON of the scheduler.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Advise on every pending job of a recorded queue and log the advice. Nothing is submitted or changed."""
    from loadmaster.advisor.adapters.shadow import advise_queue
    from loadmaster.cli.console import print_json, stdout
    from loadmaster.report.plain_text import escape_control_characters

    found = advise_queue(scheduler, queue, log)
    if json:
        print_json({"advice": [entry.to_json() for entry in found]})
        return
    for entry in found:
        for line in str(entry).splitlines():
            stdout().print(escape_control_characters(line), soft_wrap=True)


@app.command(name="train", short_help="Train a learned policy.")
def train(
    out: Annotated[str, typer.Argument(metavar="FILE", help="Where the weights go (.safetensors).")],
    graphs: Annotated[str, typer.Option("--graphs", metavar="FOLDER", help="PipeDream's five profiles.")],
    world: Annotated[str, typer.Option("--world", metavar="NAME", help="compat, fixed or own.")] = "fixed",
    distribution: Annotated[str, typer.Option("--distribution", metavar="NAME", help="A, B, C or D.")] = "A",
    network: Annotated[str, typer.Option("--network", metavar="NAME", help="mlp, graph or pacml.")] = "mlp",
    iterations: Annotated[int, typer.Option("--iterations", metavar="N", help="Rounds of PPO.")] = 400,
    joint: Annotated[bool, typer.Option("--joint", help="Also choose the block; not in compat.")] = False,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", help="Collect on N Ray workers. 0: in this process.")
    ] = 0,
    seed: o.Seed = 0,
    json: o.Json = False,
) -> None:
    """Train a policy by masked PPO. The same seed gives the same weights."""
    from loadmaster.advisor.bench import WORLDS
    from loadmaster.advisor.learned.training import TrainSettings, train_policy
    from loadmaster.advisor.replay import worlds
    from loadmaster.cli.console import print_json, progress, stdout
    from loadmaster.core.errors import UnknownNameError
    from loadmaster.core.files import require_writable

    require_writable(out)
    if world not in WORLDS:
        raise UnknownNameError("world", world, WORLDS)
    settings = TrainSettings(
        distribution=distribution,
        network=network,
        iterations=iterations,
        seed=seed,
        joint=joint,
        workers=workers,
    )
    with progress("training") as say:
        result = train_policy(worlds(graphs)[world], settings, graphs=graphs, out=out, progress=say)
    del result["network"]
    if json:
        print_json(result)
        return
    stdout().print(f"{out}: blocking {result['blocking']:.4f} on selection seeds, {result['seconds']:.0f} s")


def _numbers(option: str, text: str) -> list[float]:
    from loadmaster.core.errors import InputError

    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if (
        not found
        or any(not value > 0 for value in found)
        or (option == "--devices" and any(v % 1 for v in found))
    ):
        raise InputError(f"{option} {text!r} is not a list of positive numbers; write for example 32,48,64")
    return found


def _require_seeds(seeds: int, first_seed: int) -> None:
    from loadmaster.core.errors import InputError

    if seeds < 1 or first_seed < 0:
        raise InputError(f"--seeds is {seeds} and --first-seed {first_seed}; give at least 1, and 0 or more")


def _replay(
    trace: str,
    throughputs: str,
    sizes: list[dict[str, int]],
    scales: list[float],
    policy: str | None,
    against: str,
    seeds: int,
    first_seed: int,
    deadlines: str,
    per_host: int,
    elastic: bool,
    resize: str,
    skip_malformed: bool,
    html: str | None,
    json: bool,
) -> None:
    from loadmaster.advisor.environments.trace import drop_unmeasured, read_throughputs, read_trace
    from loadmaster.advisor.environments.trace_engine import ONE_KIND_ORDERS
    from loadmaster.advisor.replay_traces import TRACE_RULES, bench_trace, trace_rules
    from loadmaster.cli.console import progress, stderr
    from loadmaster.core.units import parse_seconds

    _require_seeds(seeds, first_seed)
    resize_s = parse_seconds(resize)
    rules = trace_rules([n.strip() for n in policy.split(",")] if policy else list(TRACE_RULES))
    if len(sizes[0]) > 1 and trace_rules([against])[against].order in ONE_KIND_ORDERS:
        against = "smallest"  # what reserves devices serves one kind
    trace_rules([against])
    jobs, rates = read_trace(trace, skip_malformed=skip_malformed), read_throughputs(throughputs)
    if skip_malformed:
        jobs = drop_unmeasured(jobs, rates, next(iter(sizes[0])))
    for line in jobs.skipped:
        stderr().print(f"skipped {line}", style="yellow", soft_wrap=True)
    rows: list[Row] = []
    with progress("replaying") as say:
        for size in sizes:
            for scale in scales:
                found = bench_trace(
                    jobs,
                    rates,
                    size,
                    range(first_seed, first_seed + seeds),
                    rules,
                    deadline=deadlines,
                    elastic=elastic,
                    per_host=per_host,
                    against=against,
                    deadline_scale=scale,
                    resize_s=resize_s,
                    progress=say,
                )
                from dataclasses import replace

                rows += [replace(r, setting=f"{r.setting} x {scale:g}") if scale != 1 else r for r in found]
    _show(
        rows,
        f"deadlines met, {jobs.name}, {len(jobs.jobs)} jobs, {seeds} streams",
        "met",
        html,
        json,
        against,
    )


def _show(rows: "list[Row]", title: str, what: str, html: str | None, json: bool, against: str = "") -> None:
    from loadmaster.advisor.page import bound_text, detail_rows, main_rows, write_page
    from loadmaster.cli.console import print_json, stdout
    from loadmaster.report.text_columns import columns, one_line

    if html is not None:
        write_page(html, title, what, rows, against)
    if json:
        print_json({"title": title, "rows": [row.to_json() for row in rows]})
        return
    console = stdout()
    console.print(title, style="bold")
    for setting in dict.fromkeys(row.setting for row in rows):
        chosen = [row for row in rows if row.setting == setting]
        console.print(f"\n{setting}. {bound_text(chosen[0], what)}")
        if against:
            console.print(f"Differences are to {against}.")
        for heads, *found in (main_rows(chosen, what), detail_rows(chosen)):
            console.print()
            table = columns(*heads, right=heads[1:], whole=heads[:1])
            for row in found:
                table.add_row(*[one_line(cell) for cell in row])
            console.print(table)
