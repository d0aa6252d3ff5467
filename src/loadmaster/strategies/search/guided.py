"""Blocks of groups moved together, then a tree search (PUCT) that a graph network guides where there is one.

Most of the budget goes to `blocks`, which begins with the uniform strategies. The tree decides groups by
time, the longest first; a leaf is scored by its fill-in (undecided groups keep the best known action)
mixed with the value the network expects. Leaves are collected in batches under a virtual loss; states
that were reached in another order are not replayed. The answer is the best state that was replayed,
never an estimate. (Silver et al., "Mastering the game of Go without human knowledge", 2017; TAG, TPDS
2023.)
"""

from dataclasses import dataclass, field

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.strategies.guide_choice import load_guide
from loadmaster.strategies.guides import Guess, Guide, UniformGuide
from loadmaster.strategies.scoring.evaluator import Evaluated, Evaluator
from loadmaster.strategies.scoring.uniform_states import uniform_state
from loadmaster.strategies.search.blocks import Blocks
from loadmaster.strategies.search_run import SearchRun, best_first

_NO_NETWORK, _SHIPPED = "none", "shipped"


@dataclass(slots=True)
class Node:
    """A prefix of decided groups."""

    prior: float
    visits: int = 0
    total: float = 0.0
    best: float = -np.inf  # value found below
    children: "dict[int, Node]" = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Of the values backed up."""
        return self.total / self.visits if self.visits else 0.0


@dataclass(frozen=True, slots=True)
class Guided:
    """`network` is 'shipped', 'none' or a file of weights; `prior` and `value` switch its two heads."""

    network: str = _SHIPPED
    prior: bool = True
    value: bool = True
    descent_share: float = 0.8  # of the budget, at most: blocks of groups, before the tree
    exploration: float = 1.4
    width: int = 12  # children of a node: the likeliest actions
    leaves: int = 8  # in a batch
    trust: float = 0.25  # of the value head in a leaf's value

    def __call__(self, evaluator: Evaluator, run: SearchRun) -> list[Evaluated]:
        """The best states that were replayed."""
        if self.descent_share > 0:
            Blocks(share=self.descent_share)(evaluator, run)
        if not run.out_of_budget(evaluator):
            guide = UniformGuide() if self.network == _NO_NETWORK else load_guide(self.network)
            Tree(self, evaluator, run, guide).grow()
        return _with_uniform(evaluator)


def _with_uniform(evaluator: Evaluator) -> list[Evaluated]:
    """The best states, the best uniform one among the first: ops may rank it higher than groups do."""
    found = best_first(evaluator)
    states = {uniform_state(evaluator, action) for action in range(len(evaluator.actions))}
    seen = [evaluator.seen[state] for state in sorted(states & evaluator.seen.keys())]
    plain = min(seen, key=lambda e: (e.rank, e.choice), default=found[0])
    rest = [state for state in found if state is not plain]
    return found if plain is found[0] else [*rest[:4], plain, *rest[4:]]


class Tree:
    """The tree of one search."""

    def __init__(self, options: Guided, evaluator: Evaluator, run: SearchRun, guide: Guide) -> None:
        self.options, self.evaluator, self.run, self.guide = options, evaluator, run, guide
        self.root = Node(1.0)
        self.record = guide.prepare(evaluator)
        found = best_first(evaluator, 1)
        state = (int(evaluator.allowed.all(axis=0).argmax()),) * evaluator.facts.num_groups
        self.best = found[0] if found else evaluator.evaluate(state)
        self.base_s = self.best.time_s

    def grow(self, most: int | None = None) -> int:
        """Batches of leaves until the budget, or the tree, is used up; how many leaves there were."""
        done = idle = 0
        while not self.run.out_of_budget(self.evaluator) and idle < 50 and (most is None or done < most):
            before = self.evaluator.replays
            done += self._batch()
            idle = 0 if self.evaluator.replays > before else idle + 1
        return done

    def value_of(self, found: Evaluated) -> float:
        """log(t_base / t), or below -1 where memory does not suffice."""
        if found.overflow > 0:
            return -1.0 - min(found.overflow, 1.0)
        return float(np.clip(np.log(self.base_s / found.time_s), -2.0, 2.0))

    def _batch(self) -> int:
        paths: list[tuple[list[Node], list[int]]] = []
        for _ in range(self.options.leaves):
            path, state = self._descend()
            for node in path:  # virtual loss: the next descent goes elsewhere
                node.visits += 1
                node.total -= 1.0
            paths.append((path, state))
        guesses = self.guide.guess(self.record, [state for _, state in paths], self.best)
        for (path, state), guess in zip(paths, guesses, strict=True):
            found = self.evaluator.evaluate(self.fill(state))
            if found.rank < self.best.rank:
                self.best = found
            value = self.value_of(found)
            self._expand(path[-1], state, guess)
            trust = self.options.trust if self.options.value else 0.0
            mixed = value if guess.value is None else (1 - trust) * value + trust * guess.value
            for node in path:
                node.total += 1.0 + mixed
                node.best = max(node.best, value)
        return len(paths)

    def fill(self, state: list[int]) -> tuple[int, ...]:
        """A prefix with the best known action of the other groups."""
        return (*state, *self.best.choice[len(state) :])

    def _descend(self) -> tuple[list[Node], list[int]]:
        node, path, state = self.root, [self.root], []
        while node.children:
            wide = np.sqrt(max(node.visits, 1))
            move, node = max(
                node.children.items(),
                key=lambda item: (
                    item[1].mean + self.options.exploration * item[1].prior * wide / (1 + item[1].visits)
                ),
            )
            path.append(node)
            state.append(move)
        return path, state

    def _expand(self, node: Node, state: list[int], guess: Guess) -> None:
        g = len(state)
        if node.children or g >= self.evaluator.facts.num_groups:
            return
        allowed = np.flatnonzero(self.evaluator.allowed[g])
        prior: Floats = np.ones(len(self.evaluator.actions)) / len(self.evaluator.actions)
        if guess.prior is not None and self.options.prior:
            prior = guess.prior
        kept = self.best.choice[g]
        weight = prior[allowed] / max(float(prior[allowed].sum()), 1e-30)
        order = np.argsort(-weight, kind="stable")[: self.options.width]
        chosen = dict.fromkeys([int(allowed[i]) for i in order])
        chosen.setdefault(kept)
        for action in chosen:
            share = float(prior[action] / max(float(prior[list(chosen)].sum()), 1e-30))
            bonus = 0.25 if action == kept else 0.0  # the best known action is always worth a look
            node.children[action] = Node(0.75 * share + bonus)


SEARCH = Guided
