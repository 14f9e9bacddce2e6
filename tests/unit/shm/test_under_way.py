"""What is under way can be read after its writer's death."""

import os
import signal

import pytest

from shm.under_way import UnderWay, read_under_way


def test_each_lane_has_a_word() -> None:
    made = UnderWay.create()
    assert read_under_way(made.descriptor) == ()
    made.note(1, 2**63)
    assert read_under_way(made.descriptor) == (2**63,)
    made.note(0, 7)
    assert read_under_way(made.descriptor) == (7, 2**63)
    made.note(1, 0)
    assert read_under_way(made.descriptor) == (7,)
    made.close()
    made.close()


def test_the_word_of_a_killed_process_is_there() -> None:
    made = UnderWay.create()
    child = os.fork()
    if child == 0:
        made.note(1, 42)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert read_under_way(made.descriptor) == (42,)
    made.close()


def test_another_file_is_refused() -> None:
    descriptor = os.memfd_create("other")
    os.write(descriptor, bytes(15))
    with pytest.raises(ValueError, match="15 bytes"):
        read_under_way(descriptor)
    os.close(descriptor)
