// One GPU: offsets over 2^31 elements, and steps that allocate nothing.
#include <gtest/gtest.h>

#include <chrono>

#include "base/clock.h"
#include "tests/kernels/cuda/gpu_memory.h"

namespace expertd {
namespace {

OpContext Next(uint64_t sequence) {
  return {.sequence = sequence, .deadline = Clock::Real().Now() + std::chrono::seconds(50)};
}

std::unique_ptr<EpBackend> MakeEp(const std::string& backend, Device& device, int64_t tokens,
                                  int64_t hidden, int64_t experts) {
  const EpGroupConfig config = {.max_tokens_per_rank = tokens,
                                .max_recv_rows = 8 * tokens,
                                .max_hidden = hidden,
                                .max_top_k = 8,
                                .max_experts = experts};
  auto made = CreateEpBackend(backend, device, config, {});
  EXPECT_TRUE(made.ok()) << made.status();
  return *std::move(made);
}

class EpLarge : public testing::TestWithParam<std::string> {};

// 300 000 rows of 7168: each row is filled with a pattern of its token, spread and summed back.
TEST_P(EpLarge, ThreeHundredThousandRowsOfSevenThousand) {
  constexpr int64_t kTokens = 300000, kHidden = 7168, kExperts = 4, kTopK = 1;
  auto gpu = MakeGpu();
  auto ep = MakeEp(GetParam(), *gpu, kTokens, kHidden, kExperts);
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < kTokens; ++t) ids.push_back(static_cast<int32_t>(t * 7 % kExperts));
  const DeviceBuffer on_ids = Upload(*gpu, ids);
  auto handle = ep->Prepare(Next(1), {{on_ids.data(), DType::kI32, kTokens, kTopK}, kExperts, 128});
  ASSERT_TRUE(handle.ok()) << handle.status();
  const int64_t total = (*handle)->counts().total;
  ASSERT_GT(total * kHidden, int64_t{1} << 31);
  constexpr int64_t kBytes = kTokens * kHidden * 2;
  const DeviceBuffer x = *gpu->Allocate(kBytes);
  const DeviceBuffer recv = *gpu->Allocate(total * kHidden * 2);
  const DeviceBuffer y = *gpu->Allocate(kBytes);
  // Rows are marked, not filled: their first and last elements say which they are.
  ASSERT_TRUE(gpu->Zero(x.data(), kBytes).ok());
  std::vector<int64_t> probes = {0,      1,      149796, 149797,
                                 299592, 299593, 299999};  // around 2^30, 2^31
  const auto mark = [](int64_t token) { return static_cast<uint16_t>(0x3f80 + token % 64); };
  std::vector<uint16_t> row(kHidden);
  for (int64_t token : probes) {
    for (uint16_t& value : row) value = mark(token);
    ASSERT_TRUE(
        gpu->CopyToDevice(x.as<uint16_t>() + token * kHidden, row.data(), 2 * kHidden).ok());
  }
  ASSERT_TRUE(ep->Dispatch(Next(2), **handle, {x.data(), DType::kBF16, kTokens, kHidden}, nullptr,
                           {recv.data(), DType::kBF16, total, kHidden}, nullptr)
                  .ok());
  for (int64_t token : probes) {
    const int64_t expert = token * 7 % kExperts;
    int64_t slot = 0;
    for (int64_t e = 0; e < expert; ++e) {
      slot += (*handle)->counts().padded_per_expert[static_cast<size_t>(e)];
    }
    for (int64_t t = 0; t < token; ++t) slot += t * 7 % kExperts == expert ? 1 : 0;
    ASSERT_TRUE(
        gpu->CopyToHost(row.data(), recv.as<uint16_t>() + slot * kHidden, 2 * kHidden).ok());
    EXPECT_EQ(row, std::vector<uint16_t>(kHidden, mark(token))) << "token " << token;
  }
  ASSERT_TRUE(ep->Combine(Next(3), **handle, {recv.data(), DType::kBF16, total, kHidden}, nullptr,
                          {y.data(), DType::kBF16, kTokens, kHidden})
                  .ok());
  for (int64_t token : probes) {
    ASSERT_TRUE(gpu->CopyToHost(row.data(), y.as<uint16_t>() + token * kHidden, 2 * kHidden).ok());
    EXPECT_EQ(row, std::vector<uint16_t>(kHidden, mark(token))) << "token " << token;
  }
}

class EpSteady : public testing::TestWithParam<std::string> {};

TEST_P(EpSteady, StepsOfAKnownSizeAllocateNothing) {
  constexpr int64_t kTokens = 500, kHidden = 64, kExperts = 8, kTopK = 2;
  auto gpu = MakeGpu();
  auto ep = MakeEp(GetParam(), *gpu, kTokens, kHidden, kExperts);
  auto mlp = *CreateExpertMlp("", *gpu,
                              {.local_experts = kExperts, .hidden = kHidden, .intermediate = 32});
  const DeviceBuffer gate_up = Upload(*gpu, std::vector<uint16_t>(kExperts * kHidden * 64, 0));
  const DeviceBuffer down = Upload(*gpu, std::vector<uint16_t>(kExperts * 32 * kHidden, 0));
  int64_t blocks = 0;
  for (uint64_t step = 0; step < 20; ++step) {
    std::vector<int64_t> ids;
    for (int64_t t = 0; t < kTokens; ++t) {
      ids.push_back((t + static_cast<int64_t>(step)) % kExperts);
      ids.push_back((t * 3 + 1 + static_cast<int64_t>(step)) % kExperts);
      if (ids.back() == ids[ids.size() - 2]) ids.back() = -1;
    }
    const DeviceBuffer on_ids = Upload(*gpu, ids);
    const DeviceBuffer x = *gpu->Allocate(kTokens * kHidden * 2);
    auto handle = ep->Prepare(Next(4 * step + 1),
                              {{on_ids.data(), DType::kI64, kTokens, kTopK}, kExperts, 128});
    ASSERT_TRUE(handle.ok()) << handle.status();
    const RecvCounts& counts = (*handle)->counts();
    const DeviceBuffer recv = *gpu->Allocate(counts.total * kHidden * 2);
    const DeviceBuffer z = *gpu->Allocate(counts.total * kHidden * 2);
    const Matrix slots = {z.data(), DType::kBF16, counts.total, kHidden};
    const ConstMatrix tokens = {x.data(), DType::kBF16, kTokens, kHidden};
    ASSERT_TRUE(ep->Dispatch(Next(4 * step + 2), **handle, tokens, nullptr,
                             {recv.data(), DType::kBF16, counts.total, kHidden}, nullptr)
                    .ok());
    MlpForwardArgs args;
    args.segments = {&counts.tokens_per_expert, &counts.padded_per_expert, counts.total};
    args.weights.gate_up = gate_up.data();
    args.weights.down = down.data();
    args.recv_x = recv.data();
    args.z = z.data();
    ASSERT_TRUE(mlp->Forward(args).ok());
    ASSERT_TRUE(ep->Combine(Next(4 * step + 3), **handle, slots, nullptr,
                            {x.data(), DType::kBF16, kTokens, kHidden})
                    .ok());
    if (step == 2) blocks = gpu->block_allocations();
  }
  EXPECT_EQ(gpu->block_allocations(), blocks);
}

const auto kBackends = testing::Values("nccl", "nccl_lsa");
INSTANTIATE_TEST_SUITE_P(Gpu, EpLarge, kBackends, [](const auto& info) { return info.param; });
INSTANTIATE_TEST_SUITE_P(Gpu, EpSteady, kBackends, [](const auto& info) { return info.param; });

}  // namespace
}  // namespace expertd
