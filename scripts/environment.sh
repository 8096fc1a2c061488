# SPDX-License-Identifier: Apache-2.0
# What ./quickstart and ./run-tests need on the machine: Debian packages and Python environments. To be sourced.
home=$PWD/.sandbox
# What Python compiles goes there too: nothing is left among the sources.
export PYTHONPYCACHEPREFIX=$home/pycache
# Without compiled files each process compiles all its modules again: the tests start thousands of processes.
unset PYTHONDONTWRITEBYTECODE

say() { printf '\033[1m%s\033[0m\n' "$*"; }
die() { printf '\033[31m%s\033[0m\n' "$*" >&2; exit 1; }

require_root() { [[ $(id -u) == 0 ]] || die "Could not start: network namespaces need root. Run this as root."; }

# What building an editable package leaves in the source folder, once every environment is made: nobody reads it again.
tidy_sources() { rm -rf ./*.egg-info; }

check_python() {
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "Could not start: Octavia needs Python 3.11 or newer, python3 here is $(python3 --version)."
}

# install_hashed PLACE LISTING: what requirements/LISTING.txt has and nothing else, each file with one of its digests.
install_hashed() {
  "$1/bin/python" -m pip install -q --no-compile --disable-pip-version-check --require-hashes --no-deps --no-build-isolation -r "requirements/$2.txt"
}

# make_venv NAME REQUIREMENT: an environment of requirements/NAME.txt that is made again when what it is made from has
# changed. The listing is complete: pip resolves nothing, and builds with what is in the environment.
make_venv() {
  local place=$home/$1 stamp
  stamp=$( (cat setup.cfg pyproject.toml requirements/*.txt; python3 --version; pwd; echo "$2") | sha256sum)
  [[ -f $place/stamp && $(<"$place/stamp") == "$stamp" ]] && return 0
  say "Installing $2 into .sandbox/$1"
  [[ -x $place/bin/python ]] || python3 -m venv "$place"
  {
    install_hashed "$place" build && install_hashed "$place" "$1" &&
      "$place/bin/python" -m pip install -q --no-compile --disable-pip-version-check --no-deps --no-build-isolation -e "$2"
  } >"$home/$1.log" 2>&1 ||
    die "Could not install $2:
$(tail -n 5 "$home/$1.log")
The whole log is $home/$1.log."
  printf '%s\n' "$stamp" >"$place/stamp"
}
