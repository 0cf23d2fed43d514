#!/usr/bin/env bash
# Builds the image, runs compose.yaml and holds it to what a fleet in containers promises: a completion; no write outside
# volumes, no rights; a stream that ends whole though all are stopped under it; a stop while it starts that takes no time.
#   deploy/images/check.sh                                       with Docker
#   ENGINE=podman COMPOSE=podman-compose deploy/images/check.sh  with Podman
# BUILD=0 takes the image that is there; PDFLEET_IMAGE, _MODEL, _MODELS and _PORT are those of compose.yaml.
set -euo pipefail
cd "$(dirname "$0")/../.."
engine=${ENGINE:-docker} port=${PDFLEET_PORT:-8000}
export PDFLEET_IMAGE=${PDFLEET_IMAGE:-pdfleet:0.1.0}
compose() { ${COMPOSE:-$engine compose} -p pdfleet-check -f deploy/images/compose.yaml "$@"; }
say() { echo "== $*"; }

[ "${BUILD:-1}" = 0 ] || $engine build -f deploy/images/Dockerfile -t "$PDFLEET_IMAGE" .

say "a stop while it starts"
begun=$SECONDS
one=$($engine run --detach --read-only --tmpfs /tmp:exec "$PDFLEET_IMAGE" python -c \
  "import time; time.sleep(600)")
$engine stop --time 60 "$one" >/dev/null
$engine rm "$one" >/dev/null
[ $((SECONDS - begun)) -lt 50 ] || { say "it ran on until it was killed"; exit 1; }

trap 'compose down --volumes >/dev/null 2>&1' EXIT
compose up -d
say "waits for the fleet"
until curl -sf "http://127.0.0.1:$port/ready" >/dev/null; do
  sleep 2
  [ $SECONDS -lt 1800 ] || { compose logs; exit 1; }
done

say "nobody, with no rights, and nowhere to write"
compose exec -T decode sh -ec '
  test "$(id -u)" = 10001
  grep -q "^CapBnd:.*0000000000000000$" /proc/1/status
  grep -q "^NoNewPrivs:.*1$" /proc/1/status
  for folder in / /etc /opt/pdfleet /var /usr/lib; do
    if touch "$folder/written" 2>/dev/null; then echo "$folder can be written"; exit 1; fi
  done'

model() { curl -sf "http://127.0.0.1:$port/v1/models" | sed 's/.*"id": *"\([^"]*\)".*/\1/'; }
ask() {
  curl -sSN "http://127.0.0.1:$port/v1/completions" -H 'content-type: application/json' -d \
    '{"model": "'"$(model)"'", "prompt": "'"$1"'", "max_tokens": '"$2"', "ignore_eos": true, "stream": true}'
}
say "a completion"
ask "Once upon a time" 8 | grep -q 'data: \[DONE\]'

say "a completion in a form that is asked for"
curl -sf "http://127.0.0.1:$port/v1/completions" -H 'content-type: application/json' -d \
  '{"model": "'"$(model)"'", "prompt": "A number:", "max_tokens": 8, "structured_outputs": {"regex": "[0-9]{3}"}}' |
  grep -Eq '"text": *"[0-9]{3}"'

say "a stop under a stream"
told=$(mktemp)
ask "Once upon a time there was a town between two mountains, and in it" 200 >"$told" &
until [ "$(grep -c '^data: ' "$told")" -gt 5 ]; do sleep 0.2; done
compose stop
wait $!
grep -q '"finish_reason": *"length"' "$told" && grep -q 'data: \[DONE\]' "$told" || { tail -n 5 "$told"; exit 1; }
say "all held"
