#!/usr/bin/env bash
# Locks your additions: requirements/project.in -> requirements/project.txt.
#
# What the template pins in requirements/ stays as it is, and torch is the one of the platform.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

find requirements -name '*.txt' ! -name project.txt -exec grep -ohE '^[A-Za-z0-9][A-Za-z0-9._-]*==[^ ;]+' {} + \
  >"$scratch/pinned.txt"
printf '%s\n' torch torchvision >"$scratch/elsewhere.txt"

known=()
while IFS= read -r line; do
  known+=(--no-emit-package "${line%%==*}")
done <"$scratch/pinned.txt"

uv pip compile --quiet --no-config --custom-compile-command "make lock" \
  --universal --python-version 3.11 --generate-hashes \
  --constraint "$scratch/pinned.txt" --excludes "$scratch/elsewhere.txt" "${known[@]}" \
  --output-file requirements/project.txt requirements/project.in >/dev/null
echo "requirements/project.txt is written: make setup and make build install from it"
