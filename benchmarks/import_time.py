"""What `import fdp` takes beyond torch's own import: new processes, which import torch alone and both in turns.

Target: at most 120 ms. Bytecode is there, as pip leaves it. `garbage` is what of it goes into one full garbage
collection: torch's import leaves one due, and whoever makes the next ten thousand objects pays for it.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

ROUNDS = 15
CODE = """
import gc, json, sys, time
spent = []
gc.callbacks.append(lambda phase, info: spent.append((time.perf_counter(), info["generation"], phase)))
start = time.perf_counter(), time.process_time()
import torch
at = len(spent)
{}
took, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
full = [when for when, generation, _ in spent[at:] if generation == 2]
print(json.dumps([took, cpu, sum(full[1::2]) - sum(full[::2])]))
"""


def measure(code: str, folder: str) -> list[float]:
    """Seconds that a new process takes: by the clock, of the processor, and in full collections after torch."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = folder
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return json.loads(done.stdout)


def main() -> None:
    alone, both = CODE.format(""), CODE.format("import fdp")
    with tempfile.TemporaryDirectory() as folder:
        measure(both, folder)  # which writes the bytecode
        pairs = [(measure(alone, folder), measure(both, folder)) for _ in range(ROUNDS)]
    took, cpu, garbage = (statistics.median(b[i] - a[i] for a, b in pairs) * 1e3 for i in range(3))
    torch = statistics.median(a[0] for a, _ in pairs) * 1e3
    print(f"import torch {torch:.0f} ms, import fdp after it {took:.0f} ms (target 120), medians of {ROUNDS};")
    print(f"of the processor {cpu:.0f} ms; in a full garbage collection {garbage:.0f} ms")


if __name__ == "__main__":
    main()
