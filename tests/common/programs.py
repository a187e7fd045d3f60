"""Programs of their own, each in a process that ends as any Python does.

Importing torch takes seconds. So one process imports torch and fdp, and each program is a fork of it, made before
anything else has happened there.
"""

import atexit
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

SERVER = """
import gc, os, sys, types
import torch, fdp
gc.collect()
gc.freeze()  # no program changes these pages by looking for garbage, so that they are not copied

def serve():
    "In this process it returns at the end; in a fork with the folder of a program."
    for line in sys.stdin.buffer.raw:
        pid = os.fork()
        if not pid:
            return line.decode().rstrip()
        os.write(1, b"%d\\n" % pid)
        os.write(1, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

folder = serve()
if folder is not None:
    for number, name in enumerate([os.devnull, f"{folder}/out", f"{folder}/err"]):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    with open(f"{folder}/program.py") as file:
        source = file.read()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(source, f"{folder}/program.py", "exec"), vars(main))
"""


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[bytes]) -> None:
    with server:
        server.kill()


def load(path: Path) -> Any:
    """A file as a module, wherever it is."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(path: Path, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a file as a program, with as many threads for operations as tests have."""
    lines = [
        "import runpy, sys, torch",
        "torch.set_num_threads(1)",
        f"sys.argv, sys.path[:0] = {[str(path), *arguments]}, [{str(path.parent)!r}]",
        f"runpy.run_path({str(path)!r}, run_name='__main__')",
    ]
    return run_program("\n".join(lines), timeout)


def run_program(source: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a program, which must end by itself. `torch` and `fdp` have been imported when it begins."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text(source)
        server.stdin.write(f"{folder}\n".encode())
        pid = int(server.stdout.readline())
        late = threading.Timer(timeout, os.kill, (pid, signal.SIGKILL))
        late.start()
        try:
            code = int(server.stdout.readline())
        finally:
            late.cancel()
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess([source], code, out, err)
