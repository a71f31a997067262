#!/usr/bin/env bash
# Names the base image in Dockerfile by digest too, so that its tag cannot come to mean something else.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

fail() {
  echo "error: $*" >&2
  exit 1
}

tag=$(sed -n 's/^FROM \([^@ ]*\).* AS train$/\1/p' Dockerfile)
scripts/docker.sh pull "$tag" || fail "$tag could not be pulled, so its digest is not known; Dockerfile stays as it is"
digest=$(docker image inspect "$tag" | sed -n '/"RepoDigests"/,/]/s/.*@\(sha256:[0-9a-f]*\)".*/\1/p' | head -n 1)
[[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || fail "$tag has no digest: it does not come from a registry"
sed "s|^FROM .* AS train\$|FROM $tag@$digest AS train|" Dockerfile >Dockerfile.tmp
mv Dockerfile.tmp Dockerfile
echo "Dockerfile: $tag@$digest"
