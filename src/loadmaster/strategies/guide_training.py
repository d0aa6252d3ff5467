"""Training of the guide: searches on random clusters, and what their trees found is what is learned. [torch]

For each episode a problem and a random cluster are drawn, the tree grows with the network so far, and its
nodes become examples: the prior learns the visits of the children, the value the best log speed-up found
below. An episode draws from a generator of its own, so that those of one round may be played anywhere: the
same settings give the same weights on the same build of torch, however many workers there are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import nn

from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.arrays import Floats
from loadmaster.core.graph import Graph
from loadmaster.core.question import Question
from loadmaster.core.run import Budget, ignore_progress
from loadmaster.questions.problem import build_problem
from loadmaster.strategies.ask import make_evaluator
from loadmaster.strategies.learned.features import Record, make_states
from loadmaster.strategies.learned.guide import NetworkGuide, make_inputs
from loadmaster.strategies.learned.network import Network, Spec
from loadmaster.strategies.scoring.evaluator import Evaluated
from loadmaster.strategies.search.guided import Guided, Node, Tree
from loadmaster.strategies.search.uniform import Uniform
from loadmaster.strategies.search_run import SearchRun

Workers = Callable[[Callable[[int], list["Example"]], Sequence[int]], Iterable[list["Example"]]]
KINDS = ("V100-16GB", "GTX1080Ti", "P100", "T4")
NETWORKS = ("10gbit", "25gbit", "100gbit")


@dataclass(frozen=True, slots=True)
class Settings:
    """How long, and how."""

    episodes: int = 120
    replays: int = 400  # of each episode's tree, its seeds included
    least_visits: int = 12  # of a node that is learned from
    rate: float = 2e-3
    passes: int = 2  # over the examples of an episode and of those kept
    kept: int = 1500  # examples
    together: int = 1  # episodes of a round, played with the same network; more keep more workers busy
    batch: int = 16
    seed: int = 0
    spec: Spec = field(default_factory=Spec)


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A node of a tree."""

    record: Record
    best: Evaluated
    state: tuple[int, ...]
    visits: Floats  # [A] shares
    value: float


def random_cluster(rng: np.random.Generator, most: int = 16) -> str:
    """Two to five hosts of one kind each, 2 to `most` devices, one network."""
    hosts, total = [], 0
    for _ in range(int(rng.integers(2, 6))):
        count = int(rng.choice((1, 2, 4)))
        if total + count > most:
            break
        total += count
        hosts.append(f"{count}x{rng.choice(KINDS)}")
    if total < 2:
        hosts.append(f"1x{rng.choice(KINDS)}")
    return f"{' | '.join(hosts)} ; inter={rng.choice(NETWORKS)}"


def train(
    graphs: Sequence[tuple[Graph, int]],
    settings: Settings,
    progress: Callable[[str, float], None] = ignore_progress,
    workers: Workers | None = None,
) -> tuple[Network, list[float]]:
    """A network and the loss of every round; graphs come with their batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network = Network(settings.spec)  # the only draw of torch's own generator
    rng = np.random.default_rng(settings.seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.rate, weight_decay=1e-5)
    kept: list[Example] = []
    losses = []
    for first in range(0, settings.episodes, settings.together):
        numbers = range(first, min(first + settings.together, settings.episodes))
        network.eval()
        for found in (workers or map)(partial(play_episode, graphs, network, settings), numbers):
            kept += found
        kept = kept[-settings.kept :]
        losses.append(_learn(network, optimizer, kept, settings, rng))
        done = numbers[-1] + 1
        progress(f"episode {done}, loss {losses[-1]:.3f}", done / settings.episodes)
    return network.eval(), losses


def play_episode(
    graphs: Sequence[tuple[Graph, int]], network: Network, settings: Settings, number: int
) -> list[Example]:
    """The examples of an episode: a graph and a cluster are drawn by its number."""
    rng = np.random.default_rng((settings.seed, number))
    graph, batch = graphs[int(rng.integers(len(graphs)))]
    return play(graph, batch, random_cluster(rng), network, settings, rng)


def play(
    graph: Graph, batch: int, cluster: str, network: Network, settings: Settings, rng: np.random.Generator
) -> list[Example]:
    """One search and the nodes it visited most."""
    problem = build_problem(Question(source=graph, devices=parse_cluster(cluster)))
    evaluator = make_evaluator(problem, batch)
    run = SearchRun(Budget(count=settings.replays), rng)
    Uniform()(evaluator, run)
    tree = Tree(Guided(descent_share=0.0), evaluator, run, NetworkGuide(network.eval()))
    tree.grow(most=settings.replays)
    base = float(np.log(tree.base_s))
    examples = []
    waiting: list[tuple[Node, tuple[int, ...]]] = [(tree.root, ())]
    while waiting:
        node, state = waiting.pop()
        if not node.children or node.visits < settings.least_visits:
            continue
        visits = np.zeros(len(evaluator.actions))
        for action, child in node.children.items():
            visits[action] = child.visits
            waiting.append((child, (*state, action)))
        if visits.sum() > 0 and np.isfinite(base):
            value = float(np.clip(node.best, -2.0, 2.0))
            examples.append(Example(tree.record, tree.best, state, visits / visits.sum(), value))
    return examples


def _learn(
    network: Network,
    optimizer: torch.optim.Optimizer,
    examples: list[Example],
    settings: Settings,
    rng: np.random.Generator,
) -> float:
    """Some steps on the newest examples and as many old ones; their mean loss."""
    network.train()
    total = []
    by_record: dict[int, list[Example]] = {}
    for example in examples:
        by_record.setdefault(id(example.record), []).append(example)
    groups = list(by_record.values())
    chosen = [groups[-1], *(groups[int(i)] for i in rng.integers(len(groups), size=2 * settings.passes))]
    for members in chosen:
        picks = [members[int(i)] for i in rng.permutation(len(members))[: settings.batch]]
        first = picks[0]
        state = make_states(first.record, [e.state for e in picks], first.best)
        logits, value = network(make_inputs(first.record, state))
        visits = torch.tensor(np.array([e.visits for e in picks]), dtype=torch.float32)
        wanted = torch.tensor([e.value for e in picks], dtype=torch.float32)
        loss = -(visits * logits.log_softmax(-1)).sum(-1).mean() + nn.functional.huber_loss(value, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.6)
        optimizer.step()
        total.append(float(loss.detach()))
    return float(np.mean(total))
