#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheel_aarch64.sh PYTHON: cross-compiles a wheel for aarch64 into dist/, and opens its library under emulation.
# Needs g++-aarch64-linux-gnu and qemu-user. PYTHON's environment must have setuptools, cmake and ninja, because pip's
# isolated build would install those for aarch64. CMAKE_ARGS may add options.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64 \
  CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 ${CMAKE_ARGS:-}" \
  PATH=$(dirname "$1"):$PATH "$1" -m pip wheel --no-build-isolation --no-deps -w "$work/dist" . >"$work/log" 2>&1 || { tail -n 40 "$work/log" && exit 1; }
"$1" -m zipfile -e "$work"/dist/*aarch64.whl "$work/wheel"

cat >"$work/load.c" <<'C'
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char** argv) {
  void* library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
  if (library == NULL) return fprintf(stderr, "%s\n", dlerror()), 1;
  const char* (*version)(void) = (const char* (*)(void))dlsym(library, "farandole_version");
  return version == NULL || printf("aarch64: the library loads and says %s\n", version()) < 0;
}
C
aarch64-linux-gnu-gcc -o "$work/load" "$work/load.c" -ldl
qemu-aarch64 -L /usr/aarch64-linux-gnu "$work/load" "$work/wheel/farandole/lib/libfarandole.so"
mkdir -p dist && mv "$work"/dist/*aarch64.whl dist/
