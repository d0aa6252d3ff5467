"""Blocks of groups moved together to one action, by annealing from the best uniform strategies.

One group that leaves its neighbours pays for a change of layout on both sides, so that one at a time
seldom helps where half of a model should go elsewhere. A move here takes a block: groups that follow one
another in the graph, those with most gradients, memory or time, or all that share an action now. Several
walks go on in turn; a state that lacks some memory stays in play at a price, because the quickest way to
a good fit often leads through one. Most states are replayed once, with balanced rows; those near the best
are evaluated in full. (Kirkpatrick et al., "Optimization by simulated annealing", Science 1983.)
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.strategies.scoring.evaluator import Evaluated, Evaluator
from loadmaster.strategies.scoring.group_facts import GroupFacts
from loadmaster.strategies.scoring.uniform_states import uniform_state
from loadmaster.strategies.search_run import SearchRun, best_first

_LACKS = 80.0  # what a byte that lacks costs, as a share of all memory, in logarithms of seconds
_PATIENCE = 3000  # moves in a row that lead to nothing new
_RESTART = 150  # moves after which the worst walk goes on from the best state


@dataclass(frozen=True, slots=True)
class Blocks:
    """`share` of the budget at most; `walks` from the best uniform states, and one from the quickest."""

    share: float = 1.0
    walks: int = 3
    temperature: float = 0.03  # at the start, in logarithms of seconds
    near: float = 1.03  # times the best: states that are evaluated in full

    def __call__(self, evaluator: Evaluator, run: SearchRun) -> list[Evaluated]:
        """The best states that were evaluated."""
        plain = [evaluator.glance(uniform_state(evaluator, 0), factors=True)]
        for action in range(1, len(evaluator.actions)):
            if run.used(evaluator) >= 0.5 * self.share or run.out_of_budget(evaluator):
                break
            plain.append(evaluator.glance(uniform_state(evaluator, action), factors=True))
        ranked = sorted(range(len(plain)), key=lambda a: _energy(plain[a]))
        for action in ranked[: self.walks]:
            evaluator.evaluate(plain[action].choice)
        Annealing(self, evaluator, run, plain, ranked).go_on()
        return best_first(evaluator)


def _energy(found: Evaluated) -> float:
    """What a walk goes down."""
    return float(np.log(max(found.time_s, 1e-12)) + min(_LACKS * found.overflow, 12.0))


class Annealing:
    """Walks that take turns; `actions` are the best as uniform states first."""

    def __init__(
        self, options: Blocks, evaluator: Evaluator, run: SearchRun, plain: list[Evaluated], ranked: list[int]
    ) -> None:
        self.options, self.evaluator, self.run = options, evaluator, run
        self.actions = ranked
        self.best = best_first(evaluator, 1)[0]
        self.factors = any(plain[a].factors for a in ranked[:5])
        self.walks = [plain[a] for a in ranked[: options.walks]]
        quickest = min(plain, key=lambda e: e.time_s)
        if all(quickest.choice != walk.choice for walk in self.walks):
            self.walks.append(quickest)
        self.along, self.heavy = find_orders(evaluator.facts)
        self.tried = {e.choice for e in plain}

    def go_on(self) -> None:
        """Moves until the budget is used up, or nothing new is found."""
        turn = idle = 0
        while idle < _PATIENCE:
            used = self.run.used(self.evaluator)
            if used >= self.options.share or self.run.out_of_budget(self.evaluator):
                return
            at = turn % len(self.walks)
            state = self._move(self.walks[at].choice)
            if state in self.tried:
                idle += 1
                continue
            idle, turn = 0, turn + 1
            self.tried.add(state)
            self._step(at, self._score(state), self.options.temperature * (1.0 - used / self.options.share))
            if turn % _RESTART == 0:
                worst = max(range(len(self.walks)), key=lambda w: _energy(self.walks[w]))
                self.walks[worst] = self.best

    def _score(self, state: tuple[int, ...]) -> Evaluated:
        found = self.evaluator.glance(state, factors=self.factors)
        if found.rank < self.best.rank or (
            found.overflow == 0 and found.time_s < self.best.time_s * self.options.near
        ):
            found = self.evaluator.evaluate(state)
        if found.rank < self.best.rank:
            self.best = found
        return found

    def _step(self, at: int, found: Evaluated, temperature: float) -> None:
        worse = _energy(found) - _energy(self.walks[at])
        if worse < 0 or self.run.rng.random() < np.exp(-worse / max(temperature, 1e-6)):
            self.walks[at] = found

    def _move(self, choice: tuple[int, ...]) -> tuple[int, ...]:
        """A block of groups takes an action, those of them that may."""
        action = self._draw_action(choice)
        block = set(self._draw_block(choice))
        allowed = self.evaluator.allowed[:, action]
        return tuple(action if g in block and allowed[g] else a for g, a in enumerate(choice))

    def _draw_action(self, choice: tuple[int, ...]) -> int:
        """One in use here or in the best state; or any, good uniform ones more often."""
        rng = self.run.rng
        if rng.random() < 0.4:
            used = sorted({*choice, *self.best.choice})
            return used[int(rng.integers(len(used)))]
        return self.actions[int(len(self.actions) * rng.random() ** 2)]

    def _draw_block(self, choice: tuple[int, ...]) -> list[int]:
        rng, groups = self.run.rng, len(choice)
        most = min(groups, 2 ** int(rng.integers(0, groups.bit_length())))
        size = int(rng.integers(max(1, most // 2), most + 1))
        way = rng.random()
        if way < 0.5:  # neighbours
            at = int(rng.integers(groups - size + 1))
            return [int(g) for g in self.along[at : at + size]]
        heaviest = [int(g) for g in self.heavy[int(rng.integers(len(self.heavy)))][:size]]
        if way < 0.75:
            return heaviest
        shared = choice[int(rng.integers(groups))]
        alike = [g for g, a in enumerate(choice) if a == shared]
        lighter = [g for g in alike if g not in heaviest]
        return lighter if lighter and rng.random() < 0.5 else alike


def find_orders(facts: GroupFacts) -> tuple[Ints, list[Ints]]:
    """Groups along the graph; and with most gradients, memory, time, gradients for their time first."""
    where = np.full(facts.num_groups, len(facts.segment_group))
    np.minimum.at(where, facts.segment_group, np.arange(len(facts.segment_group)))
    seconds = np.bincount(facts.segment_group, facts.seconds[:, :, -1].min(axis=1), facts.num_groups)
    sizes = (
        facts.group_gradient_bytes,
        facts.resident_bytes + facts.saved_part + facts.saved_full + facts.transient,
        seconds,
        facts.group_gradient_bytes / np.maximum(seconds, 1e-12),
    )
    heavy = [np.argsort(-size, kind="stable").astype(np.int32) for size in sizes]
    return np.argsort(where, kind="stable").astype(np.int32), heavy


SEARCH = Blocks
