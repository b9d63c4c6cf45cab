#!/usr/bin/env bash
# What the declarations are held to, into the folder $1: Debian's HIP 5.2 and libibverbs (unpacked, not installed), and
# AMD's own Python bindings with $2, a Python that has uv. About 70 MB, once. What cannot be had is named in `absent`,
# and its tests say so.
set -euo pipefail
to="$1" python="$2"
mkdir -p "$to/deb"
: > "$to/absent"

packages=(libamdhip64-dev libamdhip64-5 libamd-comgr2 libhsa-runtime-dev libhsa-runtime64-1 libhsakmt1 libllvm15
  libibverbs-dev libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 libelf1 libdrm2 libdrm-amdgpu1 libedit2 libbsd0
  libmd0 libz3-4 libtinfo6 libxml2 libicu72)
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
  echo "debian: no apt-get here" >> "$to/absent"
elif [ ! -e "$to/debian/usr/include/hip/hip_runtime_api.h" ]; then
  apt-get update --quiet >/dev/null 2>&1 || true
  # Those that a newer release names otherwise are left out: the tests that need them say what is missing.
  for package in "${packages[@]}"; do
    (cd "$to/deb" && apt-get download --quiet "$package" >/dev/null 2>&1) || echo "debian: no package $package" >> "$to/absent"
  done
  for file in "$to"/deb/*.deb; do
    if [ -e "$file" ]; then dpkg --extract "$file" "$to/debian"; fi
  done
  rm -f "$to"/deb/*.deb
fi

if [ ! -e "$to/bindings/rocm/bindings/hip.pyi" ]; then
  "$(dirname "$python")/uv" pip install --quiet --python "$python" --target "$to/bindings" --no-deps \
    'rocm-bindings-hip==10.0.*' 'rocm-bindings-systems==10.0.*' 'rocm-bindings-core==10.0.*' \
    || echo "bindings: AMD's wheels cannot be had for this Python" >> "$to/absent"
fi
cat "$to/absent" >&2
