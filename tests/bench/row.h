// One measurement as a JSON row, with the floor it is compared with.
#ifndef TESTS_BENCH_ROW_H_
#define TESTS_BENCH_ROW_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "tests/bench/workload.h"

namespace expertd::bench {

// What the machine can do at best; measured ones for this machine, or given by flags.
struct Ceilings {
  double wire_gbps = 0;    // one direction between two ranks
  double memory_gbps = 0;  // bytes read plus written
  double tflops = 0;       // dense matrix product in the benchmark's dtype; 0: unknown
  double latency_us = 0;   // a small message from one rank to another; 0: unknown
};

// Bytes and operations of one operation on the busiest rank.
struct Work {
  double wire_bytes = 0;
  double memory_bytes = 0;
  double flops = 0;
  double messages = 0;  // between ranks, each waiting for the one before
};

struct Row {
  Workload workload;
  std::string op;
  std::string backend;
  std::string mlp;
  int64_t world = 1;
  DType dtype = DType::kBF16;
  std::vector<double> samples_us;
  Work work;
  bool correct = false;
  DeviceFacts device;
  int64_t sms = 0;  // that communication may use; 0: not on a GPU
  std::string commit;
};

// The largest of the four times, in microseconds; 0 when no ceiling for its work is known.
double FloorMicros(const Work& work, const Ceilings& ceilings);

// Work of the named operation ("prepare", "dispatch", "experts", "combine", "forward",
// "forward_backward") on the busiest rank.
Work WorkOf(const std::string& op, const Workload& workload, const Traffic& traffic, DType dtype);

std::string ToJson(const Row& row, const Ceilings& ceilings);

}  // namespace expertd::bench

#endif  // TESTS_BENCH_ROW_H_
