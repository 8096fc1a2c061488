# SPDX-License-Identifier: Apache-2.0
# Functions of diskimage/build for the build machine. Source this file in the root directory of the project.
# shellcheck shell=bash
# shellcheck disable=SC2154 # build sets place, log, release, mirror and security

say() { printf '\033[1m%s\033[0m\n' "$*"; }
die() { printf '\033[31m%s\033[0m\n' "$*" >&2; exit 1; }

# failed WHAT LOG: prints the end of the log without the shell's trace, and exits.
failed() {
  grep -v '^+' "$2" | tail -n 15 >&2
  die "Could not build $1. The whole log is $2."
}

require_root() { [[ $(id -u) == 0 ]] || die "Could not build: files of the image have different owners. Run this as root."; }

# require_room DIR MEBIBYTES
require_room() {
  local free
  free=$(df -m --output=avail "$1" | tail -n 1)
  ((free >= $2)) || die "Could not build: $1 has $((free)) MB free, $2 MB are necessary. Use --work for another directory."
}

# seen_from DIR PATH
seen_from() { if [[ $2 == /* ]]; then echo "$2"; else echo "$1/$2"; fi; }

# as_in_manifest MANIFEST RELEASE ARCH: prints release and architecture of an earlier image; fails if they differ from
# the options. (Python may not be installed yet; a manifest has one word per line.)
as_in_manifest() {
  local word asked=("$2" "$3") found=()
  for word in release architecture; do found+=("$(sed -nE 's/^ "'"$word"'": "([a-z0-9]+)",$/\1/p' "$1")"); done
  [[ -n ${found[0]} && -n ${found[1]} ]] || die "$1 is not the manifest of an image."
  for word in 0 1; do
    [[ -z ${asked[word]} || ${asked[word]} == "${found[word]}" ]] || die "The manifest is of ${found[word]}, not of ${asked[word]}."
  done
  echo "${found[*]}"
}

# host_of URL
host_of() { sed -E 's,^[a-z+]+://,,; s,/.*,,; s,.*@,,; s,:[0-9]+$,,' <<<"$1"; }

run_python() { PYTHONDONTWRITEBYTECODE=1 python3 -m "$@"; }

# mebibytes_of SIZE: 2G, 1500M
mebibytes_of() {
  [[ $1 =~ ^([1-9][0-9]{0,5})([GM])$ ]] || return 1
  if [[ ${BASH_REMATCH[2]} == G ]]; then echo $((BASH_REMATCH[1] * 1024)); else echo "${BASH_REMATCH[1]}"; fi
}

# python_of RELEASE: the Python version of a Debian release.
python_of() {
  case $1 in
    trixie) echo 3.13 ;;
    bookworm) echo 3.11 ;;
    *) return 1 ;;
  esac
}

# commit_of: the commit of these sources, with -dirty after local changes.
commit_of() {
  local found
  found=$(git -c safe.directory='*' rev-parse HEAD 2>/dev/null) || { echo unknown; return; }
  [[ -z $(git -c safe.directory='*' status --porcelain -- amphora_agent diskimage requirements setup.cfg 2>/dev/null) ]] || found+=-dirty
  echo "$found"
}

# install_tools LOG: installs missing programs.
install_tools() {
  local wanted=() pair
  for pair in mmdebstrap=mmdebstrap qemu-img=qemu-utils mke2fs=e2fsprogs sfdisk=fdisk mkfs.vfat=dosfstools mcopy=mtools zstd=zstd sudo=sudo \
    python3=python3 debootstrap=debootstrap gpg=gnupg losetup=mount /usr/share/keyrings/debian-archive-keyring.gpg=debian-archive-keyring; do
    command -v "${pair%%=*}" >/dev/null || [[ -e ${pair%%=*} ]] || wanted+=("${pair#*=}")
  done
  python3 -c 'import ensurepip, venv' 2>/dev/null || wanted+=(python3-venv)
  ((${#wanted[@]})) || return 0
  command -v apt-get >/dev/null || die "Could not install ${wanted[*]}: apt-get does not exist here. Install them and run this again."
  say "Installing ${wanted[*]} (Debian packages)"
  {
    DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 update &&
      DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${wanted[@]}"
  } >>"$1" 2>&1 || failed "the image: ${wanted[*]} could not be installed" "$1"
}

# can_run ARCH: checks that programs of this architecture run here, natively or with qemu-user.
can_run() {
  local own
  own=$(dpkg --print-architecture)
  [[ $own != "$1" ]] || return 0
  local machine=aarch64
  [[ $1 == arm64 ]] || machine=x86_64
  grep -qs '^enabled' "/proc/sys/fs/binfmt_misc/qemu-$machine" || die "Could not build for $1 on $own: programs of $1 do not run here.
Build on an $1 machine, or install qemu-user: apt-get install qemu-user-static binfmt-support. The kernel needs
binfmt_misc (/proc/sys/fs/binfmt_misc is mounted, and qemu-$machine in it is enabled)."
}

# install_listing VENV NAME: installs exactly requirements/NAME.txt and verifies the digest of each file.
install_listing() {
  "$1/bin/python" -m pip install -q --no-compile --disable-pip-version-check --require-hashes --no-deps --no-build-isolation -r "requirements/$2.txt"
}

# builder_environment LOG: installs diskimage-builder in a virtual environment and prints its path.
builder_environment() {
  local place=$PWD/.sandbox/diskimage-venv stamp
  stamp=$( (cat requirements/{build,diskimage-venv}.txt; python3 --version) | sha256sum)
  if [[ ! -e $place/stamp || $(<"$place/stamp") != "$stamp" ]]; then
    say "Installing diskimage-builder into .sandbox/diskimage-venv" >&2
    mkdir -p "$PWD/.sandbox"
    { python3 -m venv "$place" && install_listing "$place" build && install_listing "$place" diskimage-venv; } >>"$1" 2>&1 ||
      failed "diskimage-builder's environment" "$1"
    printf '%s\n' "$stamp" >"$place/stamp"
  fi
  echo "$place"
}

# has_release RELEASE MIRROR: downloads InRelease into $place. apt-helper uses the proxies of apt.
has_release() { /usr/lib/apt/apt-helper -o Acquire::Retries=1 -o APT::Sandbox::User=root download-file "${2%/}/dists/$1/InRelease" "$place/InRelease" >>"$log" 2>&1 </dev/null; }

# security_beside MIRROR: the usual URL of the security updates of a mirror.
security_beside() {
  local time='/{snapshot}'
  if [[ $1 == *"$time"* ]]; then echo "${1/"$time"/-security$time}"; else echo "${1%/}-security"; fi
}

# find_mirrors: sets mirror, security and, without an option, release.
find_mirrors() {
  local sources uri one own='' found=()
  sources=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' 'Target-Of: deb' | sort -u)
  if [[ -z $mirror ]]; then
    # Skip sources that are not Debian.
    while read -r uri; do
      for one in trixie bookworm; do
        if has_release "$one" "$uri" && grep -qx 'Origin: Debian' "$place/InRelease"; then own=$uri; break 2; fi
      done
    done < <(awk '$1 !~ /security|updates|backports/ {print $2}' <<<"$sources" | sort -u)
    mirror=$own
  fi
  [[ -n $mirror ]] || die "Could not find a Debian mirror: apt on this machine has no such source. Use --mirror URL."
  [[ -n $security || -z $own ]] || security=$(awk '$1 ~ /-security/ {print $2; exit}' <<<"$sources")
  [[ -n $security ]] || security=$(security_beside "$mirror")
  for one in trixie bookworm; do
    if has_release "$one" "$mirror" && has_release "$one-security" "$security"; then found+=("$one"); fi
  done
  if [[ -z $release ]]; then
    release=trixie
    if [[ " ${found[*]} " != *" trixie "* && ${#found[@]} -gt 0 ]]; then
      release=${found[0]}
      python=$(python_of "$release")
      printf '\033[33m%s\033[0m\n' "The mirror has no trixie: building an image of $release, with an older HAProxy." >&2
    fi
  fi
  [[ " ${found[*]} " == *" $release "* ]] ||
    die "The mirror has no $release with security updates. It has: ${found[*]:-no supported release}. Use --mirror and --security-mirror."
}

# agent_wheels TOOLS ARCH PYTHON DIR MANIFEST: gets the wheels of pip, the agent and its dependencies for the image.
agent_wheels() {
  local tools=$1 python=$3 out=$4 manifest=$5 machine=x86_64 platform platforms=() listing=requirements/agent-venv.txt
  [[ $2 == amd64 ]] || machine=aarch64
  # Platforms that the C library of Debian 12 supports.
  for platform in manylinux2014 manylinux_2_17 manylinux_2_28 manylinux_2_34 manylinux_2_36; do platforms+=(--platform "${platform}_$machine"); done
  run_python diskimage.agent_source "$PWD" "${out%/*}/agent" || return 1
  "$tools/bin/python" -m pip wheel -q --no-deps --no-build-isolation --no-cache-dir --disable-pip-version-check -w "$out" "${out%/*}/agent" || return 1
  if [[ -n $manifest ]]; then
    listing=${out%/*}/requirements.txt
    run_python diskimage.manifest requirements "$manifest" >"$listing" || return 1
  fi
  # Without -q: the error message names the missing file.
  "$tools/bin/python" -m pip download --progress-bar off --no-cache-dir --disable-pip-version-check --require-hashes --no-deps --implementation cp \
    --python-version "$python" "${platforms[@]}" --only-binary :all: -d "$out" -r "$listing" -r requirements/image.txt
}

# end_group PID: stops all processes of a process group.
end_group() {
  kill -TERM -- "-$1" 2>/dev/null || return 0
  local i
  for i in $(seq 50); do kill -0 -- "-$1" 2>/dev/null || return 0; sleep 0.1; done
  : "$i"
  kill -KILL -- "-$1" 2>/dev/null || true
}

# release_below DIR: unmounts everything below DIR, detaches its loop devices, and removes DIR.
release_below() {
  local mounted loop
  # In reverse order; twice, because a mount may hide another one.
  for _ in 1 2; do
    while read -r mounted; do umount "$mounted" 2>/dev/null || umount -l "$mounted" 2>/dev/null || true; done < <(
      awk -v below="$1/" 'index($5, below) == 1 {print $5}' /proc/self/mountinfo | sort -r
    )
  done
  while read -r loop; do losetup -d "$loop" 2>/dev/null || true; done < <(
    losetup -n -O NAME,BACK-FILE -l 2>/dev/null | awk -v below="$1/" 'index($2, below) == 1 {print $1}'
  )
  if grep -q " $1/" /proc/self/mountinfo; then
    printf 'Could not remove %s: a mount below it is still in use.\n' "$1" >&2
    return
  fi
  rm -rf --one-file-system "$1"
}
