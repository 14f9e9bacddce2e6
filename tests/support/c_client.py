"""The client in C, built for a test with the C compiler of this host and the libzmq that pyzmq has loaded."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

import zmq

SOURCES: Final = Path(__file__).parents[1] / "c_client"
BUILD_S: Final = 120.0
RUN_S: Final = 60.0
FLAGS: Final = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g")
# The address sanitizer of common compilers cannot place its shadow where the kernel spreads mappings more widely.
_SHADOW_BITS: Final = 28


class CannotBuild(Exception):
    """Something that the build needs is not here: says what."""


def build_client(directory: Path) -> Path:
    """Compile the client into `directory`; with sanitizers where they work here.

    Raises:
        CannotBuild: no C compiler, or no libzmq to link.
        subprocess.CalledProcessError: the client does not compile.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise CannotBuild("no C compiler: neither cc nor gcc is in PATH")
    library = _zmq_library()
    command = [compiler, *FLAGS, *_sanitizers(compiler, directory)]
    program = directory / "client"
    # The library's own dependencies lie beside it, which its run path says to the loader but not to the linker.
    link = [str(library), f"-Wl,-rpath,{library.parent}", "-Wl,--allow-shlib-undefined"]
    _run([*command, "-o", str(program), str(SOURCES / "client.c"), *link])
    return program


def _zmq_library() -> Path:
    """The shared libzmq that pyzmq uses here, wherever it came from.

    Raises:
        CannotBuild: pyzmq has it inside of itself.
    """
    assert zmq.zmq_version()  # it is loaded now
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libzmq") and ".so" in path.name:
            return path
    raise CannotBuild(f"no shared libzmq: pyzmq {zmq.__version__} has no library that another program could link")


def _sanitizers(compiler: str, directory: Path) -> list[str]:
    """Those of the two sanitizers with which an empty program runs here, with the search for leaks at its end."""
    empty = directory / "empty.c"
    empty.write_text("int main(void) { return 0; }\n", encoding="ascii")
    names = ["undefined"]
    bits = Path("/proc/sys/vm/mmap_rnd_bits")
    if bits.exists() and int(bits.read_text(encoding="ascii")) <= _SHADOW_BITS:
        names.insert(0, "address")
    while names:
        flags = [f"-fsanitize={','.join(names)}", "-fno-sanitize-recover=all"]
        try:
            _run([compiler, *flags, "-o", str(directory / "empty"), str(empty)])
            _run([str(directory / "empty")])
            return flags
        except (subprocess.CalledProcessError, OSError):
            names.pop(0)
    return []


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=BUILD_S, capture_output=True, text=True)
