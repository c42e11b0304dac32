#!/bin/sh
# Install SLURM and the tools for namespaces, for `make test-cluster`; does nothing where they are, or cannot be, installed.
set -eu
programs="munged slurmctld slurmd sbatch ip nsenter unshare setpriv faketime"
missing=""
for program in $programs; do command -v "$program" >/dev/null || missing="$missing $program"; done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "not installed:$missing. They are installed by apt-get as root: tests that need them are skipped" >&2
  exit 0
fi
packages="slurmctld slurmd slurm-client munge iproute2 util-linux faketime"
echo "installing $packages"
export DEBIAN_FRONTEND=noninteractive
# The package lists may be missing or out of date.
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $packages >/dev/null 2>&1 ||
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages >/dev/null; }
