"""The noise's thread stands behind the others while nobody waits for it, and only there where it may come back."""

import os
import subprocess
import sys
import threading
import time

import pytest

from protocols.server.idle_thread import SpareTime

has_policy = hasattr(os, "SCHED_IDLE")
is_root = has_policy and os.geteuid() == 0


def _policy() -> int:
    return os.sched_getscheduler(threading.get_native_id())


@pytest.mark.skipif(not is_root, reason="only whom the system lets back may step behind: here, root")
def test_the_thread_stands_behind_until_it_is_waited_for():
    spare, begun, may_end = SpareTime("test"), threading.Event(), threading.Event()

    def work() -> list[int]:
        found = [_policy()]
        begun.set()
        assert may_end.wait(60)
        until = time.monotonic() + 60
        while _policy() == os.SCHED_IDLE and time.monotonic() < until:  # whoever waits lets it out
            time.sleep(0.001)
        return [*found, _policy()]

    waited_for = spare.submit(work)
    assert begun.wait(60)
    may_end.set()
    assert spare.wait_for(waited_for) == [os.SCHED_IDLE, os.SCHED_OTHER]
    assert spare.wait_for(spare.submit(lambda: None)) is None
    assert _policy() == os.SCHED_OTHER  # of the thread that waits, nothing changes
    after = spare.submit(_policy)
    while not after.done():
        time.sleep(0.001)
    assert spare.wait_for(after) == os.SCHED_IDLE
    spare.close()


@pytest.mark.skipif(not has_policy, reason="the system has no such policies")
def test_another_policy_of_the_process_is_left_alone():
    program = """if True:
        import os, threading
        from protocols.server.idle_thread import SpareTime
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        spare = SpareTime("test")
        print(spare.wait_for(spare.submit(lambda: os.sched_getscheduler(threading.get_native_id()))))
        spare.close()
    """
    assert _printed(program) == [str(os.SCHED_BATCH)]


def _printed(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_what_work_fails_of_reaches_whoever_waits():
    spare = SpareTime("test")

    def fail() -> None:
        raise OSError(28, "no space")

    with pytest.raises(OSError, match="no space"):
        spare.wait_for(spare.submit(fail))
    assert spare.wait_for(spare.submit(lambda: 5)) == 5
    spare.close()


@pytest.mark.skipif(not is_root, reason="becomes an ordinary user, which only root can")
def test_an_ordinary_user_who_could_not_come_back_stays_among_the_others():
    program = """if True:
        import os, resource, threading
        from protocols.server.idle_thread import SpareTime
        resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
        os.setgid(65534), os.setuid(65534)
        spare = SpareTime("test")
        print(spare.wait_for(spare.submit(lambda: os.sched_getscheduler(threading.get_native_id()))))
        spare.close()
    """
    assert _printed(program) == [str(os.SCHED_OTHER)]
