"""A client that nobody closed, as after an exception: what becomes of it when its memory is collected."""

import subprocess
import sys
from pathlib import Path

from tests.support.fake_daemon import FakeDaemon

REPOSITORY = Path(__file__).resolve().parents[3]
# In a process of its own: one that hangs there can only be killed.
ABANDON = """
import gc, sys
from pathlib import Path
from stratad.client import Client

gc.disable()
before = len(list(Path("/proc/self/fd").iterdir()))
for _ in range(3):
    client = Client.connect(sys.argv[1], sys.argv[2])
    client.itself = client
    del client
    gc.collect()
print(len(list(Path("/proc/self/fd").iterdir())) - before)
"""


def test_a_client_that_nobody_closed_is_collected_with_its_sockets(tmp_path: Path) -> None:
    with FakeDaemon.start(tmp_path):
        command = [sys.executable, "-c", ABANDON, str(tmp_path), "default"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "0\n"
