"""Guide: the network behind a tree search. [torch]"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from loadmaster.core.arrays import Floats
from loadmaster.modules.threads import one_thread
from loadmaster.strategies.guides import Guess, Guide, UniformGuide
from loadmaster.strategies.learned.features import Record, State, make_record, make_states
from loadmaster.strategies.learned.network import Inputs, Network, load_network
from loadmaster.strategies.scoring.evaluator import Evaluated, Evaluator

SHIPPED = Path(__file__).parent / "weights" / "guide.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class NetworkGuide:
    """Guesses of a network; no gradients."""

    network: Network

    def prepare(self, evaluator: Evaluator) -> Record:
        """The fixed features of a problem."""
        return make_record(evaluator)

    def guess(self, record: Record, states: Sequence[Sequence[int]], best: Evaluated) -> list[Guess]:
        """Priors and values, all states in one batch."""
        with torch.no_grad(), one_thread():
            logits, value = self.network(make_inputs(record, make_states(record, states, best)))
            prior = logits.softmax(-1).double().numpy()
        return [Guess(prior[b], float(value[b])) for b in range(len(states))]


def make_inputs(record: Record, state: State) -> Inputs:
    """Tensors of a batch of states."""
    count = len(state.group)

    def repeated(values: Floats) -> Tensor:
        return _tensor(values).unsqueeze(0).expand(count, *values.shape)

    group = torch.cat([repeated(record.group), _tensor(state.group)], -1)
    device = torch.cat([repeated(record.device), _tensor(state.device)], -1)
    place = torch.cat([repeated(record.seconds), _tensor(state.placed).unsqueeze(-1)], -1)
    return Inputs(
        group=group,
        device=device,
        before=repeated(record.before),
        link=repeated(record.link),
        place=place,
        turn=torch.from_numpy(state.turn.astype(np.int64)),
        mask=_tensor(record.mask).unsqueeze(0),
        mode=_tensor(record.mode).unsqueeze(0),
    )


def _tensor(values: Floats) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def load_network_guide(name: str) -> Guide:
    """The shipped network, or that of a file; uniform where none is shipped."""
    if name == "shipped":
        return NetworkGuide(load_network(SHIPPED)) if SHIPPED.is_file() else UniformGuide()
    return NetworkGuide(load_network(Path(name)))
