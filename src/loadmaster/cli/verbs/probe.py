"""loadmaster probe: measure this machine's devices and links, and write them down as a cluster."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadmaster.cli import options as o

if TYPE_CHECKING:
    from loadmaster.cluster.benchmark import Machine

SUMMARY = "Measure this machine and write it down as a cluster."


def command(
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the cluster here (.toml); else to stdout."),
    ] = None,
    largest: Annotated[
        str, typer.Option("--largest", metavar="SIZE", help="The largest transfer to time.")
    ] = "256MiB",
    json: o.Json = False,
) -> None:
    """Measure this machine's devices and links, and write them as a cluster for --devices."""
    from loadmaster.cli.console import print_json, progress, stdout
    from loadmaster.cli.question import check_outputs, parse_size
    from loadmaster.core.errors import FileError, InputError
    from loadmaster.core.files import write_bytes
    from loadmaster.report.plain_text import escape_control_characters

    limit = parse_size("--largest", largest)
    if out is not None and not out.lower().endswith(".toml"):
        raise FileError(f"--out {out!r} must end in .toml to be read back as a cluster; rename it")
    check_outputs({"--out": out}, inputs=[])
    try:
        from loadmaster.cluster.benchmark import benchmark_machine
    except ImportError:
        raise InputError("probe needs PyTorch; install it with: pip install 'loadmaster[torch]'") from None
    from loadmaster.cluster.toml import machine_toml

    with progress("probing") as say:
        machine = benchmark_machine(largest_bytes=limit, say=say)
    text = machine_toml(machine)
    if out is not None:
        write_bytes(text.encode(), out)
    if json:
        print_json({**_machine_document(machine), "toml": text, "written": out})
    elif out is None:
        print(text, end="")
    else:
        stdout().print(_machine_table(machine))
        stdout().print(escape_control_characters(f"cluster written to {out}"), soft_wrap=True)


def _machine_document(machine: "Machine") -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "devices": [asdict(device) for device in machine.devices],
        "reserve_bytes": list(machine.reserve_bytes),
        "kinds": [asdict(kind) for kind in machine.kinds],
        "links": [asdict(link) for link in machine.links],
    }


def _machine_table(machine: "Machine") -> Any:
    from loadmaster.core.units import format_bytes, format_flops, format_percent, format_seconds
    from loadmaster.report.tables import fields

    rows: dict[str, object] = {d.name: f"{d.chip}, {format_bytes(d.memory_bytes)}" for d in machine.devices}
    for kind in machine.kinds:
        rates = ", ".join(f"{dtype} {format_flops(rate)}/s" for dtype, rate in kind.flops_per_s.items())
        rows[kind.name] = f"{rates}, memory {format_bytes(kind.bytes_per_s)}/s"
    for link in machine.links:
        fit = link.fit
        rows[f"{link.a} - {link.b}, {link.way}"] = (
            f"{format_bytes(fit.bytes_per_s)}/s after {format_seconds(fit.latency_s)}"
            f" (fit off by {format_percent(fit.rel_error)}), both ways {link.duplex:.2f}x"
        )
    return fields(rows)
