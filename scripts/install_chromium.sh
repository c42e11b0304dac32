#!/bin/sh
# Install Chromium, for `make test-view`; does nothing where it is, or cannot be, installed.
set -eu
! command -v chromium >/dev/null || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "chromium is not installed. It is installed by apt-get as root: tests that need it are skipped" >&2
  exit 0
fi
echo "installing chromium"
export DEBIAN_FRONTEND=noninteractive
# The package lists may be missing or out of date. Without the font, characters would be drawn as boxes.
apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null 2>&1 ||
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } ||
  echo "chromium could not be installed: tests that need it are skipped" >&2
