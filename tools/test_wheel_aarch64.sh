#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_wheel_aarch64.sh BIN: trains on two ranks under emulation, with NumPy, the wheel for aarch64 and Debian's Python. The
# ranks have no MPI; BIN's `farandole run` starts them.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1
home=$PWD/build/aarch64-python
root=$home/root

# Uses separate folders of apt, so that the architectures of this machine's apt do not change.
if [ ! -f "$home/.complete" ]; then
  rm -rf "$home" && mkdir -p "$home"/{lists,cache/archives}/partial "$home/debs"
  keys=/usr/share/keyrings/debian-archive-keyring.gpg
  echo "deb [signed-by=$keys] http://deb.debian.org/debian bookworm main" >"$home/sources.list"
  touch "$home/status"
  apt=(apt-get -qq -o "Dir::State::lists=$home/lists" -o "Dir::State::status=$home/status" -o "Dir::Cache=$home/cache"
    -o "Dir::Etc::sourcelist=$home/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "APT::Sandbox::User=$(id -un)")
  "${apt[@]}" update
  (cd "$home/debs" && "${apt[@]}" download python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libgcc-s1 \
    libstdc++6 zlib1g libexpat1 libffi8 libssl3 libbz2-1.0 liblzma5 libuuid1)
  for package in "$home"/debs/*.deb; do dpkg-deb -x "$package" "$root"; done
  touch "$home/.complete"
fi

rm -f dist/*aarch64.whl
tools/wheel_aarch64.sh "$bin/python"
rm -rf "$home/site"
"$bin/python" -m pip install -qq --disable-pip-version-check --target "$home/site" --only-binary :all: --implementation cp \
  --python-version 3.11 --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 \
  "$(grep ^numpy== requirements/run.txt)" dist/*aarch64.whl

cd "$home" && cp "$OLDPWD/examples/numpy_regression.py" .
"$bin/farandole" run -np 2 qemu-aarch64 -L "$root" -E "PYTHONPATH=$home/site" "$root/usr/bin/python3.11" \
  numpy_regression.py | tee out
grep -q 'identical on all ranks: yes' out
