"""The README's example runs as it is printed, and its installation names files that are there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import stratad
from tests.support.daemon import DaemonProcess

ROOT: Final = Path(stratad.__file__).parents[1]
README: Final = ROOT / "README.md"
pytestmark = pytest.mark.skipif(not README.exists(), reason="not run from a checkout")


def blocks(language: str) -> list[str]:
    """The code blocks of one language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def test_the_first_example_runs_as_it_is_printed() -> None:
    example = blocks("python")[0]
    assert "Client.connect(deadline_s=10.0)" in example
    with DaemonProcess("cpu:1") as daemon:
        run_dir = str(daemon.run_dir)
        where = f"Client.connect({run_dir!r}, {daemon.instance!r}, deadline_s=10.0)"
        code = example.replace("Client.connect(deadline_s=10.0)", where)
        code += (
            "\nassert (match.tokens, image.tokens) == (1000, 1000)\nassert image.image_bytes == 2 * 1000 * ROW_BYTES\n"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr


def test_the_installation_names_files_that_are_there() -> None:
    lines = [line for block in blocks("") for line in block.splitlines()]
    sources = [shlex.split(line)[-2] for line in lines if line.startswith("install -D")]
    assert len(sources) == 3
    assert all((ROOT / source).is_file() for source in sources)
    assert [line for line in lines if line.startswith("/opt/stratad/venv/bin/pip install -c constraints.txt")]
