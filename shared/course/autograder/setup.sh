#!/usr/bin/env bash
# Gradescope runs this once, as root, when it builds the image. It has unpacked the zip file in
# $root/source: this script, run_autograder, and the repository in staircase/.
set -euo pipefail

root=${AUTOGRADER_ROOT:-/autograder}
export DEBIAN_FRONTEND=noninteractive

apt-get update
apt-get install -y --no-install-recommends bubblewrap || true # else the container is all there is
python=
for version in 3.13 3.12 3.11; do # the newest that the image's system has
  if apt-get install -y --no-install-recommends "python$version" "python$version-venv" gcc libc6-dev; then
    python=python$version
    break
  fi
done
if [ -z "$python" ]; then
  echo "This image has no Python 3.11 or newer: choose a newer one in the autograder's settings." >&2
  exit 1
fi
"$python" -m venv "$root/venv"
"$root/venv/bin/python" -m pip install --no-cache-dir -r "$root/source/staircase/requirements.txt"
