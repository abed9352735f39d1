#!/usr/bin/env bash
# The Debian packages that the tests use: Prometheus with promtool, Alertmanager, and what Mooncake links to.
# Nothing is done where they are there; without root and without sudo the tests that need them say so and skip.
set -euo pipefail

packages=(prometheus prometheus-alertmanager libibverbs1 libnuma1 liburing2)
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null; then
  echo "no apt-get here: install ${missing[*]} yourself, or do without the tests that need them"
  exit 0
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! sudo -n true 2>/dev/null; then
    echo "not root: run 'sudo apt-get install ${missing[*]}', or do without the tests that need them"
    exit 0
  fi
  as_root=(sudo)
fi

echo "installing ${missing[*]}"
# The packages start their services, which nobody here wants; Debian asks this file first.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
  "${as_root[@]}" chmod +x "$policy"
  trap '"${as_root[@]}" rm -f "$policy"' EXIT
fi
"${as_root[@]}" apt-get update -q >/dev/null
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" >/dev/null
