"""Guide choice: the guide that a tree search asks, by the name of its weights; torch is imported late."""

import importlib.util

from loadmaster.core.errors import InputError
from loadmaster.strategies.guides import Guide, UniformGuide


def load_guide(name: str) -> Guide:
    """The network of the weights that are shipped, or of a file; uniform for 'none' and without torch."""
    if name == "none":
        return UniformGuide()
    if not is_installed():
        if name != "shipped":
            raise InputError("a network needs PyTorch; install it with: pip install 'loadmaster[torch]'")
        return UniformGuide()
    from loadmaster.strategies.learned.guide import load_network_guide

    return load_network_guide(name)


def is_installed() -> bool:
    """Whether there is torch, and what reads weights."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "safetensors"))
