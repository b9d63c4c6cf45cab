#!/usr/bin/env bash
# The Debian packages that `make e2e-slurm` makes its cluster of. While they come in none of their services may start, as in
# the images of containers: policy-rc.d says so.
set -euo pipefail

install_slurm() {
  local policy=/usr/sbin/policy-rc.d made="" code=0
  [ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy" && made="$policy"; }
  local wanted=(--yes --quiet --no-install-recommends slurm-wlm munge openssh-server rsync)
  export DEBIAN_FRONTEND=noninteractive
  apt-get install "${wanted[@]}" || { apt-get update --quiet && apt-get install "${wanted[@]}"; } || code=$?
  [ -z "$made" ] || rm -f "$made"
  return "$code"
}
PATH=$PATH:/usr/sbin
for program in slurmctld slurmd munged sshd rsync; do
  command -v "$program" >/dev/null || { install_slurm; break; }
done
