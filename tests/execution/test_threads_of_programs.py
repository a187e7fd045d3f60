"""Threads of fdp in programs of their own: forks, interrupts, ends, and threads that cannot start."""

import subprocess
import textwrap

from tests.common.programs import run_program


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, which must end by itself."""
    return run_program("import fdp, threading, time, torch, os, sys\n" + textwrap.dedent(code))


def test_interrupts_at_any_moment():
    result = run_python(
        """
        import _thread, random, signal
        os.sched_getaffinity = lambda pid: set(range(3))
        w, x = torch.tensor(2.0), torch.arange(12.0)
        armed, over = False, False
        def handler(*_):
            global armed
            if armed:
                armed = False
                raise KeyboardInterrupt
        signal.signal(signal.SIGINT, handler)
        def disturb():
            rng = random.Random(0)
            while not over:
                time.sleep(rng.random() * 0.004)
                _thread.interrupt_main()
        def call():
            return fdp.dp_apply(torch.mul, w, x, fdp.virtual_devices(6), executor="threads")
        disturber = threading.Thread(target=disturb, daemon=True)
        disturber.start()
        wrong = interrupted = done = 0
        end = time.monotonic() + 20
        while time.monotonic() < end and min(interrupted, done) < 200:
            try:
                armed = True
                wrong += not torch.equal(call(), w * x)
                done += 1
                armed = False  # none comes where it would end the loop
            except KeyboardInterrupt:
                interrupted += 1
        armed, over = False, True
        disturber.join()
        meeting = threading.Barrier(3)
        def meet(w, x):
            meeting.wait(30)  # which three at once can do, if no call has left a core reserved
            return w * x
        fdp.dp_apply(meet, w, x, fdp.virtual_devices(3), executor="threads")
        print(wrong, interrupted > 50, done > 50, threading.active_count() <= 1 + 6)  # a thread for each shard
        """
    )
    assert result.stdout.split("\n")[0] == "0 True True True", result.stderr


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


def test_no_more_threads():
    result = run_python(
        """
        refuse, start = True, threading.Thread.start
        def starting(self):
            if refuse:
                raise RuntimeError("can't start new thread")
            start(self)
        threading.Thread.start = starting
        w, x = torch.tensor(2.0), torch.arange(5.0)
        def call():
            return fdp.dp_apply(torch.mul, w, x, fdp.virtual_devices(5), executor="threads").tolist()
        try:
            call()
        except RuntimeError as error:
            print(error)
        refuse = False
        print(call())
        """
    )
    assert result.stdout == "can't start new thread\n[0.0, 2.0, 4.0, 6.0, 8.0]\n", result.stderr
