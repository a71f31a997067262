#!/usr/bin/env bash
# Serves SSH on port 2222 inside the container, for the user that runs it and for keys only.
set -euo pipefail

host_key=/cache/sshd/ssh_host_ed25519_key # on a volume, so that your machine knows it next time
mkdir -p "${host_key%/*}"
[[ -f $host_key ]] || ssh-keygen -q -t ed25519 -N '' -f "$host_key"

# Sessions get the container's environment, which sshd would leave out.
environment=()
for name in PATH VIRTUAL_ENV PYTHONPATH HF_HOME TORCHINDUCTOR_CACHE_DIR CHECKPOINT_DIR DATA_DIR; do
  environment+=("$name=${!name}")
done

exec /usr/sbin/sshd -D -e -f /dev/null -p 2222 \
  -o HostKey="$host_key" \
  -o AuthorizedKeysFile=/etc/ssh/authorized_keys \
  -o AuthenticationMethods=publickey \
  -o PermitRootLogin=no \
  -o PidFile=none \
  -o Subsystem="sftp internal-sftp" \
  -o SetEnv="${environment[*]}"
