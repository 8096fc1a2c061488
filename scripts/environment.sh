# SPDX-License-Identifier: Apache-2.0
# Functions of ./quickstart and ./run-tests for Python environments. Source this file.
home=$PWD/.sandbox
# Python's bytecode cache is in .sandbox too, so that the source directories stay clean.
export PYTHONPYCACHEPREFIX=$home/pycache
# Without a bytecode cache, each of the thousands of processes of the tests compiles its modules again.
unset PYTHONDONTWRITEBYTECODE

say() { printf '\033[1m%s\033[0m\n' "$*"; }
die() { printf '\033[31m%s\033[0m\n' "$*" >&2; exit 1; }

require_root() { [[ $(id -u) == 0 ]] || die "Could not start: network namespaces need root. Run this as root."; }

# Removes the files that the build of an editable package leaves in the source directories. Call this function after the
# creation of all environments.
tidy_sources() { rm -rf ./*.egg-info sandbox/*.egg-info; }

check_python() {
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "Could not start: Octavia needs Python 3.11 or newer, python3 here is $(python3 --version)."
}

# install_hashed VENV LISTING: installs exactly the files in requirements/LISTING.txt, and verifies their digests.
install_hashed() {
  "$1/bin/python" -m pip install -q --no-compile --disable-pip-version-check --require-hashes --no-deps --no-build-isolation -r "requirements/$2.txt"
}

# make_venv NAME [PROJECT...]: makes the environment .sandbox/NAME from requirements/NAME.txt and these projects of the
# checkout. If a listing, a project file or Python has changed, the function updates the environment. The listing
# contains all dependencies, so pip resolves none. pip builds the projects with the tools of the environment.
make_venv() {
  local name=$1 place=$home/$1 editable=() project stamp
  shift
  for project; do editable+=(-e "$project"); done
  stamp=$( (cat setup.cfg pyproject.toml sandbox/pyproject.toml requirements/*.txt; python3 --version; pwd; echo "$*") | sha256sum)
  [[ -f $place/stamp && $(<"$place/stamp") == "$stamp" ]] && return 0
  say "Installing $* into .sandbox/$name"
  [[ -x $place/bin/python ]] || python3 -m venv "$place"
  {
    install_hashed "$place" build && install_hashed "$place" "$name" && { ((! ${#editable[@]})) ||
      "$place/bin/python" -m pip install -q --no-compile --disable-pip-version-check --no-deps --no-build-isolation "${editable[@]}"; }
  } >"$home/$name.log" 2>&1 ||
    die "Could not install $*:
$(tail -n 5 "$home/$name.log")
The whole log is $home/$name.log."
  printf '%s\n' "$stamp" >"$place/stamp"
}
