#!/usr/bin/env bash
# `docker compose`, after a look at whether it is there: scripts/compose.sh [ARGUMENTS...]
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

fail() {
  echo "error: $*" >&2
  exit 1
}

without="; make setup, smoke, test and plan work without it"
command -v docker >/dev/null || fail "Docker was not found: install Docker Engine and its Compose plugin$without"
docker compose version >/dev/null 2>&1 ||
  fail "Docker's Compose plugin is missing: install docker-compose-plugin, on Ubuntu docker-compose-v2$without"
docker version >/dev/null 2>&1 ||
  fail "Docker's daemon does not answer: start it, or let your user reach it (docker version says why)$without"
exec docker compose "$@"
