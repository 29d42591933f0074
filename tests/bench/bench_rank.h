// One rank of a benchmark: its device, backend, experts and buffers, and the operations timed on
// it.
#ifndef TESTS_BENCH_BENCH_RANK_H_
#define TESTS_BENCH_BENCH_RANK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backends.h"
#include "tests/bench/workload.h"

namespace expertd::bench {

struct RankOptions {
  std::string device = "cpu";
  std::string backend = "loopback";
  std::string mlp;
  DType dtype = DType::kBF16;
  int64_t alignment = 1;
  int64_t comm_sms = 0;  // 0: automatic
  int64_t rank = 0;
  int64_t world = 1;
  uint64_t seed = 1;
};

class BenchRank {
 public:
  // Collective: forms the communicator and fills all buffers with random data.
  static absl::StatusOr<std::unique_ptr<BenchRank>> Create(const RankOptions& options,
                                                           const Workload& workload,
                                                           const Routing& routing,
                                                           const EpBootstrap& bootstrap);

  // The timed operations; collective, in any order after Prepare. Each waits for the device.
  absl::Status Prepare();
  // `count` of them, one queued behind the other; only the last is waited for.
  absl::Status PrepareBurst(int count);
  absl::Status DispatchBurst(int count);
  absl::Status CombineBurst(int count);
  absl::Status RoundTripBurst(int count);  // each prepares, dispatches and combines
  absl::Status Dispatch();
  absl::Status Experts();
  absl::Status Combine();
  absl::Status Forward();   // all of the above in order
  absl::Status Backward();  // of the last Forward, into f32 accumulators

  // Whether the buffers of the last Forward are right, before anything is timed: dispatched rows
  // bit for bit; expert outputs in a row of every seventh expert; combined rows of sampled tokens,
  // whose expert outputs are read from all ranks. Not collective; `ranks` in rank order.
  absl::StatusOr<bool> CheckDispatch(const std::vector<Routing>& by_rank);
  absl::StatusOr<bool> CheckExperts();
  absl::StatusOr<bool> CheckCombine(const std::vector<Routing>& by_rank,
                                    const std::vector<std::unique_ptr<BenchRank>>& ranks);

  const Device& device() const { return *device_; }
  const EpHandle& handle() const { return *handle_; }
  std::string_view mlp() const { return mlp_->name(); }

 private:
  explicit BenchRank(RankOptions options, Workload workload)
      : options_(std::move(options)), workload_(std::move(workload)) {}

  absl::Status Allocate(const Routing& routing);
  absl::Status FillRandom(DeviceBuffer& buffer, int64_t count, float scale, uint64_t seed);
  absl::Status WaitForDevice();
  absl::Status QueuePrepare();
  absl::Status QueueDispatch();
  absl::Status QueueCombine();
  OpContext NextContext();
  ExpertSegments Segments() const;
  Matrix Rows(DeviceBuffer& buffer, int64_t rows, int64_t cols) const;
  absl::StatusOr<std::vector<float>> ReadRow(const DeviceBuffer& buffer, int64_t row, int64_t cols);

  RankOptions options_;
  Workload workload_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<EpBackend> ep_;
  std::unique_ptr<ExpertMlp> mlp_;
  std::unique_ptr<EpHandle> handle_;
  uint64_t sequence_ = 0;
  int64_t capacity_ = 0;
  MlpWeights weights_;
  DeviceBuffer tokens_, ids_, topk_weights_, gate_up_, down_;
  DeviceBuffer recv_x_, recv_w_, h_, z_, y_;
  DeviceBuffer grad_y_, grad_out_, grad_h_, grad_recv_x_, grad_w_, grad_x_, grad_topk_;
  DeviceBuffer grad_gate_up_, grad_down_;
};

// Value of element i of the token row (rank, token): what dispatch is checked against. Exact in
// every dtype.
float TokenValue(int64_t rank, int64_t token, int64_t column);

}  // namespace expertd::bench

#endif  // TESTS_BENCH_BENCH_RANK_H_
