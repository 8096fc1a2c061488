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

# Removes what the build of an editable package leaves among the sources. Call it after all environments are made.
tidy_sources() { rm -rf ./*.egg-info sandbox/*.egg-info; }

check_python() {
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "Could not start: Octavia needs Python 3.11 or newer, python3 here is $(python3 --version)."
}

# install_hashed PLACE LISTING: what requirements/LISTING.txt has and nothing else, each file with one of its digests.
install_hashed() {
  "$1/bin/python" -m pip install -q --no-compile --disable-pip-version-check --require-hashes --no-deps --no-build-isolation -r "requirements/$2.txt"
}

# make_venv NAME PROJECT...: makes the environment .sandbox/NAME from requirements/NAME.txt and these projects of the
# checkout, or updates it after one of its sources has changed. The listing is complete: pip resolves nothing, and
# builds with the tools of the environment.
make_venv() {
  local name=$1 place=$home/$1 editable=() project stamp
  shift
  for project; do editable+=(-e "$project"); done
  stamp=$( (cat setup.cfg pyproject.toml sandbox/pyproject.toml requirements/*.txt; python3 --version; pwd; echo "$*") | sha256sum)
  [[ -f $place/stamp && $(<"$place/stamp") == "$stamp" ]] && return 0
  say "Installing $* into .sandbox/$name"
  [[ -x $place/bin/python ]] || python3 -m venv "$place"
  {
    install_hashed "$place" build && install_hashed "$place" "$name" &&
      "$place/bin/python" -m pip install -q --no-compile --disable-pip-version-check --no-deps --no-build-isolation "${editable[@]}"
  } >"$home/$name.log" 2>&1 ||
    die "Could not install $*:
$(tail -n 5 "$home/$name.log")
The whole log is $home/$name.log."
  printf '%s\n' "$stamp" >"$place/stamp"
}
