"""What the published placers of Baechi do on the graphs of the published generators, as data.

Baechi (Jeon et al., SoCC 2020, doi 10.1145/3419111.3421302; extended as arXiv 2301.08695) as its authors'
two repositories have it: *TF* is beomyeol/baechi at afe7278 (2022-06, TensorFlow 1.12), *PT* is
chiragcshetty/BaechiPyTorch at d8408ee (2023-01). Their placers were run on the graphs of
`loadmaster.graph.generate`, seed 0: 4 identical devices, 2.0x memory, no grouping, LP solver replaced by
HiGHS (dual simplex), one core, nothing logged. Their plans were scored by one evaluator: first come first
served, free links or one port per device. Seconds compare in order of magnitude and growth only.
"""

from dataclasses import dataclass

SETTING = (
    "*TF* is `beomyeol/baechi` at `afe7278` (TensorFlow 1.12), *PT* is `chiragcshetty/BaechiPyTorch` at"
    " `d8408ee`; LP solver replaced by HiGHS, 4 devices, 2.0x memory, no grouping, one core, nothing logged"
)
CLAIMS = (
    "plans 654x to 206,000x faster than learning-based placers, step times at most 6.2 % above an expert's"
    " (TensorFlow) or comparable to them (PyTorch) (authors' abstract)"
)
INCEPTION = (
    "Inception-V3, batch 64, SGD, 133 modules, 4 GPUs of 8 GB class: one GPU 457.4 / 460.1 ms a step, m-ETF"
    " 466.0 / 465.4, m-SCT 462.5 / 466.5 (later runs 536, 580), m-TOPO 533.3 / 537.0, placed in 0.107 to"
    " 0.137 s, 0.142 to 0.295 s and 0.0135 s (recorded in the authors' repository)"
)
PLACERS = ("TF m-ETF", "TF m-SCT", "PT m-ETF", "PT m-SCT")
KINDS = {"m_etf": ("TF m-ETF", "PT m-ETF"), "m_sct": ("TF m-SCT", "PT m-SCT")}


@dataclass(frozen=True, slots=True)
class Seconds:
    """One placement time."""

    value: float
    programme: float | None = None  # of it, the linear programme
    loaded: bool = False  # CPU time on a busy machine, 1.05 to 1.8 times an idle one's

    def __str__(self) -> str:
        """As tables print it."""
        part = "" if self.programme is None else f" ({self.programme:g})"
        return f"{self.value:g}{'*' if self.loaded else ''}{part} s"


FAILS = "fails"
Time = Seconds | str | None  # None: not measured


def _s(value: float, programme: float | None = None, *, loaded: bool = False) -> Seconds:
    return Seconds(value, programme, loaded)


# By generator and ops asked for: m-TOPO, m-ETF, m-SCT of TF, then of PT.
_TIMES: dict[tuple[str, int], tuple[Time, ...]] = {
    ("fork_join", 100): (_s(0.002), _s(0.014), _s(0.020, 0.005), _s(0.003), _s(0.026), _s(0.032, 0.005)),
    ("fork_join", 1_000): (_s(0.019), _s(0.119), _s(0.155, 0.026), _s(0.027), _s(0.210), _s(0.244, 0.025)),
    ("fork_join", 5_000): (_s(0.185), _s(0.664), _s(0.933, 0.157), _s(0.179), _s(1.14), _s(1.34, 0.154)),
    ("fork_join", 10_000): (_s(0.309), _s(1.44), _s(2.04, 0.424), _s(0.339), _s(2.22), _s(2.92, 0.388)),
    ("rnn_grid", 1_000): (
        _s(0.024, loaded=True),
        _s(0.185),
        _s(0.288, 0.073),
        FAILS,
        _s(0.464),
        _s(0.360, 0.074),
    ),
    ("rnn_grid", 10_000): (_s(0.493, loaded=True), _s(2.26), _s(6.56, 3.21), FAILS, _s(5.08), _s(6.08, 3.08)),
    ("layered", 1_000): (
        _s(0.029, loaded=True),
        _s(0.540),
        _s(0.665, 0.156),
        FAILS,
        _s(2.11),
        _s(2.23, 0.157),
    ),
    ("layered", 10_000): (
        _s(0.510, loaded=True),
        _s(10.5, loaded=True),
        _s(122, 112, loaded=True),
        FAILS,
        _s(81.8, loaded=True),
        _s(159, 102, loaded=True),
    ),
    ("many_source", 1_000): (None, _s(1.23), _s(1.72, 0.03, loaded=True), None, _s(4.71), FAILS),
    ("many_source", 5_000): (
        None,
        _s(30.5, loaded=True),
        _s(41.4, 0.18, loaded=True),
        None,
        _s(103, loaded=True),
        _s(171, 0.16, loaded=True),
    ),
    ("many_source", 10_000): (None, _s(122, loaded=True), None, None, None, None),
}
_ALGORITHMS = ("m_topo", "m_etf", "m_sct")

# Step times in ms, (free, port), in the order of PLACERS; None: it fails.
_QUALITY: dict[tuple[str, int], tuple[tuple[float, float] | None, ...]] = {
    ("fork_join", 1_000): ((349, 384), (324, 364), (335, 401), (314, 375)),
    ("fork_join", 10_000): ((3380, 3752), (3103, 3647), (3228, 3848), (3031, 3732)),
    ("rnn_grid", 1_000): ((104, 110), (110, 109), (90.6, 169), (78.6, 82.9)),
    ("rnn_grid", 10_000): ((1104, 1108), (1132, 1198), (980, 1727), (759, 798)),
    ("layered", 1_000): ((218, 375), (208, 391), (142, 823), (142, 720)),
    ("layered", 10_000): ((1652, 3629), (1584, 3743), (1337, 8667), (1338, 7389)),
    ("many_source", 1_000): ((288, 386), (264, 425), (272, 394), None),
    ("many_source", 5_000): ((1441, 1985), (1323, 2048), (1350, 1994), (1266, 2100)),
}
LINKS = ("free", "port")


def placement_time(generator: str, num_ops: int, algorithm: str, code: str) -> Time:
    """Published seconds of m_topo, m_etf or m_sct by `code` (TF or PT), 'fails', or None: not known."""
    row = _TIMES.get((generator, num_ops))
    if row is None or algorithm not in _ALGORITHMS:
        return None
    return row[_ALGORITHMS.index(algorithm) + (len(_ALGORITHMS) if code == "PT" else 0)]


def step_ms(generator: str, num_ops: int, links: str) -> dict[str, float]:
    """Published step times in ms by placer, those that fail left out; empty where none are known."""
    row = _QUALITY.get((generator, num_ops))
    if row is None or links not in LINKS:
        return {}
    at = LINKS.index(links)
    return {name: pair[at] for name, pair in zip(PLACERS, row, strict=True) if pair is not None}
