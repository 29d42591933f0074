#!/usr/bin/env python3
"""expertd_bench and the PyTorch layer of torch_moe.py, in turns on the same GPUs and routing: one table.

Usage: compare_torch.py [--rounds N] [--workloads a,b] [--iterations N] [--json] [-- BENCH_ARGS]
Each round runs ours and then PyTorch for every workload, so that both see the same clocks and
temperature; a cell is the median over rounds of each run's median, and the ratio is PyTorch's time
over ours (above 1: ours is faster). BENCH_ARGS go to expertd_bench, for instance ceilings.

Ours is wall time with the wait for the device, checked results first; PyTorch's is device time
between events. Ours accumulates weight gradients in f32, PyTorch's makes fresh bf16 ones.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
OPS = ("prepare", "dispatch", "experts", "combine", "forward", "forward_backward")
WORKLOADS = "deepseek_4k,deepseek_8k,deepseek_8k_skew,mixtral_8k,qwen3moe_8k,decode_128"


def find_bench():
    for place in (HERE / "bin" / "expertd_bench", HERE.parents[1] / "build" / "release" / "expertd_bench"):
        if place.exists():
            return place
    sys.exit("compare_torch: there is no expertd_bench; run ./dev build, or this from a bundle")


def rows_of(command, tool):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode or not rows:
        sys.exit(f"compare_torch: {tool} failed with {result.returncode}: {result.stderr[-2000:]}")
    wrong = [f"{row['workload']} {row['op']}" for row in rows if not row.get("correct", True)]
    if wrong:
        sys.exit(f"compare_torch: wrong results, not compared: {', '.join(wrong)}")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workloads", default=WORKLOADS)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("bench_args", nargs="*")
    args = parser.parse_args()
    common = ["--world", args.world, "--iterations", args.iterations]
    times = {}  # (workload, op, tool) -> medians of the rounds
    floors, about = {}, {}
    with tempfile.TemporaryDirectory() as routing:
        for _ in range(args.rounds):
            for name in args.workloads.split(","):
                ours = [find_bench(), "--device", "cuda", "--json", "--workloads", name, "--routing_dir", routing]
                torch = [sys.executable, HERE / "torch_moe.py", "--workloads", name, "--routing_dir", routing]
                for tool, command in (("ours", ours + common + args.bench_args), ("torch", torch + common)):
                    for row in rows_of(command, tool):
                        times.setdefault((name, row["op"], tool), []).append(row["median_us"])
                        if tool == "ours":
                            floors[name, row["op"]] = row["floor_us"]
                            about = {key: row[key] for key in ("device", "driver", "cuda", "nccl", "commit", "mlp", "backend")}
                        else:
                            about_torch = row["torch"]
    print_table(args, {key: statistics.median(values) for key, values in times.items()}, floors, {**about, "torch": about_torch})


def print_table(args, times, floors, about):
    cells = []
    for name in args.workloads.split(","):
        for op in OPS:
            ours, torch = times[name, op, "ours"], times[name, op, "torch"]
            cells.append({"workload": name, "op": op, "ours_us": ours, "torch_us": torch,
                          "ratio": round(torch / ours, 3), "floor_us": floors[name, op], "rounds": args.rounds, **about})
    if args.json:
        for cell in cells:
            print(json.dumps(cell))
        return
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"{'workload':<18}{'operation':<18}{'ours us':>10}{'torch us':>10}{'ratio':>8}{'floor us':>10}")
    for cell in cells:
        floor = "-" if cell["floor_us"] is None else f"{cell['floor_us']:.1f}"
        print(f"{cell['workload']:<18}{cell['op']:<18}{cell['ours_us']:>10.1f}{cell['torch_us']:>10.1f}{cell['ratio']:>8.2f}{floor:>10}")


if __name__ == "__main__":
    main()
