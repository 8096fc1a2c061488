# SPDX-License-Identifier: Apache-2.0
# What systemd runs around a daemon of the amphora (amphora_agent/services/systemd_units.py); a shell, because it starts in a millisecond.
#
#   daemon.sh begin STATE [LEFTOVER...]   before each start: whether it is wanted, and not again too soon
#   daemon.sh later STATE [LEFTOVER...]   the same, where systemd has waited already
#   daemon.sh up    STATE                 it runs, as $MAINPID
#   daemon.sh end   STATE [HEALTH]        it has ended ($SERVICE_RESULT, $EXIT_CODE, $EXIT_STATUS)
#
# STATE is a directory. "wanted", by the agent: wanted, dismissed, stopped or missed. By this script: "pid" while it
# runs, "starts" how many there were, "exit" how it ended last, "begun" when (seconds since the boot), "deaths" how many
# of them in quick succession. A line in one of them that does not end is being written.
#
# Invariant: HEALTH says 1 before a daemon that was wanted, and has died, is started again; the one who says that it
# serves again is amphora_agent/services/health_watcher.py.

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
    # It was not to be started, so nothing has ended.
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
