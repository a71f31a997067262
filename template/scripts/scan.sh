#!/usr/bin/env bash
# What is in an image, and which of it has known weaknesses: scripts/scan.sh IMAGE
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

command -v trivy >/dev/null || {
  echo "error: Trivy was not found: install it (its documentation says how), then make build scan" >&2
  exit 1
}
trivy image --quiet --format cyclonedx --output sbom.json "$1"
echo "sbom.json lists what is in $1"
exec trivy image --quiet --scanners vuln --ignore-unfixed --severity HIGH,CRITICAL "$1"
