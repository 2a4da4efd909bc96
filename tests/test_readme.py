"""The README shows what its commands print; the pictures in it are there."""

import re

import pytest

from tests.readme import README, blocks, missing, output_of

TEXT = README.read_text(encoding="utf-8")
REPORTS = [
    (command, shown) for command, shown in blocks(TEXT) if command.startswith("python -m validate report")
]


@pytest.mark.parametrize("command,shown", REPORTS, ids=[command for command, _ in REPORTS])
def test_reports_in_the_readme_are_what_the_command_prints(command, shown):
    assert missing(shown, output_of(command)) == []


def test_every_picture_of_the_readme_is_there():
    pictures = re.findall(r'<img src="([^"]+)"', TEXT)
    assert len(pictures) == 3
    for picture in pictures:
        assert (README.parent / picture).stat().st_size > 10_000
