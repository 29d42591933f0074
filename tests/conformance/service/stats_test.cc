// What steps tell about themselves: durations that can be true, a first step without surprises, and
// the way between the ranks.
#include <algorithm>
#include <vector>

#include "tests/conformance/service/service_test.h"

namespace expertd::conformance {
namespace {

struct Shape {
  int64_t tokens = 48;  // per rank
  int64_t hidden = 64;
  int64_t intermediate = 48;
  int64_t local_experts = 4;
};
constexpr int64_t kTopK = 2;

// Large enough on a GPU for its products to take longer than queueing them.
Shape ShapeFor(const testing::ServiceShape& shape) {
  if (shape.on_gpu()) return {.tokens = 1024, .hidden = 2048, .intermediate = 2048};
  return {};
}

v1::GroupConfig GroupFor(v1::GroupConfig config, const Shape& shape) {
  config.set_max_tokens_per_rank(std::max(config.max_tokens_per_rank(), shape.tokens));
  config.set_max_hidden(std::max(config.max_hidden(), shape.hidden));
  return config;
}

std::vector<v1::ForwardRequest> Requests(int64_t world, const Shape& shape,
                                         const std::string& layer_id) {
  std::vector<v1::ForwardRequest> requests(static_cast<size_t>(world));
  const int64_t experts = shape.local_experts * world;
  for (int64_t rank = 0; rank < world; ++rank) {
    std::vector<float> x;
    std::vector<int64_t> ids;
    for (int64_t t = 0; t < shape.tokens; ++t) {
      for (int64_t h = 0; h < shape.hidden; ++h) {
        x.push_back(static_cast<float>((t * 31 + h * 7 + rank) % 17 - 8) / 8.0f);
      }
      ids.push_back((t + rank) % experts);
      ids.push_back((t + rank + experts / 2) % experts);
    }
    v1::ForwardRequest& request = requests[static_cast<size_t>(rank)];
    request.set_layer_id(layer_id);
    *request.mutable_tokens() = client::FloatTensor(v1::DTYPE_F32, {shape.tokens, shape.hidden}, x);
    *request.mutable_topk()->mutable_topk_ids() = client::Int64Tensor({shape.tokens, kTopK}, ids);
    *request.mutable_topk()->mutable_topk_weights() = client::FloatTensor(
        v1::DTYPE_F32, {shape.tokens, kTopK}, std::vector<float>(ids.size(), 0.5f));
  }
  return requests;
}

int64_t StagesOf(const v1::StepStats& stats) {
  return stats.stage_in_us() + stats.prepare_us() + stats.dispatch_us() + stats.experts_us() +
         stats.combine_us() + stats.stage_out_us();
}

int64_t OwnTime(const v1::StepStats& stats) { return stats.total_us() - stats.arrival_us(); }

// No device of today multiplies f32 faster than that.
constexpr double kFlopsPerMicro = 80e6;

TEST_P(ServiceTest, StagesAddUpAndExpertsTakeNoLessThanTheirArithmetic) {
  const Shape shape = ShapeFor(GetParam());
  UseGroup(GroupFor(DefaultGroup(), shape));
  const std::string layer_id = MakeLayer(
      SmallLayer(shape.local_experts * world(), kTopK, shape.hidden, shape.intermediate), 3);
  ASSERT_FALSE(HasFailure());
  const auto requests = Requests(world(), shape, layer_id);
  for (int step = 0; step < 3; ++step) {
    for (const v1::ForwardResponse& response : Run(requests)) {
      const v1::StepStats& stats = response.stats();
      SCOPED_TRACE(stats.ShortDebugString());
      int64_t rows = 0;
      for (const int64_t count : stats.tokens_per_expert()) rows += count;
      ASSERT_EQ(rows, shape.tokens * kTopK);
      const double flops = 6.0 * static_cast<double>(rows) * static_cast<double>(shape.hidden) *
                           static_cast<double>(shape.intermediate);
      EXPECT_GE(static_cast<double>(stats.experts_us()), flops / kFlopsPerMicro - 1);
      EXPECT_LE(StagesOf(stats), OwnTime(stats));
      // What is in no stage is small: checks before arrival and bookkeeping after it.
      EXPECT_GE(StagesOf(stats) + 5000, OwnTime(stats) / 2);
    }
  }
}

// GPUs load code when it first runs; the CPU has nothing of the kind, and other tests beside it.
TEST_P(ServiceTest, TheFirstForwardTakesNotMuchLongerThanLaterOnes) {
  if (!GetParam().on_gpu()) GTEST_SKIP() << "only GPUs have something to load";
  const Shape shape;
  const std::string layer_id = MakeLayer(
      SmallLayer(shape.local_experts * world(), kTopK, shape.hidden, shape.intermediate), 3);
  ASSERT_FALSE(HasFailure());
  const auto requests = Requests(world(), shape, layer_id);
  std::vector<int64_t> times;  // of the slowest rank
  for (int step = 0; step < 9; ++step) {
    int64_t slowest = 0;
    for (const v1::ForwardResponse& response : Run(requests)) {
      slowest = std::max(slowest, OwnTime(response.stats()));
    }
    times.push_back(slowest);
  }
  const int64_t first = times.front();
  std::sort(times.begin() + 1, times.end());
  const int64_t usual = times[times.size() / 2];
  RecordProperty("first_us", static_cast<int>(first));
  RecordProperty("usual_us", static_cast<int>(usual));
  // A machine under load may stop a step for a while: only a large and a relative difference count.
  EXPECT_LE(first, 5 * usual + 20000) << "usual " << usual;
}

TEST_P(ServiceTest, EveryRankSaysHowItReachesTheOthers) {
  std::vector<std::string> allowed;
  switch (GetParam().backend) {
    case testing::Backend::kLoopback:
      allowed = {"loopback"};
      break;
    case testing::Backend::kGloo:
      allowed = {"gloo tcp"};
      break;
    case testing::Backend::kNccl:
      allowed = {"nvlink p2p", "p2p pcie", "shm"};
      break;
    case testing::Backend::kNcclNetwork:
      allowed = {"network"};
      break;
  }
  for (int64_t rank = 0; rank < world(); ++rank) {
    const auto group = service().rank(rank).Call(v1::DescribeGroupRequest(), testing::Soon());
    ASSERT_OK(group);
    ASSERT_EQ(group->group().transports_size(), world());
    for (const v1::PeerTransport& way : group->group().transports()) {
      if (way.rank() == rank) {
        EXPECT_EQ(way.transport(), "self");
        continue;
      }
      EXPECT_NE(std::find(allowed.begin(), allowed.end(), way.transport()), allowed.end())
          << way.ShortDebugString();
      RecordProperty("transport", way.transport());
    }
  }
}

TEST_P(ServiceTest, ServerInfoNamesWhatTheDeviceRunsWith) {
  for (int64_t rank = 0; rank < world(); ++rank) {
    const auto info = service().rank(rank).Call(v1::GetServerInfoRequest(), testing::Soon());
    ASSERT_OK(info);
    const v1::DeviceInfo& device = info->device();
    EXPECT_EQ(device.kind(), GetParam().on_gpu() ? "cuda" : "cpu");
    EXPECT_NE(info->shared_memory_bytes(), 0);
    for (const bool empty : {device.uuid().empty(), device.pci_bus_id().empty(),
                             device.cuda_driver().empty(), device.cuda_runtime().empty(),
                             device.nccl_version().empty(), device.multiprocessors() == 0}) {
      EXPECT_EQ(empty, !GetParam().on_gpu()) << device.ShortDebugString();
    }
    if (GetParam().on_gpu()) {
      EXPECT_GE(device.peers_size(), world() - 1);
    }
  }
}

}  // namespace
}  // namespace expertd::conformance
