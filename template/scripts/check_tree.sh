#!/usr/bin/env bash
# Fails when an update left conflicts behind, or when the commands before wrote files that git would pick up.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

wrong=0
report() {
  if [[ -n $2 ]]; then
    printf 'error: %s:\n%s\n' "$1" "$2" >&2
    wrong=1
  fi
}

report "files in conflict" "$(git ls-files --unmerged | cut -f 2 | sort -u)"
report "conflict markers" "$(git grep -InE '^(<{7}|>{7}) ' || true)"
report "rejected changes of an update" "$(git ls-files '*.rej')"
report "files that are neither committed nor ignored" "$(git status --porcelain)"
exit "$wrong"
