"""TAG's search, on this graph and simulator: equal rows, factors once at the end.

Zhang et al., "Expediting Distributed DNN Training with Device Topology-Aware Graph Deployment", TPDS 2023.
Actions are subsets of classes of like devices with sums, a server or placement; a tree search decides
groups in the order of their time; undecided groups copy the first; factors are decided once, at the end.
Left out or other: the prior is uniform unless `network` names weights, which are those of this package's
own network (`shipped` or a file), not of the published one; a group that is "model
parallel" over a subset goes whole to its least loaded device; METIS is replaced by this package's own
grouping. Rows are equal.
"""

from dataclasses import dataclass, field

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.core.strategy import Mode, Sync
from loadmaster.strategies.guide_choice import load_guide
from loadmaster.strategies.guides import Guide, UniformGuide
from loadmaster.strategies.scoring.actions import device_classes
from loadmaster.strategies.scoring.evaluator import Evaluated, Evaluator
from loadmaster.strategies.scoring.shares import EVEN
from loadmaster.strategies.scoring.uniform_states import every_device
from loadmaster.strategies.search_run import SearchRun

_PLACED = -1  # the action "place on the least loaded device of the subset"


@dataclass(slots=True)
class _Node:
    prior: float
    visits: int = 0
    value: float = 0.0
    children: "dict[int, _Node]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TagCompat:
    """`playouts` at most; the budget may end it sooner."""

    playouts: int = 2000
    compat: tuple[str, ...] = ()  # published defects to play, for ablations alone
    network: str = "none"  # weights whose prior is asked: 'none', 'shipped' or a file

    def __call__(self, evaluator: Evaluator, run: SearchRun) -> list[Evaluated]:
        """The best state ever replayed, then factors once."""
        if self.compat:
            evaluator = Evaluator(
                evaluator.problem,
                evaluator.splits,
                evaluator.costs,
                evaluator.facts,
                evaluator.actions,
                compat=frozenset(self.compat),
            )
        return TreeSearch(evaluator, run, self.playouts, load_guide(self.network)).run_all()


class TreeSearch:
    """One search; `known` has every state replayed, in order."""

    def __init__(
        self, evaluator: Evaluator, run: SearchRun, playouts: int, guide: Guide | None = None
    ) -> None:
        self.evaluator, self.run, self.playouts = evaluator, run, playouts
        self.guide = guide or UniformGuide()
        self.record = self.guide.prepare(evaluator)
        self.moves = self._moves()
        self.known: dict[tuple[int, ...], Evaluated] = {}
        every = every_device(evaluator, "replicate", "allreduce")
        wanted = (evaluator.actions[every].devices, every)
        self.default = self.moves.index(wanted) if wanted in self.moves else len(self.moves) - 1
        self.base = self._replay((self.default,) * evaluator.facts.num_groups)
        if self.base.overflow > 0:
            placed = max(self.moves, key=lambda move: (len(move[0]), move[1] == _PLACED))
            self.default = self.moves.index(placed)
            self.base = self._replay((self.default,) * evaluator.facts.num_groups)

    def _moves(self) -> list[tuple[tuple[int, ...], int]]:
        """Subsets of classes with an action of the evaluator, or placed."""
        classes = device_classes(self.evaluator.problem.cluster)
        found: list[tuple[tuple[int, ...], int]] = []
        count = 2 ** min(len(classes), 4)
        for mask in range(1, count):
            devices = tuple(sorted(d for i, one in enumerate(classes[:4]) if mask >> i & 1 for d in one))
            found += [
                (devices, i)
                for i, a in enumerate(self.evaluator.actions)
                if a.devices == devices and a.mode == Mode.REPLICATE and a.sync in (Sync.ALLREDUCE, Sync.PS)
            ]
            found.append((devices, _PLACED))
        return found

    def run_all(self) -> list[Evaluated]:
        """Playouts until the budget is used up; the best state, with factors if they help."""
        root = _Node(1.0)
        for _ in range(self.playouts):
            if self.run.out_of_budget(self.evaluator):
                break
            self._playout(root)
        best = min(self.known.values(), key=lambda e: (e.rank, e.choice))
        answers = [best]
        factors = self.evaluator.factors_of(best.choice, best.rows, 1.0)
        if factors:
            answers.append(self.evaluator.replay(best.choice, best.rows, factors))
        return sorted(answers, key=lambda e: e.rank)

    def _playout(self, root: _Node) -> None:
        node, path, state = root, [root], []
        scale = np.sqrt(len(self.moves) / 10)
        while node.children:
            wide = np.sqrt(max(node.visits, 1))
            move, node = max(
                node.children.items(),
                key=lambda item: item[1].value + scale * item[1].prior * wide / (1 + item[1].visits),
            )
            path.append(node)
            state.append(move)
        fill = state[0] if state else self.default
        full = tuple(state) + (fill,) * (self.evaluator.facts.num_groups - len(state))
        found = self._replay(full)
        if len(state) < self.evaluator.facts.num_groups:
            for move, prior in enumerate(self._priors(len(state), found).tolist()):
                node.children[move] = _Node(prior)
        value = self._value(found)
        for one in path:
            one.visits += 1
            one.value += (value - one.value) / one.visits

    def _priors(self, decided: int, found: Evaluated) -> Floats:
        """[moves] of the next group; a network's are shared out: what is placed has those of its devices."""
        [guess] = self.guide.guess(self.record, [found.choice[:decided]], found)
        if guess.prior is None:
            return np.full(len(self.moves), 1.0 / len(self.moves))
        single = {a.devices[0]: i for i, a in enumerate(self.evaluator.actions) if len(a.devices) == 1}
        prior = np.array(
            [
                sum(guess.prior[single[d]] for d in devices) if action == _PLACED else guess.prior[action]
                for devices, action in self.moves
            ]
        )
        found_priors: Floats = prior / max(float(prior.sum()), 1e-30)
        return found_priors

    def _value(self, found: Evaluated) -> float:
        if found.overflow > 0:
            return -1.0
        value = self.base.time_s / found.time_s - 1.0
        return float(value if value <= 1 else value**0.25)

    def _replay(self, moves: tuple[int, ...]) -> Evaluated:
        if moves not in self.known:
            state = self._state(moves)
            rows = self.evaluator.rows_of(state, EVEN)
            self.known[moves] = self.evaluator.replay(state, rows, frozenset())
        return self.known[moves]

    def _state(self, moves: tuple[int, ...]) -> tuple[int, ...]:
        """Moves as actions: what is placed goes to the device with least work so far."""
        evaluator = self.evaluator
        facts, load = evaluator.facts, np.zeros(evaluator.facts.num_devices)
        single = {a.devices[0]: i for i, a in enumerate(evaluator.actions) if len(a.devices) == 1}
        choice = []
        for g, move in enumerate(moves):
            devices, action = self.moves[move]
            if action != _PLACED and evaluator.allowed[g, action]:
                choice.append(action)
                continue
            seconds = facts.seconds[facts.segment_group == g][:, :, -1].sum(axis=0)[facts.kind]
            able = [d for d in devices if evaluator.allowed[g, single[d]]] or [
                d for d in single if evaluator.allowed[g, single[d]]
            ]
            best = min(able, key=lambda d: (load[d] + seconds[d], d))
            load[best] += seconds[best]
            choice.append(single[best])
        return tuple(choice)


SEARCH = TagCompat
