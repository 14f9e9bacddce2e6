#!/usr/bin/env bash
# Shows the whole promise on this machine: a real model's conversation is parked, its engine killed, and goes on restored.
# Arguments go on to `stratactl demo` (try --help).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
ensure_venv transformers
exec "$venv/bin/stratactl" demo "$@"
