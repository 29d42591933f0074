// The operations that `expertctl bench` times, on a temporary layer of a live group.
#ifndef CLIENT_EXPERTCTL_BENCH_OPS_H_
#define CLIENT_EXPERTCTL_BENCH_OPS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/step_driver.h"

namespace expertd::expertctl {

struct BenchSpec {
  std::string layer_id;
  v1::LayerConfig config;
  int64_t tokens = 0;  // Per rank.
  uint64_t seed = 1;
  client::StepDriver* driver = nullptr;
};

// One operation of all ranks; `run` is called again and again. What it needs beforehand was
// prepared when it was made; deleting the layer frees that.
struct BenchOp {
  std::string name;
  std::function<absl::Status()> run;
  int64_t request_bytes = 0;  // Payload of all ranks to the service and back.
  int64_t response_bytes = 0;
};

// Deletes the tensors that the operations keep on the ranks; those that are not there are no error.
absl::Status DeleteBenchTensors(const std::vector<client::RankClient*>& ranks);

// "ping" (GetServerInfo at all ranks), "prepare_release", "dispatch", "combine",
// "dispatch_backward", "combine_backward", "forward", "forward_backward"; "forward_resident", the
// same with all its tensors on the ranks; "put_tensor" and "get_tensor", 64 MiB to rank 0 and back.
// Every operation has run once, so that a wrong one fails here. Errors: those of the operations.
absl::StatusOr<std::vector<BenchOp>> MakeBenchOps(const BenchSpec& spec,
                                                  const std::vector<client::RankClient*>& ranks);

}  // namespace expertd::expertctl

#endif  // CLIENT_EXPERTCTL_BENCH_OPS_H_
