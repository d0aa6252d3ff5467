"""The page of a study's folder: what the journal says, with every name as text."""

from pathlib import Path

from loadmaster.report.study_page import render_study_page
from loadmaster.train.disk.study_log import read_study_log
from loadmaster.train.study import Study
from tests.train.small_trials import trial


def test_the_folder_of_a_study_is_drawn(tmp_path: Path) -> None:
    evil = "</script><img onerror=x>"
    study = Study([trial("one"), trial(evil, lr=1e-3)], dir=tmp_path / "runs", devices=["cpu#0-8MiB"])
    result = study.fit()
    log = read_study_log(tmp_path / "runs")
    assert {each.name: (each.status, each.step) for each in log.trials} == {
        each.name: (str(each.status), each.step) for each in result.trials
    }
    for each in log.trials:
        assert each.losses[-1][1] == result[each.name].loss
        assert each.num_tokens == result[each.name].num_tokens
    assert all(turn.end_s > turn.start_s >= 0 and turn.device for turn in log.turns)
    assert (
        sum(turn.seconds for turn in log.turns) <= sum(turn.end_s - turn.start_s for turn in log.turns) * 1.01
    )
    page = render_study_page(log).decode()
    assert evil not in page
    assert "Who ran when" in page
    assert "Losses" in page
