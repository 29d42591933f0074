// The benchmark's workloads: layer sizes, tokens and how evenly they choose their experts.
#ifndef TESTS_BENCH_WORKLOAD_H_
#define TESTS_BENCH_WORKLOAD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/types.h"

namespace expertd::bench {

struct Workload {
  std::string name;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t experts_per_rank = 0;
  int64_t top_k = 0;
  int64_t tokens_per_rank = 0;
  double skew = 0;  // 0: uniform; otherwise the spread of the experts' popularity
};

// The named GPU workloads, and small ones of the same shapes that a CPU finishes.
const std::vector<Workload>& AllWorkloads();

// One rank's routing: ids [T, K] distinct in a row, weights [T, K] that sum to 1. Deterministic in
// (rank, seed).
struct Routing {
  std::vector<int64_t> ids;
  std::vector<float> weights;
};
Routing MakeRouting(const Workload& workload, int64_t world, int64_t rank, uint64_t seed);

// Where every route lands: for rank r, slots[r][t * K + k] is its row at the rank that owns the
// expert. Written from the definition of the slot order, independently of any backend.
std::vector<std::vector<int64_t>> SlotsOf(const Workload& workload, int64_t alignment,
                                          const std::vector<Routing>& by_rank);

// Exact counts of one routing: bytes and operations are derived from these.
struct Traffic {
  int64_t rows_sent = 0;      // (token, remote rank) pairs of the busiest rank, leaving it
  int64_t rows_received = 0;  // routes at the rank that receives most, without padding
};
Traffic CountTraffic(const Workload& workload, const std::vector<Routing>& by_rank);

}  // namespace expertd::bench

#endif  // TESTS_BENCH_WORKLOAD_H_
