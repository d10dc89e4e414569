# SPDX-License-Identifier: Apache-2.0
"""Habits that every committed file keeps."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_SUFFIXES = {".py", ".pyi", ".cpp", ".h", ".cu", ".cuh", ".hpp", ".cmake", ".sh"}
LICENSE_LINE = re.compile(r"(#|//) SPDX-License-Identifier: Apache-2\.0")
# Spelled in pieces, or this file would be its own culprit.
UNFINISHED = re.compile("|".join((r"\bTO" + "DO\\b", r"\bFIX" + "ME\\b", r"\bX" + "XX\\b")))
MACHINE_PATH = re.compile("|".join(rf"(?<![\w.$}}/])/{folder}/" for folder in ("work", "root", "home", "opt")))
SKIPPED_TEST = re.compile(r"pytest\.(mark\.)?(skip|skipif|xfail|importorskip)\b")


def committed_files() -> list[Path]:
    """Files under version control, or the files of a source archive."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


FILES = committed_files()
SOURCES = [path for path in FILES if path.suffix in SOURCE_SUFFIXES]


def lines_that_match(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    """``file:line: text`` of every line that matches; files that are not text are left out."""
    found = []
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
            for number, line in enumerate(lines, 1)
            if pattern.search(line)
        ]
    return found


def test_there_are_sources_to_look_at() -> None:
    assert len(SOURCES) > 20


def test_every_source_starts_with_its_license() -> None:
    def bears_license(path: Path) -> bool:
        return any(LICENSE_LINE.match(line) for line in path.read_text().splitlines()[:2])

    assert [str(path.relative_to(ROOT)) for path in SOURCES if not bears_license(path)] == []


@pytest.mark.parametrize("pattern", [UNFINISHED, MACHINE_PATH], ids=["unfinished", "path of a machine"])
def test_no_committed_line_matches(pattern: re.Pattern[str]) -> None:
    assert lines_that_match(pattern, FILES) == []


def test_no_test_is_skipped_or_expected_to_fail() -> None:
    tests = [path for path in SOURCES if path.is_relative_to(ROOT / "tests") and path != Path(__file__)]
    assert lines_that_match(SKIPPED_TEST, tests) == []
