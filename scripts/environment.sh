# SPDX-License-Identifier: Apache-2.0
# What ./quickstart and ./run-tests need on the machine: Debian packages and Python environments. To be sourced.
home=$PWD/.sandbox

say() { printf '\033[1m%s\033[0m\n' "$*"; }
die() { printf '\033[31m%s\033[0m\n' "$*" >&2; exit 1; }

require_root() { [[ $(id -u) == 0 ]] || die "Could not start: network namespaces need root. Run this as root."; }

install_packages() {
  local wanted=() tool
  local -A package=([haproxy]=haproxy [keepalived]=keepalived [nft]=nftables [ip]=iproute2 [nsenter]=util-linux
    [curl]=curl [python3]=python3)
  for tool in "${!package[@]}"; do
    command -v "$tool" >/dev/null || wanted+=("${package[$tool]}")
  done
  python3 -c 'import ensurepip, venv' 2>/dev/null || wanted+=(python3-venv)
  ((${#wanted[@]})) || return 0
  command -v apt-get >/dev/null || die "Could not install ${wanted[*]}: there is no apt-get here. Install them and run this again."
  say "Installing ${wanted[*]}"
  mkdir -p "$home"
  # No service is to start by itself: everything runs in namespaces of ours.
  printf '#!/bin/sh\nexit 101\n' >"$home/no-services"
  chmod 755 "$home/no-services"
  {
    DEBIAN_FRONTEND=noninteractive apt-get -q update &&
      DEBIAN_FRONTEND=noninteractive POLICYRCD="$home/no-services" apt-get -q install -y --no-install-recommends "${wanted[@]}"
  } >"$home/apt.log" 2>&1 || die "Could not install ${wanted[*]}. See $home/apt.log."
}

check_python() {
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "Could not start: Octavia needs Python 3.11 or newer, python3 here is $(python3 --version)."
}

# make_venv NAME REQUIREMENT: an environment that is made again when what it is made from has changed.
make_venv() {
  local place=$home/$1 stamp
  stamp=$( (cat setup.cfg constraints.txt; python3 --version; pwd; echo "$2") | sha256sum)
  [[ -f $place/stamp && $(<"$place/stamp") == "$stamp" ]] && return 0
  say "Installing $2 into .sandbox/$1"
  [[ -x $place/bin/python ]] || python3 -m venv "$place"
  "$place/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt -e "$2" >"$home/$1.log" 2>&1 ||
    die "Could not install $2:
$(tail -n 5 "$home/$1.log")
The whole log is $home/$1.log."
  printf '%s\n' "$stamp" >"$place/stamp"
}
