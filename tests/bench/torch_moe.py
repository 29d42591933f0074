#!/usr/bin/env python3
"""The MoE layer of expertd_bench's workloads in plain PyTorch: what a comparison is made with.

One process per GPU. Every selected (token, expert) pair is a row of its own: rows are sorted by
expert, sent with all_to_all_single, brought into expert order, multiplied with torch._grouped_mm,
sent back and added with their route weights. bf16 throughout, as a user would write it.

Prints one JSON object per line: workload, op, median_us, p10_us, p90_us, iterations. A time is that
of CUDA events on the slowest rank of each repetition. Operations:
  prepare           sort, exchange of counts, split sizes on the host
  dispatch          rows to the ranks of their experts, in expert order
  experts           gate_up, activation, down
  combine           rows back, weighted sum per token
  forward           all of these
  forward_backward  with the gradients of tokens, route weights and expert weights

Usage: torch_moe.py [--world N] [--workloads a,b] [--iterations N] [--routing_dir FOLDER]
With --routing_dir the routing is read that expertd_bench --routing_dir wrote; otherwise each token
chooses its experts uniformly.
"""
import argparse
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F


@dataclass(frozen=True)
class Workload:
    hidden: int
    intermediate: int
    experts_per_rank: int
    top_k: int
    tokens_per_rank: int


# As in tests/bench/workload.cc.
WORKLOADS = {
    "deepseek_4k": Workload(7168, 2048, 32, 8, 4096),
    "deepseek_8k": Workload(7168, 2048, 32, 8, 8192),
    "deepseek_8k_skew": Workload(7168, 2048, 32, 8, 8192),
    "mixtral_8k": Workload(4096, 14336, 4, 2, 8192),
    "qwen3moe_8k": Workload(2048, 768, 64, 8, 8192),
    "decode_128": Workload(7168, 2048, 32, 8, 128),
}


class Exchange(torch.autograd.Function):
    """Rows to other ranks; backward sends their gradients the other way."""

    @staticmethod
    def forward(ctx, rows, sizes_in, sizes_out):
        ctx.sizes = sizes_in, sizes_out
        received = rows.new_empty(sum(sizes_out), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), sizes_out, sizes_in)
        return received

    @staticmethod
    def backward(ctx, gradient):
        sizes_in, sizes_out = ctx.sizes
        sent = gradient.new_empty(sum(sizes_in), gradient.shape[1])
        dist.all_to_all_single(sent, gradient.contiguous(), sizes_in, sizes_out)
        return sent, None, None


@dataclass
class Plan:
    """Where rows go: made by prepare, used by the rest."""

    by_expert: torch.Tensor  # [T*K] routes in the order they are sent
    to_ranks: list  # rows for each rank
    from_ranks: list
    regroup: torch.Tensor  # received rows in the order of this rank's experts
    ends: torch.Tensor  # [local experts] i32: where each expert's rows end


