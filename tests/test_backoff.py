"""When what failed is tried again."""

import pytest

from rte.backoff import Retry, doubled_s, ordered_s


def test_a_wait_doubles_to_the_longest_and_chance_cuts_up_to_half() -> None:
    assert [doubled_s(1, 60, failures) for failures in (0, 1, 2, 6, 10**6)] == [1, 2, 4, 60, 60]
    assert doubled_s(1, 60, 2, chance=0.5) == 3


def test_what_a_server_asked_for_is_kept_and_up_to_half_of_it_more() -> None:
    assert ordered_s(None, chance=0.9) == 0
    assert ordered_s(10, chance=0) == 10
    assert ordered_s(10, chance=0.5) == 12.5


def test_what_fails_is_due_later_and_later_until_it_went_well() -> None:
    retry = Retry(first_s=1, longest_s=60)
    assert retry.is_due(100)
    for longest_s in (1, 2, 4, 8):
        retry.failed(100)
        assert retry.at == pytest.approx(100 + 0.75 * longest_s, abs=0.25 * longest_s)
        assert not retry.is_due(100 + longest_s / 2 - 0.01)
        assert retry.is_due(100 + longest_s)
    retry.end()
    assert retry.at is None
    assert retry.is_due(100)
    retry.failed(100)
    assert retry.is_due(101)


def test_what_fails_is_not_due_before_the_server_said() -> None:
    retry = Retry(first_s=1, longest_s=60)
    retry.failed(100, after_s=20)
    assert not retry.is_due(119.9)
    assert retry.is_due(130)
