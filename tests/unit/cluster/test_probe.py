"""The probe: links fitted, this machine measured, and the file it writes read back."""

from pathlib import Path

import numpy as np
import pytest

from loadmaster.cluster.link_fit import LinkFit, fit_link
from loadmaster.cluster.parse import parse_cluster
from loadmaster.cluster.probe import LocalDevice, local_devices
from loadmaster.core.errors import ClusterError
from loadmaster.core.graph import Dtype
from loadmaster.cost.transfer import route_bytes_per_s, route_latency_s
from tests.integration.command_line import Say, ask

SIZES = [2.0**power for power in range(10, 29, 2)]


def test_an_exact_line_is_found() -> None:
    fit = fit_link(SIZES, [7e-6 + size / 25e9 for size in SIZES])
    assert fit.latency_s == pytest.approx(7e-6, rel=1e-6)
    assert fit.bytes_per_s == pytest.approx(25e9, rel=1e-6)
    assert fit.rel_error < 1e-6
    assert fit.small_s == pytest.approx(7e-6 + 1024 / 25e9)
    assert fit.seconds(25e9) == pytest.approx(1.0, rel=1e-4)


def test_small_transfers_count_as_much_as_large_ones() -> None:
    rng = np.random.default_rng(0)
    times = [(7e-6 + size / 25e9) * (1 + rng.normal(0, 0.05)) for size in SIZES]
    fit = fit_link(SIZES, times)
    assert fit.latency_s == pytest.approx(7e-6, rel=0.15)  # plain least squares is off by far more
    assert fit.bytes_per_s == pytest.approx(25e9, rel=0.1)
    assert fit.rel_error < 0.08


def test_the_latency_is_never_negative() -> None:
    fit = fit_link([1e3, 1e6, 1e8], [1e-8, 1e-4, 1e-2])  # faster than proportional
    assert fit.latency_s == 0.0
    assert fit.bytes_per_s > 0


def test_one_disturbed_transfer_does_not_pull_the_line() -> None:
    times = [7e-6 + size / 25e9 for size in SIZES]
    times[4] *= 20
    fit = fit_link(SIZES, times)
    assert fit.latency_s == pytest.approx(7e-6, rel=0.05)
    assert fit.bytes_per_s == pytest.approx(25e9, rel=0.05)
    assert fit.worst_error > 0.9


def test_times_that_do_not_grow_are_all_latency() -> None:
    fit = fit_link([1e3, 1e4, 1e5], [3e-6, 2e-6, 1e-6])
    assert 1e-6 <= fit.latency_s <= 3e-6
    assert np.isfinite(fit.bytes_per_s)


@pytest.mark.parametrize(
    ("sizes", "times"),
    [([1.0], [1.0]), ([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 1.0]), ([1.0, 2.0], [1.0])],
)
def test_what_fits_no_line_is_refused(sizes: list[float], times: list[float]) -> None:
    with pytest.raises(ClusterError):
        fit_link(sizes, times)


def test_the_cpu_has_a_name_its_threads_and_memory() -> None:
    cpu = local_devices()[0]
    assert cpu.on_host
    assert "thread" in cpu.chip
    assert cpu.memory_bytes > 2**20


