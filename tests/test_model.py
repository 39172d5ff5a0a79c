"""Texts that the kernel and Kubernetes share with us."""

import pytest

from rte.model import parse_ranges, ranges


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((3,), "3"), ((8, 1, 0, 2, 4), "0-2,4,8"), ((1, 3, 5), "1,3,5"), ((0, 1), "0-1")],
)
def test_a_list_is_written_and_read(numbers: tuple[int, ...], text: str) -> None:
    assert ranges(numbers) == text
    assert parse_ranges(text) == tuple(sorted(numbers))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [(" 4 , 1-2\n", (1, 2, 4)), ("1,1", (1,)), ("0-2,33-34,45", (0, 1, 2, 33, 34, 45))],
)
def test_a_list_is_read_as_people_and_files_write_it(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_ranges(text) == numbers


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "1-",
        "-1",
        "3-1",
        "1,,2",
        "0x1",
        "1-2-3",
        "1:2",
        "1 2",
        "0-70000",
        "9999999",
        "²",
        "\u0661",
    ],
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a list such as 0-3,8: "):
        parse_ranges(text)
