#!/usr/bin/env bash
# Takes over what is new in the template: scripts/update.sh [ARGUMENTS of `copier update`...]
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

fail() {
  echo "error: $*" >&2
  exit 1
}

command -v copier >/dev/null ||
  fail "copier was not found: install it with 'pipx install copier' or 'uv tool install copier'"
[[ $(git rev-parse --show-prefix 2>/dev/null || echo none) == "" ]] ||
  fail "an update needs a git repository here: git init && git add --all && git commit"
[[ -z $(git status --porcelain) ]] ||
  fail "an update needs a clean work tree: commit or stash what 'git status' shows"

source=$(sed -n 's/^_src_path: *//p' .copier-answers.yml)
[[ $source == *:* || -e ${source/#\~/$HOME}/copier.yml ]] ||
  fail "the template is not at '$source', seen from here: write its address or full path after _src_path: in .copier-answers.yml, commit that, and update again"

if [[ ! -t 0 && " $* " != *" --defaults "* ]]; then
  set -- --defaults "$@" # nobody is there to be asked
fi
copier update "$@"

conflicts=$(git ls-files --unmerged | cut -f 2 | sort -u)
if [[ -n $conflicts ]]; then
  printf 'To be resolved by you:\n%s\n' "$conflicts"
fi
