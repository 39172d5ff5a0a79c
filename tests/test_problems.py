"""What is wrong is said when it begins, changes and ends, and once."""

import re
import time

import pytest

from rte.problems import Problems, do


def lines(caplog: pytest.LogCaptureFixture, *, began: float) -> list[str]:
    """What is logged; how long a problem has lasted, which is so long at the most, is N."""
    said = [f"{r.levelname} {r.getMessage()}" for r in caplog.records]
    for lasted_s in re.findall(r"after (\d+) s", "\n".join(said)):
        assert int(lasted_s) <= time.monotonic() - began + 0.5
    return [re.sub(r"after \d+ s", "after N s", line) for line in said]


def test_a_problem_is_said_when_it_begins_changes_and_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    began = time.monotonic()
    problems = Problems()
    for words in ("gone", "gone", "refused"):
        problems.report("kubelet", words)
    assert str(problems.current()["kubelet"]).startswith("refused (since 2")
    problems.end("kubelet")
    problems.end("kubelet")
    assert problems.current() == {}
    assert lines(caplog, began=began) == [
        f"WARNING kubelet: gone; {do('kubelet')}",
        "INFO kubelet: now refused",
        "INFO kubelet: in order again, after N s",
    ]


def test_what_is_usual_for_a_moment_is_a_problem_at_once_and_said_when_it_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    began = time.monotonic()
    problems = Problems()
    problems.report("hardware", "no reading", after_s=60)
    assert "hardware" in problems.current()
    problems.report("hardware", "still no reading", after_s=60)
    problems.end("hardware")
    assert lines(caplog, began=began) == []
    problems.report("hardware", "no reading", after_s=0.01)
    time.sleep(0.02)
    problems.report("hardware", "no reading", after_s=0.01)
    problems.report("hardware", "no reading", after_s=0.01)
    problems.end("hardware")
    assert lines(caplog, began=began) == [
        f"WARNING hardware: no reading; {do('hardware')}",
        "INFO hardware: in order again, after N s",
    ]
