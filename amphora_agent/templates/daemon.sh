# SPDX-License-Identifier: Apache-2.0
# systemd runs this script before and after a daemon of the amphora (amphora_agent/services/systemd_units.py). This is
# a shell script, because a shell starts in a millisecond.
#
#   daemon.sh begin STATE [LEFTOVER...]   before each start: check that the daemon is wanted, wait for the back-off
#   daemon.sh later STATE [LEFTOVER...]   the same, after a restart delay of systemd: no back-off
#   daemon.sh up    STATE                 the daemon runs as $MAINPID
#   daemon.sh end   STATE [HEALTH]        the daemon has exited ($SERVICE_RESULT, $EXIT_CODE, $EXIT_STATUS)
#
# STATE is a directory. The agent writes the file "wanted": wanted, dismissed, stopped or missed. This script writes
# "pid" while the daemon runs, "starts" (number of starts), "exit" (last exit), "begun" (last start, seconds since boot)
# and "deaths" (quick exits in succession). A line without a line end is incomplete,
# because its writer has not finished.
#
# Invariant: HEALTH holds 1 before a wanted daemon is restarted after an exit. Only
# amphora_agent/services/health_watcher.py writes 0.

HEALTHY_SECONDS=5

verb=$1 state=$2
shift 2

recall() {
    known=
    [ ! -f "$state/$1" ] || read -r known < "$state/$1"
}

recall wanted
wanted=$known

case $verb in
begin | later)
    [ "$wanted" = wanted ] || exit 1
    [ $# -eq 0 ] || rm -f -- "$@"
    recall starts
    echo $((${known:-0} + 1)) > "$state/starts"
    known=
    [ "$verb" = later ] || recall deaths
    case ${known:-0} in
    0) pause= ;;
    1) pause=0.1 ;;
    2) pause=0.2 ;;
    3) pause=0.4 ;;
    4) pause=0.8 ;;
    5) pause=1.6 ;;
    6) pause=3.2 ;;
    *) pause=5 ;;
    esac
    [ -z "$pause" ] || sleep "$pause"
    read -r now rest < /proc/uptime
    echo "${now%.*}" > "$state/begun"
    ;;
up)
    echo "$MAINPID" > "$state/pid"
    ;;
end)
    # The check before the start refused the start, so no daemon has exited.
    [ "$SERVICE_RESULT" != exec-condition ] || exit 0
    case $wanted in
    wanted | missed) serves=1 ;;
    *) serves=0 ;;
    esac
    said=
    [ -z "$1" ] || [ ! -f "$1" ] || read -r said < "$1"
    [ -z "$1" ] || [ "$said" = "$serves" ] || printf %s "$serves" > "$1"
    rm -f -- "$state/pid"
    echo "$EXIT_CODE $EXIT_STATUS" > "$state/exit"
    recall begun
    read -r now rest < /proc/uptime
    lived=$((${now%.*} - ${known:-0}))
    recall deaths
    if [ "$lived" -ge "$HEALTHY_SECONDS" ]; then echo 0; else echo $((${known:-0} + 1)); fi > "$state/deaths"
    ;;
esac
