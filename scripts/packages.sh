# SPDX-License-Identifier: Apache-2.0
# Installs Debian packages without starting or enabling services. Source this file after environment.sh.
policy=/usr/sbin/policy-rc.d
policy_mark="# Written by scripts/packages.sh, process"

# install_packages [PROGRAM=PACKAGE...]: installs these packages and the common ones if their programs are missing.
install_packages() {
  local wanted=() pair
  for pair in haproxy=haproxy keepalived=keepalived nft=nftables ip=iproute2 nsenter=util-linux python3=python3 "$@"; do
    command -v "${pair%%=*}" >/dev/null || [[ -e ${pair%%=*} || -x /usr/sbin/${pair%%=*} ]] || wanted+=("${pair#*=}")
  done
  python3 -c 'import ensurepip, venv' 2>/dev/null || wanted+=(python3-venv)
  remove_stale_policy
  ((${#wanted[@]})) || return 0
  command -v apt-get >/dev/null || die "Could not install ${wanted[*]}: apt-get does not exist here. Install them and run this again."
  say "Installing ${wanted[*]} (Debian packages)"
  mkdir -p "$home"
  install_quietly "${wanted[@]}" >"$home/apt.log" 2>&1 || die "Could not install ${wanted[*]}. See $home/apt.log."
}

# The body is a subshell, so that its traps remove the policy file after every signal except SIGKILL.
install_quietly() (
  local before
  before=$(enabled_units)
  # invoke-rc.d(8) runs this file to decide whether a service may start. The function does not change a policy file of
  # another program.
  if [[ ! -e $policy ]]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    printf '#!/bin/sh\n%s %s\nexit 101\n' "$policy_mark" "$BASHPID" >"$policy"
    chmod 755 "$policy"
  fi
  DEBIAN_FRONTEND=noninteractive apt-get -q update || exit 1
  DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "$@" || exit 1
  # A package enables its services for the next boot. The function disables the services, because the tests start their
  # own instances.
  local new
  new=$(LC_ALL=C comm -13 <(echo "$before") <(enabled_units))
  [[ -z $new ]] || disable_units $new
)

# Removes the policy file that a killed process has left. The file would prevent restarts of services after updates.
remove_stale_policy() {
  local process
  process=$(sed -n "s|^$policy_mark ||p" "$policy" 2>/dev/null) || true
  # A zombie process counts as ended.
  [[ -z $process ]] || grep -q '^State:[[:space:]]*[^Z]' "/proc/$process/status" 2>/dev/null || rm -f "$policy"
}

# Prints the units that systemd or System V scripts start at boot, sorted.
enabled_units() {
  {
    find /etc/systemd/system -type l -path '*.wants/*' -printf '%f\n' 2>/dev/null
    find /etc/rc2.d -name 'S*' -printf '%f\n' 2>/dev/null | sed 's/^S[0-9]*/sysv:/'
  } | LC_ALL=C sort -u
}

disable_units() {
  local unit
  for unit; do
    case $unit in
      sysv:*) update-rc.d "${unit#sysv:}" disable ;;
      *) systemctl --no-reload disable "$unit" ;;
    esac || echo "Could not disable $unit: it starts at the next boot."
  done
}
