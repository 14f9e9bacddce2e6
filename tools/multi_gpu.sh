#!/usr/bin/env bash
# On a machine with several GPUs: tests, benchmarks and faults with one stage a card, into one JSON file and one table.
# Arguments go on to tools/multi_gpu.py (try --help); --dry-run does all of it on four cpu workers.
#
# An interpreter that has what is needed is taken as it is (PYTHON=/path/to/python picks one), so that a machine without
# a network will do; else .venv is made in the checkout.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

# Steps that need more (pytest, transformers) say so if it is not there.
needed='import msgpack, msgspec, numpy, posix_ipc, psutil, torch, xxhash, zmq'
python=${PYTHON:-python3}
if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c "$needed" >/dev/null 2>&1; then
  python=$venv/bin/python
elif ! "$python" -c "$needed" >/dev/null 2>&1; then
  ensure_venv transformers test
  python=$venv/bin/python
fi
exec "$python" -P "$checkout/tools/multi_gpu.py" "$@"
