"""Settings of torch that hold for the whole process, changed for a while or put right after a failure."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def leave_transforms() -> None:
    """A failure inside of vmap or grad leaves torch inside of it."""
    functorch = torch._C._functorch
    if hasattr(functorch, "pop_dynamic_layer_stack_and_undo_to_depth"):
        # torch 2.11 takes all off and then finds that there is none
        with contextlib.suppress(RuntimeError):
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(0)


def force_eager(torch: Any) -> Any:
    """What was compiled runs as it was written."""
    stance = getattr(torch.compiler, "set_stance", None)
    return stance("force_eager") if stance is not None else contextlib.nullcontext()


@contextmanager
def silence_torch() -> Iterator[None]:
    """What torch warns and logs on the way to a fall-back is no concern of the user; what the model itself
    prints goes where it does not mix with answers."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