def test_a_machine_with_gpus_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the probe needs the extra [torch]")
    from loadmaster.cluster.benchmark import HOST, KindRates, LinkRates, Machine
    from loadmaster.cluster.toml import machine_toml

    def fit(latency_s: float, rate: float) -> LinkFit:
        return fit_link(SIZES, [latency_s + size / rate for size in SIZES])

    slow, fast = fit(8e-6, 5e10), fit(3e-6, 3e11)
    gpus = [
        LocalDevice(f"gpu{i}", "NVIDIA H200", 150_000_000_000, "NVIDIA H200", f"cuda:{i}") for i in (0, 1)
    ]
    cpu = LocalDevice("cpu0", "8 cores", 64 * 10**9, 'Odd "CPU"\n\u00b5, 8 threads', "cpu")
    kinds = (
        KindRates(cpu.chip, {"float32": 1e12, "float64": 5e11}, cpu.memory_bytes, 1e11, 1.5e-6, True),
        KindRates("NVIDIA H200", {"float32": 5e13, "bfloat16": 7e14}, 150 * 10**9, 4e12, 4e-6, False),
    )
    links = tuple(
        LinkRates(a, b, way, rates, rates, rates, 1.9)
        for a, b, way, rates in (
            ("gpu0", HOST, "pinned", slow),
            ("gpu0", HOST, "pageable", fit(2e-5, 8e9)),
            ("gpu1", HOST, "pinned", slow),
            ("gpu0", "gpu1", "peer", fast),
        )
    )
    target = tmp_path / "cluster.toml"
    target.write_text(machine_toml(Machine((cpu, *gpus), (0, 10**9, 10**9), kinds, links), 'lab "7"'))
    cluster = parse_cluster(target)
    assert cluster.name == 'lab "7"'
    assert cluster.device_name == ("cpu0", "gpu0", "gpu1")
    assert cluster.kind_name[1] == "NVIDIA H200"
    assert cluster.on_host.tolist() == [True, False]
    assert cluster.memory_bytes.tolist() == [64 * 10**9, 150 * 10**9, 150 * 10**9]
    assert cluster.reserve_bytes.tolist() == [0, 10**9, 10**9]
    assert cluster.flops_per_s[1, Dtype.BFLOAT16] == 7e14
    assert cluster.flops_per_s[0, Dtype.FLOAT64] == 5e11
    assert cluster.memory_bytes_per_s.tolist() == [1e11, 4e12]
    assert cluster.overhead_s.tolist() == pytest.approx([1.5e-6, 4e-6])
    rate, latency = route_bytes_per_s(cluster), route_latency_s(cluster)
    assert rate[1, 2] == pytest.approx(3e11)  # peers meet directly
    assert rate[0, 1] == rate[2, 0] == pytest.approx(5e10)  # pinned, not pageable
    assert latency[1, 0] == pytest.approx(8e-6, rel=1e-3)


def test_the_probe_of_this_machine_is_a_cluster(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the probe needs the extra [torch]")
    from loadmaster.cluster.benchmark import benchmark_machine
    from loadmaster.cluster.toml import machine_toml

    said: list[str] = []
    machine = benchmark_machine(largest_bytes=2**16, most_flops_s=1e-9, say=lambda text, _: said.append(text))
    (tmp_path / "here.toml").write_text(machine_toml(machine))
    cluster = parse_cluster(tmp_path / "here.toml")
    here = local_devices()
    assert cluster.device_name == tuple(device.name for device in here)
    assert cluster.memory_bytes.tolist() == [device.memory_bytes for device in here]
    assert cluster.kind_name[0] == here[0].chip  # measured costs are found again under it
    rates = machine.kinds[0]
    assert cluster.flops_per_s[0, Dtype.FLOAT32] == pytest.approx(rates.flops_per_s["float32"], rel=1e-4)
    assert cluster.memory_bytes_per_s[0] == pytest.approx(rates.bytes_per_s, rel=1e-6)
    assert all(link.fit.latency_s >= 0 and link.fit.bytes_per_s > 0 for link in machine.links)
    assert said


def test_the_command_writes_a_file_that_plan_takes(say: Say) -> None:
    pytest.importorskip("torch", reason="the probe needs the extra [torch]")
    document = ask(say, "probe", "--out", "here.toml", "--largest", "64KiB")
    assert document["toml"] == Path("here.toml").read_text()
    assert document["devices"][0]["name"] == "cpu0"
    assert ask(say, "show", "--devices", "here.toml")["cluster"]["name"] == "this machine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "here.json"], "must end in .toml"),
        (["--out", "nowhere/here.toml"], "there is no folder"),
        (["--largest", "1KiB"], "give 4 KiB or more"),
        (["--largest", "much"], "--largest"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(say: Say, arguments: list[str], message: str) -> None:
    code, _, err = say("probe", *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.gpu
def test_a_gpu_and_its_links_are_measured(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the probe needs the extra [torch]")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from loadmaster.cluster.benchmark import benchmark_machine
    from loadmaster.cluster.toml import machine_toml

    machine = benchmark_machine(say=lambda *_: None)
    (tmp_path / "here.toml").write_text(machine_toml(machine))
    cluster = parse_cluster(tmp_path / "here.toml")
    assert cluster.device_name[1] == "gpu0"
    kind = next(kind for kind in machine.kinds if not kind.on_host)
    assert kind.flops_per_s["bfloat16"] > kind.flops_per_s["float32"] > 1e12
    assert kind.bytes_per_s > 1e11
    ways = {link.way: link for link in machine.links if link.a == "gpu0"}
    assert ways["pinned"].fit.bytes_per_s > ways["pageable"].fit.bytes_per_s
    assert 1.0 <= ways["pinned"].duplex <= 2.0
    assert ways["pinned"].fit.rel_error < 0.5
