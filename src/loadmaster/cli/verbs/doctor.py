"""loadmaster doctor: what is installed, what it sees, and where compiled code is kept."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from loadmaster.cli import options as o

BASE = ("numpy", "scipy", "numba", "msgspec", "typer", "rich")
EXTRAS = {
    "torch": ("torch",),
    "hf": ("torch", "transformers", "safetensors"),
    "onnx": ("onnx",),
    "exact": ("ortools",),
    "train": ("torch", "safetensors", "optuna"),
    "ray": ("ray",),
}
SUMMARY = "Print versions, devices, extras and the cache."


def command(json: o.Json = False) -> None:
    """Print versions, devices, extras and the cache. Put this into a bug report."""
    from loadmaster.cli.console import print_json, progress, stdout

    with progress("looking around") as say:
        say("devices", 0.0)
        found = collect_findings()
    if json:
        print_json(found)
        return
    from loadmaster.report.tables import fields

    lines: dict[str, object] = {}
    for section, rows in found.items():
        lines[section] = ""
        for name, value in rows.items():
            lines[f"  {name}"] = {True: "yes", False: "no"}.get(value, value)
    stdout().print(fields(lines))


def collect_findings() -> dict[str, dict[str, Any]]:
    """Everything doctor prints."""
    import os
    import platform

    from loadmaster import __version__
    from loadmaster.cluster.probe import local_devices
    from loadmaster.core.units import format_bytes
    from loadmaster.simulator.jit import cache_folder, is_warm

    folder = cache_folder()
    return {
        "versions": {
            "loadmaster": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            **{name: _package_version(name) for name in BASE},
        },
        "devices": {
            device.name: f"{device.description}, {format_bytes(device.memory_bytes)}"
            for device in local_devices()
        },
        "extras": {name: _extra_status(packages) for name, packages in EXTRAS.items()},
        "cache": {
            "folder": str(folder),
            "writable": os.access(folder, os.W_OK),
            "compiled": "yes" if is_warm("placers") else "no: the first plan compiles for about two minutes",
        },
    }


def _package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _extra_status(packages: tuple[str, ...]) -> str:
    missing = [name for name in packages if _package_version(name) == "missing"]
    if missing:
        return f"missing {', '.join(missing)}"
    return ", ".join(f"{name} {_package_version(name)}" for name in packages)
