"""Print what a requirement file asks for and this python lacks, a line each: ``missing_requirements.py FILE``.

Reads the packages' metadata only, so that it answers at once: importing torch alone takes seconds.
Runs before anything is installed. What is marked as optional in the file, or is for other systems, is not missed.
"""

import sys
from importlib import metadata, util
from pathlib import Path

# Where the name to import is another.
MODULES = {"scikit-learn": "sklearn", "PyYAML": "yaml", "pillow": "PIL", "pytest-xdist": "xdist"}


def missing(path):
    """A list of texts such as 'timm' or 'torch>=2.11,<3 (2.9.1 is installed)'."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        try:
            from pip._vendor.packaging.requirements import Requirement
        except ImportError:
            return ["packaging"]  # which what we need brings along
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        line, _, comment = (part.strip() for part in line.partition("#"))
        if line.startswith("-r "):
            found += missing(path.parent / line[3:].strip())
        elif line and not comment.startswith("optional"):
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate():
                continue
            try:
                version = metadata.version(wanted.name)
            except metadata.PackageNotFoundError:
                version = None
            if version is None or util.find_spec(MODULES.get(wanted.name, wanted.name)) is None:
                found.append(wanted.name)
            elif not wanted.specifier.contains(version, prereleases=True):
                found.append(f"{wanted} ({version} is installed)")
    return found


if __name__ == "__main__":
    print("\n".join(missing(Path(sys.argv[1]))))
