#!/usr/bin/env bash
# `docker`, after a look at whether it is there: scripts/docker.sh [ARGUMENTS...]
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

fail() {
  echo "error: $*; make setup, smoke, test and plan work without it" >&2
  exit 1
}

command -v docker >/dev/null || fail "Docker was not found: install Docker Engine and its Compose plugin"
if [[ ${1:-} == compose ]]; then
  docker compose version >/dev/null 2>&1 ||
    fail "Docker's Compose plugin is missing: install docker-compose-plugin, on Ubuntu docker-compose-v2"
fi
docker version >/dev/null 2>&1 ||
  fail "Docker's daemon does not answer: start it, or let your user reach it (docker version says why)"
export DOCKER_BUILDKIT=1 # not yet the default before Docker 23
exec docker "$@"
