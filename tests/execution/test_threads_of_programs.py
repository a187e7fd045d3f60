"""Threads of fdp in programs of their own: forks, interrupts, ends, and threads that cannot start."""

import subprocess
import textwrap

from tests.common.programs import run_program


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, which must end by itself."""
    return run_program("import fdp, threading, time, torch, os, sys\n" + textwrap.dedent(code))


def test_in_a_forked_child():
    result = run_python(
        """
        os.sched_getaffinity = lambda pid: set(range(3))
        torch.set_num_threads(1)
        w, x = torch.tensor(2.0), torch.arange(6.0)
        def call(fn=torch.mul):
            return torch.equal(fdp.dp_apply(fn, w, x, fdp.virtual_devices(3), executor="threads"), w * x)
        def forking(w, x):
            if x[0] == 0:
                pid = os.fork()
                if pid == 0:
                    os._exit(0 if call() else 1)
                assert os.waitpid(pid, 0)[1] == 0
            return w * x
        assert call() and call(forking)
        pid = os.fork()
        if pid == 0:
            ok = call() and call()
            torch.func.jvp(torch.sin, (x,), (x,))
            os._exit(0 if ok else 1)
        print(os.waitpid(pid, 0)[1], call())
        """
    )
    assert result.stdout.split("\n")[0] == "0 True", result.stderr


def test_while_another_thread_imports_the_compiler():
    """Its modules are then there, without what they will define."""
    result = run_python(
        """
        import types
        names = ["torch._dynamo.convert_frame", "torch._dynamo.eval_frame", "numpy"]
        sys.modules.update({name: types.ModuleType(name) for name in names})
        w, x = torch.tensor(2.0), torch.arange(6.0)
        meet = lambda w, x: x * w / fdp.psum(1)
        for fn, executor in [(torch.mul, "threads"), (torch.mul, "sequential"), (meet, "threads"), (meet, "auto")]:
            print(fdp.dp_apply(fn, w, x, fdp.virtual_devices(3), executor=executor).sum().item())
        """
    )
    assert result.stdout.split() == ["30.0", "30.0", "10.0", "10.0"], result.stderr


def test_the_interpreter_ends():
    result = run_python(
        """
        import atexit
        w, x = torch.tensor(2.0), torch.arange(6.0)
        def call():
            return fdp.dp_apply(torch.mul, w, x, fdp.virtual_devices(3), executor="threads")
        atexit.register(lambda: print(call().sum().item(), flush=True))
        call()
        """
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "30.0\n", "")
