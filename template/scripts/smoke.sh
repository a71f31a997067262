#!/usr/bin/env bash
# Trains configs/smoke.yaml from the start, on two processes of this CPU.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

# The last smoke run would otherwise be continued, with a model that may have changed since.
checkpoint_dir=$(scripts/run.sh printenv CHECKPOINT_DIR)
rm -rf "${checkpoint_dir:?}/smoke"
exec ./launch.sh --cpu train --config configs/smoke.yaml --run_name smoke "$@"
