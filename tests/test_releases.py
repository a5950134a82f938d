"""What a release and an installation read: one version, its notes, one list of the tests' tools."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.test_structure import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:  # comes with pytest. pip's own copy is none to take: after an import of pip, setuptools' distutils cannot load
    import tomli as tomllib

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PYPROJECT["project"]["version"]


def test_the_group_dev_is_what_requirements_dev_adds():
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements-dev.txt").read_text().splitlines()]
    assert lines[:2] == ["-r requirements.txt", "-r requirements-tools.txt"]
    assert PYPROJECT["dependency-groups"]["dev"] == lines[2:]


def test_the_version_stands_in_one_file():
    for path in ("CITATION.cff", "requirements.txt", ".github/workflows/release.yml", ".ci/release_notes"):
        assert not re.search(rf"(?m)^\W*version\W+{re.escape(VERSION)}", (ROOT / path).read_text())


@pytest.fixture
def notes(tmp_path):
    (tmp_path / ".ci").mkdir()
    for name in (".ci/release_notes", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)

    def printed(changelog, tag):
        (tmp_path / "CHANGELOG.md").write_text(changelog)
        return subprocess.run(
            ["bash", tmp_path / ".ci/release_notes", tag], check=False, capture_output=True, text=True
        )

    return printed


def test_the_notes_of_a_release_are_its_section(notes):
    done = notes(f"# Changes\n\n## Later\n\nno\n\n## {VERSION}\n\nyes\n\n### more\n\n## 0.0.9\n\nno\n", f"v{VERSION}")
    assert (done.returncode, done.stdout.split()) == (0, ["yes", "###", "more"])


@pytest.mark.parametrize(
    ("changelog", "tag", "told"),
    [
        (f"## {VERSION}\n\nyes\n", "v99.0", f"the tag is 'v99.0' and pyproject.toml has version {VERSION}"),
        (f"## Later\n\nno\n\n## {VERSION}\n\n## 0.0.9\n", f"v{VERSION}", "has nothing under"),
    ],
)
def test_a_release_without_its_version_or_its_notes_is_refused(notes, changelog, tag, told):
    done = notes(changelog, tag)
    assert done.returncode == 2 and told in done.stderr and done.stdout == ""