class Layer:
    def __init__(self, workload, rank, world, routing):
        self.w, self.world = workload, world
        random = torch.Generator("cuda").manual_seed(1000 + rank)
        shape = workload.tokens_per_rank, workload.top_k

        def normal(*size, scale=1.0):
            return torch.randn(*size, device="cuda", generator=random).mul_(scale).bfloat16()

        if routing is not None:
            self.ids, self.weights = routing
        else:
            experts = workload.experts_per_rank * world
            score = torch.rand(shape[0], experts, device="cuda", generator=random)
            self.ids = score.topk(shape[1]).indices
            self.weights = torch.rand(shape, device="cuda", generator=random)
            self.weights /= self.weights.sum(1, keepdim=True)
        local, hidden, inner = workload.experts_per_rank, workload.hidden, workload.intermediate
        self.x = normal(shape[0], hidden)
        self.gate_up = normal(local, hidden, 2 * inner, scale=hidden**-0.5)
        self.down = normal(local, inner, hidden, scale=inner**-0.5)
        self.gradient = normal(shape[0], hidden)
        self.leaves = [self.x, self.weights, self.gate_up, self.down]

    def prepare(self):
        local = self.w.experts_per_rank
        chosen = self.ids.flatten()
        by_expert = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=local * self.world)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        received = received.view(self.world, local)
        # Both splits in one copy: the host waits once.
        splits = torch.stack([sent.view(self.world, local).sum(1), received.sum(1)]).tolist()
        expert_of_row = torch.arange(local, device="cuda").repeat(self.world)
        expert_of_row = expert_of_row.repeat_interleave(received.flatten(), output_size=sum(splits[1]))
        ends = received.sum(0).cumsum(0).int()
        return Plan(by_expert, splits[0], splits[1], expert_of_row.argsort(stable=True), ends)

    def dispatch(self, plan):
        rows = self.x[plan.by_expert // self.w.top_k]
        return Exchange.apply(rows, plan.to_ranks, plan.from_ranks)[plan.regroup]

    def experts(self, rows, plan):
        gate, up = torch._grouped_mm(rows, self.gate_up, offs=plan.ends).chunk(2, 1)
        return torch._grouped_mm(F.silu(gate) * up, self.down, offs=plan.ends)

    def combine(self, rows, plan):
        as_received = torch.empty_like(rows).index_copy(0, plan.regroup, rows)
        as_sent = Exchange.apply(as_received, plan.from_ranks, plan.to_ranks)
        by_token = torch.empty_like(as_sent).index_copy(0, plan.by_expert, as_sent)
        by_token = by_token.view(self.w.tokens_per_rank, self.w.top_k, -1)
        return (by_token * self.weights.unsqueeze(2).bfloat16()).sum(1)

    def forward(self):
        plan = self.prepare()
        return self.combine(self.experts(self.dispatch(plan), plan), plan)

    def forward_backward(self):
        for leaf in self.leaves:
            leaf.grad = None
        self.forward().backward(self.gradient)


def measure(work, iterations):
    """Sorted microseconds of the slowest rank in each repetition."""
    for _ in range(5):
        work()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iterations)]
    for begin, end in events:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    times = torch.tensor([1e3 * begin.elapsed_time(end) for begin, end in events], device="cuda")
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return sorted(times.tolist())


def read_routing(folder, name, rank, workload):
    if folder is None:
        return None
    routes = workload.tokens_per_rank * workload.top_k
    data = (Path(folder) / f"{name}.{rank}").read_bytes()
    assert len(data) == 12 * routes, f"{name}.{rank}: got {len(data)} bytes, need {12 * routes}"
    shape = workload.tokens_per_rank, workload.top_k
    ids = numpy.frombuffer(data, "<i8", routes).reshape(shape).copy()
    weights = numpy.frombuffer(data, "<f4", routes, 8 * routes).reshape(shape).copy()
    return torch.from_numpy(ids).cuda(), torch.from_numpy(weights).cuda()


def run(rank, args, names):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=args.world, device_id=torch.device("cuda", rank))
    for name in names:
        workload = WORKLOADS[name]
        layer = Layer(workload, rank, args.world, read_routing(args.routing_dir, name, rank, workload))
        times = {}
        with torch.no_grad():
            plan = layer.prepare()
            rows = layer.dispatch(plan)
            out = layer.experts(rows, plan)
            times["prepare"] = measure(layer.prepare, args.iterations)
            times["dispatch"] = measure(lambda: layer.dispatch(plan), args.iterations)
            times["experts"] = measure(lambda: layer.experts(rows, plan), args.iterations)
            times["combine"] = measure(lambda: layer.combine(out, plan), args.iterations)
            times["forward"] = measure(layer.forward, args.iterations)
        del rows, out
        for leaf in layer.leaves:
            leaf.requires_grad_()
        times["forward_backward"] = measure(layer.forward_backward, args.iterations)
        for op, sorted_us in times.items():
            at = [round(sorted_us[int(f * (len(sorted_us) - 1) + 0.5)], 1) for f in (0.5, 0.1, 0.9)]
            row = {"workload": name, "op": op, "median_us": at[0], "p10_us": at[1], "p90_us": at[2],
                   "iterations": args.iterations, "torch": torch.__version__}
            if rank == 0:
                print(json.dumps(row), flush=True)
        del layer
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--routing_dir")
    args = parser.parse_args()
    names = args.workloads.split(",")
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        parser.error(f"--workloads: got {unknown}, need some of {list(WORKLOADS)}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        args.port = free.getsockname()[1]
    torch.multiprocessing.spawn(run, (args, names), nprocs=args.world)


if __name__ == "__main__":
    main()
