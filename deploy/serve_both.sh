#!/usr/bin/env bash
# `foretoken serve`, with a gateway before it, for `make serve`: when one of them ends, so does the other, and it is said which. Options of
# the gateway come first, then `--`, then those of the server.
set -u
gateway_options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  gateway_options+=("$1")
  shift
done
[ "${1:-}" = -- ] && shift
foretoken=$(dirname "$0")/../.venv/bin/foretoken
# Neither outlives this script when it is killed before it can tell them, where the system can see to that.
tie=()
command -v setpriv >/dev/null && setpriv --pdeathsig TERM true 2>/dev/null && tie=(setpriv --pdeathsig TERM)

${tie[@]+"${tie[@]}"} "$foretoken" gateway ${gateway_options[@]+"${gateway_options[@]}"} &
gateway=$!
${tie[@]+"${tie[@]}"} "$foretoken" serve "$@" &
server=$!
told=
end() { kill "$gateway" "$server" 2>/dev/null; }
trap 'told=1; end' INT TERM HUP
wait -n "$gateway" "$server"
status=$?
if [ -z "$told" ]; then
  if kill -0 "$server" 2>/dev/null; then
    echo "make serve: the gateway ended; stopping the server" >&2
  else
    echo "make serve: the server ended; stopping the gateway" >&2
  fi
  [ "$status" -ne 0 ] || status=1 # half a service that ended well is no success
fi
end
wait "$gateway" "$server" 2>/dev/null
exit "$status"
