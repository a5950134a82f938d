"""Print the requirements in a file that this Python does not meet, one per line: ``missing_requirements.py FILE``.

Reads only the packages' metadata, because importing torch alone takes seconds. Runs before anything is installed.
Requirements that the file marks as optional or that are for other systems are not reported.
"""

import sys
from importlib import metadata, util
from pathlib import Path

# Packages that are imported by another name.
MODULES = {
    "scikit-learn": "sklearn",
    "PyYAML": "yaml",
    "pillow": "PIL",
    "pytest-xdist": "xdist",
    "pytest-timeout": "pytest_timeout",
}


def missing(path):
    """A list of texts such as 'timm' or 'torch>=2.11,<3 (2.9.1 is installed)'."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        try:
            from pip._vendor.packaging.requirements import Requirement
        except ImportError:
            return ["packaging"]  # our requirements install it
    lacking = []
    for line in path.read_text(encoding="utf-8").splitlines():
        line, _, comment = (part.strip() for part in line.partition("#"))
        if line.startswith("-r "):
            lacking += missing(path.parent / line[3:].strip())
        elif line and not comment.startswith("optional"):
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate():
                continue
            try:
                version = metadata.version(wanted.name)
            except metadata.PackageNotFoundError:
                version = None
            if version is None or util.find_spec(MODULES.get(wanted.name, wanted.name)) is None:
                lacking.append(wanted.name)
            elif not wanted.specifier.contains(version, prereleases=True):
                lacking.append(f"{wanted} ({version} is installed)")
    return lacking


if __name__ == "__main__":
    print("\n".join(missing(Path(sys.argv[1]))))
