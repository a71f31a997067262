#!/usr/bin/env bash
# Names the base image in Dockerfile by digest too, so that its tag cannot come to mean something else.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

tag=$(sed -n 's/^FROM \([^@ ]*\).* AS train$/\1/p' Dockerfile)
scripts/docker.sh pull "$tag"
digest=$(docker image inspect "$tag" | sed -n '/"RepoDigests"/,/]/s/.*@\(sha256:[0-9a-f]*\)".*/\1/p' | head -n 1)
[[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || {
  echo "error: $tag has no digest: it was made on this machine and not pulled from a registry" >&2
  exit 1
}
sed "s|^FROM .* AS train\$|FROM $tag@$digest AS train|" Dockerfile >Dockerfile.tmp
mv Dockerfile.tmp Dockerfile
echo "Dockerfile: $tag@$digest"
