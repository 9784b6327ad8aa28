#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu_run.sh first|test|bench [PYTHON] [options]: runs tools/gpu_first_minutes.py, `make test-gpu` or `make bench-gpu`,
# also on machines without make. Each takes at most ten minutes. It writes each result to build/gpu, or to the folder
# RESULTS, at once, so an interrupted run leaves results. The environment is build/gpu-venv, on top of PYTHON's packages
# (tools/gpu_venv.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
what=$1 python=${2:-python3}
shift $(($# < 2 ? $# : 2))
bin=$PWD/build/gpu-venv/bin
results=${RESULTS:-build/gpu}
carried=(build/gpu-carry/*)
export PYTHONUNBUFFERED=1
# Ignore pytest plugins that PYTHON's environment may contain.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTEST_PLUGINS=pytest_timeout

if [[ ! -e build/gpu-venv/.stamp || ${carried[0]} -nt build/gpu-venv/.stamp ]]; then
  tools/gpu_venv.sh "$python"
fi
mkdir -p "$results"
PYTHONPATH=tests "$bin/python" -m harness.gpu

case $what in
  first)
    timeout -k 10 550 "$bin/python" tools/gpu_first_minutes.py "$@" 2>&1 | tee "$results/first.txt"
    ;;
  test)
    status=0
    timeout -k 10 470 "$bin/python" -m pytest tests/gpu --keep-going --budget 420 --report "$results/tests.json" \
      -W default --inner=-Wdefault "$@" || status=$?
    cat "$results/tests.md"
    exit "$status"
    ;;
  bench)
    {
      status=0
      PYTHONPATH=tests "$bin/python" -m harness.gpu
      for script in moves step training memory; do
        echo "## benchmarks/gpu_$script.py"
        timeout -k 5 110 "$bin/python" "benchmarks/gpu_$script.py" --json "$results/$script.json" || {
          status=1
          echo "## failed"
        }
      done
      exit "$status"
    } 2>&1 | tee "$results/bench.txt"
    ;;
  *)
    echo "unknown: $what; choose first, test or bench" >&2
    exit 2
    ;;
esac
