"""os.fork inside a shard: the child has the thread of this shard alone."""

from tests.common.programs import run_program

PROGRAM = """
import os, warnings, torch, fdp
warnings.simplefilter("ignore", DeprecationWarning)
devices, x, own = fdp.virtual_devices(3), torch.arange(6.0), os.getpid()

def works():
    meeting = fdp.dp_apply(lambda _, x: x * fdp.psum(1), None, x, devices)
    return torch.equal(meeting, x * 3) and torch.equal(fdp.dp_apply(torch.mul, x[:1] + 2, x, devices), x * 2)

def child(how):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if how == "works":
        os._exit(0 if works() else 1)
    if how == "meets":
        try:
            fdp.psum(1)
        except RuntimeError as error:
            os._exit(0 if "psum: this process was forked inside a shard" in str(error) else 1)

def fn(meets, codes, x):
    if meets:
        fdp.psum(1)
    for who in (0, 1):  # the first is in the main thread, and so is the other without collectives
        if fdp.axis_index() == who:
            codes += [child("works"), child("meets") if meets else 0, child("returns")]
            if os.getpid() != own:
                return x
    return x * (fdp.psum(1) if meets else 3)

# No two shards run at once: one that runs beside it could hold a lock, which the child never gets.
calls = {
    "dp_apply": lambda fn: fdp.dp_apply(lambda _, x: fn(x), None, x, devices),
    "parallel_apply": lambda fn: torch.cat(fdp.parallel_apply(fn, fdp.scatter(x, devices)).shards),
}
for name, meets in [("dp_apply", True), ("parallel_apply", True), ("parallel_apply", False)]:
    codes = []
    try:
        right = torch.equal(calls[name](lambda x: fn(meets, codes, x)), x * 3)
    except RuntimeError as error:
        os._exit(3 if "this process was forked inside a shard" in str(error) else 1)
    print(name, meets, right, works(), codes, flush=True)
"""


def test_a_child_forked_in_a_shard():
    """It can make calls of its own, and exchange nothing with the others. In the parent all goes on."""
    found = run_program(PROGRAM)
    assert found.stdout.splitlines() == [
        "dp_apply True True True [0, 0, 3, 0, 0, 1]",
        "parallel_apply True True True [0, 0, 3, 0, 0, 1]",
        "parallel_apply False True True [0, 0, 3, 0, 0, 3]",
    ], found.stderr
    assert found.stderr.count("RuntimeError: fdp: this process was forked inside a shard") == 2
