"""The first hour with GPUs, as one command: `make gpus`.

Six steps, each in a process of its own, with a time limit and the stacks of all threads where it hangs. What they find
goes into `results.json`, and as a table into `results.md`, which the page "On GPUs" takes as it is. Where there is no
GPU it is a rehearsal on the virtual accelerator: its times say nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMITS = {"machine": 120, "laws": 300, "hangs": 300, "processes": 480, "speed": 600, "traces": 300}
"""Seconds of each step."""

Step = dict[str, Any]


def run(name: str, limit: float, environment: dict[str, str]) -> Step:
    """A step in a process of its own: its rows, and the end of what it wrote if it failed."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.first_hour.steps", name, str(limit)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=os.environ | environment
    ) as process:
        try:
            text, _ = process.communicate(timeout=limit + 120)  # it may take long to begin
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0]
    lines = text.splitlines()
    rows = [json.loads(line.removeprefix("ROW ")) for line in lines if line.startswith("ROW ")]
    other = [line for line in lines if not line.startswith("ROW ")]
    step = {"step": name, "seconds": round(time.perf_counter() - begin, 1), "code": process.returncode, "rows": rows}
    return step | ({"output": other[-300:]} if process.returncode else {})


def table(steps: list[Step], devices: str) -> str:
    """Markdown for the page."""
    lines = [f"Devices: {devices}.", ""]
    for step in steps:
        lines += [f"**{step['step']}**: {step['seconds']} s" + (", FAILED" if step["code"] else ""), ""]
        if step["step"] == "machine":
            continue
        names = list(dict.fromkeys(name for row in step["rows"] for name in row))
        if names:
            lines += ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
            lines += ["| " + " | ".join(_cell(row.get(name, "")) for name in names) + " |" for row in step["rows"]]
            lines.append("")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "/").replace("\n", " ")[:200]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/first_hour"))
    parser.add_argument("--virtual", type=int, default=0, help="rehearse on so many virtual devices")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few rounds")
    parser.add_argument("--steps", nargs="+", choices=LIMITS, default=list(LIMITS))
    options = parser.parse_args(arguments)
    virtual = options.virtual
    if not virtual:
        probe = "import torch; print(torch.accelerator.device_count())"
        found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
        virtual = 0 if int(found.stdout) else 4
        if virtual:
            print("There is no GPU here: a rehearsal on 4 virtual devices.")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    tiny = options.tiny or bool(virtual)
    environment = {"FIRST_HOUR_OUT": str(out), "FIRST_HOUR_VIRTUAL": str(virtual), "FIRST_HOUR_TINY": str(int(tiny))}
    steps = []
    for name in options.steps:
        print(f"{name} (at most {LIMITS[name]} s) ...", flush=True)
        steps.append(run(name, LIMITS[name], environment))
        (out / "results.json").write_text(json.dumps(steps, indent=1))
    kind = f"{virtual} virtual ones, a rehearsal: the times say nothing" if virtual else "those of results.json"
    (out / "results.md").write_text(table(steps, kind))
    print(f"\n{table(steps, kind)}\n{out / 'results.md'} and results.json have it: please report both.")
    wrong = [row for step in steps for row in step["rows"] if "WRONG" in str(row.get("result"))]
    return int(bool(wrong) or any(step["code"] for step in steps))


if __name__ == "__main__":
    sys.exit(main())
