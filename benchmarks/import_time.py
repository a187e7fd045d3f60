"""What `import fdp` takes beyond torch's own import, in new processes.

Target: under 150 ms. `garbage` is what of it goes into one full garbage collection: torch's import leaves one due, and
whoever makes the next ten thousand objects pays for it.
"""

import json
import statistics
import subprocess
import sys

ROUNDS = 15
CODE = """
import gc, json, time, torch
spent = []
gc.callbacks.append(lambda phase, info: spent.append((time.perf_counter(), info["generation"])))
start = time.perf_counter()
import fdp
took = time.perf_counter() - start
pairs = zip(spent[::2], spent[1::2])
print(json.dumps([took, sum(end - begin for (begin, generation), (end, _) in pairs if generation == 2)]))
"""


def main() -> None:
    found = []
    for _ in range(ROUNDS):
        done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
    took, garbage = (statistics.median(column) for column in zip(*found, strict=True))
    print(
        f"import fdp after torch: median {took * 1e3:.0f} ms of {ROUNDS} (target 150), garbage {garbage * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
