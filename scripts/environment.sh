# Sourced by the other scripts: sets ROOT, the repository's folder, and chooses the Python that runs the program.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# find_python FILE: sets PYTHON to one that meets all requirements in FILE: that of the active virtual environment or,
# if none is active, the one on PATH or in .venv. Fails if there is none.
find_python() {
  local candidate
  if [[ -n ${VIRTUAL_ENV:-} ]]; then
    set_python_if_ready "$VIRTUAL_ENV/bin/python" "$1"
    return
  fi
  for candidate in python3 python "$ROOT/.venv/bin/python"; do
    if set_python_if_ready "$candidate" "$1"; then
      return
    fi
  done
  return 1
}

# ready_python FILE: the same, but installs what is missing into the active virtual environment, or else into .venv.
ready_python() {
  local venv=${VIRTUAL_ENV:-$ROOT/.venv}
  if find_python "$1"; then
    return
  fi
  # Two processes that install at once, as of an array job, would each take the other for an interrupted installation.
  local lock=$ROOT/.venv.lock
  if command -v flock >/dev/null && [[ -w $ROOT && (! -e $lock || -w $lock) ]]; then
    exec 9>"$lock"
    # 200: another process has the lock. Any other failure means that this file system has no locks; then nobody waits.
    flock -n -E 200 9 || [[ $? != 200 ]] || { echo "Waiting for another process, which installs"; flock 9; }
    if find_python "$1"; then
      exec 9>&-
      return
    fi
  fi
  if [[ $venv == "$ROOT/.venv" ]] && ! { is_new "$venv/bin/python" && has_pip "$venv/bin/python"; }; then
    make_venv "$venv" python3 python python3.13 python3.12 python3.11 python3.10
  fi
  install "$venv" "$1"
  PYTHON=$venv/bin/python
  exec 9>&-
}

# run_pytest FLAGS: on two processes for each core, since the tests spend a third of their time waiting; each takes up to
# 2 GB. Keeps the order of the files, in which the slowest do not come last. Compiled modules are kept, for
# hundreds of processes would compile them anew.
run_pytest() {
  local cores
  cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
  PYTHONDONTWRITEBYTECODE= "$PYTHON" -m pytest -n $((cores < 4 ? 2 * cores : 8)) \
    --dist loadfile --no-loadscope-reorder "$@"
}

set_python_if_ready() {
  local missing
  # An environment holds this marker while an installation is in progress.
  if [[ $1 == */bin/python && -e ${1%/bin/python}/.installing ]] || ! is_new "$1"; then
    return 1
  fi
  missing=$(missing_requirements "$1" "$2" 2>/dev/null) && [[ -z $missing ]] && PYTHON=$1
}

# missing_requirements PYTHON FILE: prints the requirements in FILE that PYTHON does not meet, a line each. Reads the
# packages' metadata alone: pip install --dry-run takes seconds, and knows no optional packages.
missing_requirements() {
  "$1" -c '
import sys
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:  # but for pip, which environments made by uv lack
    from pip._vendor.packaging.requirements import Requirement

def is_met(wanted):
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return False
    return wanted.specifier.contains(version, prereleases=True)

def show_missing(path):
    for line in path.read_text().splitlines():
        line, _, comment = line.partition("#")
        if line.startswith("-r "):
            show_missing(path.parent / line[3:].strip())
        elif line.strip() and "optional" not in comment:
            wanted = Requirement(line)
            if not (wanted.marker and not wanted.marker.evaluate() or is_met(wanted)):
                print(wanted)

show_missing(Path(sys.argv[1]))
' "$ROOT/$2"
}

is_new() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

has_pip() {
  "$1" -m pip --version >/dev/null 2>&1 || { "$1" -m ensurepip && "$1" -m pip --version; } >/dev/null 2>&1
}

# make_venv FOLDER PYTHON...: makes an environment in FOLDER with the first Python that can.
make_venv() {
  local folder=$1 candidate without_venv=
  shift
  for candidate in "$@"; do
    if ! is_new "$candidate"; then
      continue
    fi
    if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
      echo "Making ${folder#"$ROOT"/} with $("$candidate" --version) ($candidate)"
      "$candidate" -m venv --clear "$folder"
      # An old pip, as that of Python 3.11, searches for twice as long; it will do if no newer one can be had.
      "$folder/bin/python" -m pip install --upgrade pip --quiet --disable-pip-version-check --retries 0 2>/dev/null || true
      return
    fi
    without_venv=$candidate
  done
  if [[ -n $without_venv ]]; then
    echo "$without_venv cannot make a virtual environment; on Debian and Ubuntu, apt install python3-venv helps" >&2
  else
    echo "No Python 3.10 or newer is on PATH; install one" >&2
  fi
  return 1
}

# install VENV FILE: installs the requirements in FILE into VENV; completes an earlier run that was interrupted.
install() {
  local python=$1/bin/python package
  if ! { is_new "$python" && has_pip "$python"; }; then
    echo "$python is not a Python 3.10 or newer with pip; activate another environment, or none" >&2
    return 1
  fi
  if [[ -e $1/.installing ]]; then
    # pip writes a package's INSTALLER last: a package without it is incomplete, but pip would consider it installed.
    for package in "$1"/lib/python3*/site-packages/*.dist-info; do
      [[ -e $package/INSTALLER ]] || rm -rf "$package"
    done
  fi
  touch "$1/.installing"
  echo "Installing what $2 lists into ${1#"$ROOT"/}; the first time takes minutes (a few GB)"
  if ! "$python" -m pip install --quiet --disable-pip-version-check --no-compile -r "$ROOT/$2"; then
    echo "pip could not install everything; run the same command again" >&2
    return 1
  fi
  # pip would compile all modules, on one core and for a third of the time. These import most of what is ever used; for
  # test.sh, which compiles more, see there.
  if [[ $2 != requirements-dev.txt ]]; then
    (cd "$ROOT" && PYTHONDONTWRITEBYTECODE= "$python" -c 'import timm, torch._dynamo, training' >/dev/null 2>&1) || true
  fi
  rm "$1/.installing"
}
