"""Long runs in one process leave its memory and descriptors where they are (`benchmarks/trust/soak.py`)."""

import pytest

pytest.importorskip("torch", reason="models are trained")

from benchmarks.trust.soak import soak_steps, soak_studies

_MIB = 2**20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_steps_of_changing_shapes_leave_nothing_behind() -> None:
    found = soak_steps(300)
    assert (found["grown_descriptors"], found["grown_threads"]) == (0, 0)
    assert found["grown_rss_bytes"] < 8 * _MIB


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_studies_one_after_another_keep_no_descriptor_and_little_memory() -> None:
    found = soak_studies(30)
    assert found["grown_descriptors"] == 0
    assert found["grown_rss_bytes"] < 16 * _MIB
