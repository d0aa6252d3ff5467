"""Local: this machine's own devices in a shorthand: `cuda:0`, `cuda:0#1-8GB`, and all of them as 'auto'.

The planner also takes kinds that are elsewhere; a study trains here, so it takes these words and no others.
"""

import dataclasses
import re
from collections.abc import Sequence

from loadmaster.cluster.device_words import DeviceWord, parse_device_word
from loadmaster.cluster.presets import KINDS, KindPreset, find_kind
from loadmaster.cluster.probe import LocalDevice, is_chip, local_devices
from loadmaster.core.errors import ClusterError, InputError
from loadmaster.core.units import parse_bytes

_CUDA = re.compile(r"\s*(cuda:[0-9]+)\s*(?:[#-].*)?", re.IGNORECASE | re.DOTALL)
_HERE = re.compile(r"cpu|cuda(?::[0-9]+)?", re.IGNORECASE)
_ALONE = re.compile(r"\s*cuda:[0-9]+\s*", re.IGNORECASE)
_USABLE = 0.95  # of a GPU's memory: the driver's context and gaps between blocks take the rest


def chip_of(text: str) -> str:
    """'cuda:0' of 'cuda:0', 'cuda:0-8GB' and 'cuda:0#1', '' of anything else."""
    found = _CUDA.fullmatch(text)
    return found[1].lower() if found else ""


def local_kind(name: str) -> KindPreset | None:
    """The kind of 'cuda:0' on this machine, with the memory it has; None for a name of another form."""
    if not _ALONE.fullmatch(name):
        return None
    here = local_devices()
    device = next((one for one in here if one.torch_name == name.strip().lower()), None)
    if device is None:
        has = ", ".join(one.torch_name for one in here)
        raise ClusterError(f"this machine has no {name.strip()}; it has {has}")
    return _preset_of(device)


def auto_shorthand() -> str:
    """Every device of this machine with the memory it has, the GPUs first."""
    here = sorted(local_devices(), key=lambda one: one.on_host)
    words = []
    for device in here:
        share = 1.0 if device.on_host else _USABLE
        size = f"-{int(share * device.memory_bytes)}B" if device.memory_bytes else ""
        words.append(f"{device.torch_name}{size}")
    return ", ".join(words)


def is_here(devices: object) -> bool:
    """Whether a shorthand names nothing but devices of this machine, with no more memory than it has."""
    if not isinstance(devices, str):
        return False
    try:
        words = parse_local_devices(devices)
        wanted = {word.kind: parse_bytes(word.size) for word in words if word.size}
    except InputError:  # kinds of device, a file, links, or a word that is refused elsewhere
        return False
    has = {one.torch_name: one.memory_bytes for one in local_devices()}
    return all(word.kind in has for word in words) and all(
        size <= has[kind] or not has[kind] for kind, size in wanted.items()
    )


def parse_local_devices(devices: str | Sequence[str]) -> list[DeviceWord[str]]:
    """Devices of this machine in a list or separated by commas; each word's kind is its name in torch."""
    texts = devices.split(",") if isinstance(devices, str) else list(devices)
    words = [_parse_local_device(text) for text in texts]
    names = [format_local_device(dataclasses.replace(word, size="")) for word in words]
    if not names or len(set(names)) != len(names):
        raise ClusterError(f"devices {names} must be given, each once")
    return words


def format_local_device(word: DeviceWord[str]) -> str:
    """The word as a shorthand again: 'cuda:0#1-8GB'."""
    number = f"#{word.number}" if word.number else ""
    return f"{word.kind}{number}{f'-{word.size}' if word.size else ''}"


def _parse_local_device(text: str) -> DeviceWord[str]:
    hint = "write 'auto', 'cuda:0', 'cpu', or 'cpu#0, cpu#1'"
    if not isinstance(text, str):
        raise ClusterError(f"unknown device {text!r}; {hint}")
    text = text.strip()
    word = parse_device_word(text, _find_local_name)
    if word is not None:
        return word
    if parse_device_word(text, find_kind) is not None:
        raise ClusterError(f"{text!r} is a kind of device to plan for, not a device of this machine; {hint}")
    raise ClusterError(f"unknown device {text!r}; {hint}")


def _find_local_name(name: str) -> str | None:
    """'cuda:0' of ' CUDA:0 '; 'cuda' is whichever comes first."""
    name = name.strip().lower()
    return name if _HERE.fullmatch(name) else None


def _preset_of(device: LocalDevice) -> KindPreset:
    kind = next((kind for kind in KINDS.values() if is_chip(kind.name, device.chip)), None)
    if kind is None:
        raise ClusterError(
            f"{device.torch_name} is a {device.chip}, whose rates are not known; run 'loadmaster probe"
            " --out cluster.toml' and give that file as devices"
        )
    return dataclasses.replace(kind, memory_bytes=device.memory_bytes or kind.memory_bytes)
