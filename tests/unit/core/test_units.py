"""Numbers with units, in and out: values known from the definitions of the units."""

import math
from typing import Any

import pytest

from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.core.units import (
    format_apart,
    format_bytes,
    format_flops,
    format_percent,
    format_seconds,
    parse_bytes,
    parse_flops_per_s,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("100", 100),
        (100, 100),
        (1.5, 1),
        ("80GB", 80_000_000_000),
        ("80gb", 80_000_000_000),
        ("1GiB", 1_073_741_824),
        ("1.5 GiB", 1_610_612_736),
        ("512MiB", 536_870_912),
        ("1k", 1000),
        ("1KiB", 1024),
        ("25Gbit", 3_125_000_000),
        ("200 Gbit/s", 25_000_000_000),
        ("16GB/s", 16_000_000_000),
        ("1e3", 1000),
        (".5k", 500),
        ("2EB", 2 * 10**18),
        ("1EiB", 2**60),
        ("7PiB", 7 * 2**50),
    ],
)
def test_sizes_mean_what_their_units_say(text: Any, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    ["", "GB", "-1GB", "1 GB 2", "1XB", "1e400", "8EiB", "nan", "inf", "١GB", "1GＢ", "--", "1,5GB"],
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize("number", [-1, math.nan, math.inf, 2**63, 10**400])
def test_numbers_outside_all_sizes_are_refused(number: float) -> None:
    with pytest.raises(InputError, match="between 0 and 8 EiB"):
        parse_bytes(number)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10s", 10.0),
        ("1.5ms", 0.0015),
        ("5us", 5e-6),
        ("5\N{MICRO SIGN}s", 5e-6),
        ("5\N{GREEK SMALL LETTER MU}s", 5e-6),
        ("7 ns", 7e-9),
        ("2min", 120.0),
        ("1H", 3600.0),
        (3, 3.0),
    ],
)
def test_times_mean_what_their_units_say(text: Any, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize("text", ["", "5", "5 parsecs", "-1s", "5\N{LATIN SMALL LETTER LONG S}", "s"])
def test_what_is_no_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="is not a time; write for example '5us'"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("312T", 312e12), ("19.5 TFLOP/s", 19.5e12), ("19.5TFLOPS", 19.5e12), ("1e12", 1e12), (5, 5.0)],
)
def test_rates_mean_what_their_units_say(text: Any, rate: float) -> None:
    assert parse_flops_per_s(text) == rate
    with pytest.raises(InputError, match="is not a rate"):
        parse_flops_per_s("fast")


def test_a_number_beyond_all_floats_is_infinite_and_not_a_crash() -> None:
    assert parse_seconds(10**400) == math.inf
    assert parse_flops_per_s(-(10**400)) == -math.inf


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0123456, "12.3 ms"),
        (4, "4 s"),
        (0.9999, "1 s"),  # never '1e+03 ms'
        (0.00099999, "1 ms"),
        (0.9994, "999 ms"),
        (119.9, "120 s"),
        (125, "2 min 5 s"),
        (7199, "119 min 59 s"),
        (7200, "2 h 0 min"),
        (3 * 86400, "3.0 days"),
        (1e12, "1e+12 s"),
        (2.5e-9, "2.5 ns"),
        (1e-12, "0.001 ns"),
        (-0.005, "-5 ms"),
        (-125, "-2 min 5 s"),
        (math.inf, "-"),
        (math.nan, "-"),
    ],
)
def test_seconds_are_written_with_three_digits_of_a_fitting_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (10 * 2**30, "10.0 GiB"),
        (-(2**20), "-1.0 MiB"),
        (5000 * 2**40, "5000.0 TiB"),
        (math.inf, "unlimited"),
        (math.nan, "-"),
    ],
)
def test_bytes_are_written_in_powers_of_1024(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_flops_and_shares_are_written_with_their_units() -> None:
    assert format_flops(7.04e12) == "7.04 TFLOP"
    assert format_flops(999.9e9) == "1 TFLOP"
    assert format_flops(0) == "0 FLOP"
    assert format_flops(12) == "12 FLOP"
    assert format_percent(0.1234) == "12.3 %"
    assert format_percent(math.inf) == "-"


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    assert "did you mean 'chain_balance'?" in str(
        UnknownNameError("algorithm", "Chain-Balnce", ["auto", "chain_balance"])
    )


def test_an_unknown_name_near_to_nothing_is_answered_with_the_known_ones() -> None:
    message = str(UnknownNameError("device", "zzz", ["gpu1", "", "gpu0", "gpu0"], see="the manual"))
    assert message == "unknown device 'zzz'; known: gpu0, gpu1 (the manual)"


def test_very_many_known_names_are_not_all_listed() -> None:
    message = str(UnknownNameError("op", "zzz", (f"{op:06d}" for op in range(10_000))))
    assert message.endswith(" and 9960 more")
    assert len(message) < 500


def test_names_of_a_megabyte_do_not_slow_the_search_for_the_nearest() -> None:
    message = str(UnknownNameError("op", "x" * 10**6, ["x" * 10**6 + "y", "b"]))
    assert "known: b, xxx" in message


@pytest.mark.parametrize(
    ("first", "second", "texts"),
    [
        (2**20, 2**21, ("1.0 MiB", "2.0 MiB")),
        (1_700_000, 1_680_000, ("1.62 MiB", "1.60 MiB")),
        (2**30 + 1, 2**30, ("1073741825 B", "1073741824 B")),
        (5, 5, ("5 B", "5 B")),
        (2**20, 2**20, ("1.0 MiB", "1.0 MiB")),
    ],
)
def test_two_counts_of_bytes_are_told_apart(first: int, second: int, texts: tuple[str, str]) -> None:
    assert format_apart(first, second) == texts
