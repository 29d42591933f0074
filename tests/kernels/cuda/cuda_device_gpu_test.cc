// CudaDevice: facts, copies of any size, the pool, and what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "base/clock.h"
#include "base/error.h"
#include "kernels/cuda/cuda_device.h"
#include "tests/kernels/cuda/gpu_memory.h"

namespace expertd {
namespace {

TEST(CudaDevice, FactsNameTheGpu) {
  auto device = MakeGpu();
  const DeviceFacts& facts = device->facts();
  EXPECT_EQ(facts.kind, "cuda");
  EXPECT_FALSE(facts.name.empty());
  EXPECT_TRUE(facts.uuid.starts_with("GPU-")) << facts.uuid;
  EXPECT_EQ(facts.uuid.size(), 40u);
  EXPECT_NE(facts.pci_bus_id.find(':'), std::string::npos);
  EXPECT_EQ(facts.compute_capability, "9.0");
  EXPECT_GT(facts.memory_bytes, int64_t{1} << 30);
  EXPECT_GT(facts.multiprocessors, 0);
  for (const std::string& version : {facts.cuda_driver, facts.cuda_runtime, facts.nccl_version}) {
    EXPECT_NE(version.find('.'), std::string::npos) << version;
  }
  for (const DevicePeer& peer : facts.peers) {
    EXPECT_NE(peer.ordinal, facts.ordinal);
    EXPECT_NE(peer.uuid, facts.uuid);
    EXPECT_TRUE(peer.access || !peer.nvlink);
  }
}

// The host queues the work in microseconds: only the device's own time has these bounds.
TEST(CudaDevice, MarksMeasureTheDevicesTimeAndNotTheHosts) {
  auto made = CudaDevice::Create(0);
  ASSERT_TRUE(made.ok()) << made.status();
  CudaDevice& device = **made;
  constexpr int64_t kBytes = int64_t{2} << 30;
  const DeviceBuffer buffer = *device.Allocate(kBytes);
  const auto write = [&](int times) {
    for (int i = 0; i < times; ++i) {
      ASSERT_EQ(cudaMemsetAsync(buffer.data(), i, kBytes, device.stream()), cudaSuccess);
    }
  };
  write(1);
  ASSERT_TRUE(device.Drain().ok());
  for (int round = 0; round < 2; ++round) {
    device.ForgetMarks();
    const SteadyTime start = Clock::Real().Now();
    ASSERT_EQ(*device.Mark(), 0);
    write(2);
    ASSERT_EQ(*device.Mark(), 1);
    write(6);
    ASSERT_EQ(*device.Mark(), 2);
    const double queued = ToMicros(Clock::Real().Now() - start);
    const double first = *device.MicrosBetween(0, 1);
    const double second = *device.MicrosBetween(1, 2);
    const double all = ToMicros(Clock::Real().Now() - start);
    // No memory takes 10 TB/s.
    EXPECT_GT(first, 2.0 * static_cast<double>(kBytes) / 10e6);
    EXPECT_GT(second, 6.0 * static_cast<double>(kBytes) / 10e6);
    EXPECT_LT(queued, first + second);
    EXPECT_LE(first + second, all);
    EXPECT_NEAR(*device.MicrosBetween(0, 2), first + second, 2);
  }
}

TEST(CudaDevice, MarksAreReused) {
  auto made = CudaDevice::Create(0);
  ASSERT_TRUE(made.ok()) << made.status();
  for (int round = 0; round < 1000; ++round) {
    (*made)->ForgetMarks();
    for (int64_t i = 0; i < 20; ++i) ASSERT_EQ(*(*made)->Mark(), i);
    ASSERT_GE(*(*made)->MicrosBetween(0, 19), 0);
  }
}

TEST(CudaDevice, CopiesOfEverySizeComeBack) {
  auto device = MakeGpu();
  for (int64_t bytes : {0, 1, 255, 4 << 20, (4 << 20) + 1, (8 << 20) - 3, (21 << 20) + 7}) {
    std::vector<uint8_t> values(static_cast<size_t>(bytes));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint8_t>(i * 31 + i / 4096);
    const DeviceBuffer first = Upload(*device, values);
    const DeviceBuffer second = *device->Allocate(bytes);
    ASSERT_TRUE(device->CopyOnDevice(second.data(), first.data(), bytes).ok());
    ASSERT_TRUE(device->Zero(first.data(), bytes).ok());
    EXPECT_EQ(Download<uint8_t>(*device, second), values) << bytes;
    EXPECT_EQ(Download<uint8_t>(*device, first), std::vector<uint8_t>(values.size(), 0)) << bytes;
  }
}

TEST(CudaDevice, ThePoolGivesBlocksAgain) {
  auto device = MakeGpu();
  void* first = nullptr;
  {
    const DeviceBuffer buffer = *device->Allocate(1000);
    first = buffer.data();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 256, 0u);
  }
  const int64_t blocks = device->block_allocations();
  for (int64_t bytes : {1000, 900, 1024}) {
    const DeviceBuffer buffer = *device->Allocate(bytes);
    EXPECT_EQ(buffer.data(), first);
  }
  EXPECT_EQ(device->block_allocations(), blocks);
  EXPECT_NE(device->Allocate(0)->data(), nullptr);
}

TEST(CudaDevice, MoreThanTheCardHoldsIsRefusedAndTheDeviceWorksOn) {
  auto device = MakeGpu();
  for (int64_t bytes : {device->facts().memory_bytes + 1, device->facts().memory_bytes - 4096}) {
    const absl::Status status = device->Allocate(bytes).status();
    EXPECT_TRUE(HasReason(status, Reason::kMemoryBudget)) << status;
  }
  EXPECT_TRUE(device->Allocate(1 << 20).ok());
}

TEST(CudaDevice, UnknownOrdinalsAreRefused) {
  const absl::Status status = CreateDevice("cuda:999").status();
  EXPECT_TRUE(HasReason(status, Reason::kBackendUnsupported)) << status;
  EXPECT_TRUE(HasReason(CreateDevice("cuda:x").status(), Reason::kBackendUnsupported));
}

TEST(CudaDevice, AGuardEndsAWaitForTheDevice) {
  struct Refuse final : public WaitGuard {
    absl::Status Check() override { return Error(Reason::kCancelled).Text("enough"); }
  } guard;
  auto made = CudaDevice::Create(0);
  ASSERT_TRUE(made.ok());
  CudaDevice& device = **made;
  const DeviceBuffer from = *device.Allocate(int64_t{4} << 30);
  const DeviceBuffer to = *device.Allocate(int64_t{4} << 30);
  device.AddGuard(&guard);
  EXPECT_TRUE(
      HasReason(device.CopyOnDevice(to.data(), from.data(), from.size()), Reason::kCancelled));
  device.RemoveGuard(&guard);
  EXPECT_TRUE(device.Drain().ok());
}

TEST(CudaBackends, AGpuListsWhatItServesAndWhyNot) {
  auto device = MakeGpu();
  const auto reason = [](const std::vector<Support>& list, std::string_view name) {
    for (const Support& support : list) {
      if (support.name == name) return support.supported ? "supported" : support.reason;
    }
    return std::string("not listed");
  };
  EXPECT_EQ(reason(ListEpBackends(*device), "nccl"), "supported");
  EXPECT_EQ(reason(ListEpBackends(*device), "nccl_lsa"), "supported");
  EXPECT_THAT(reason(ListEpBackends(*device), "gloo"), testing::HasSubstr("cpu"));
  EXPECT_EQ(reason(ListExpertMlps(*device), "cublaslt"), "supported");
  EXPECT_EQ(reason(ListExpertMlps(*device), "sm90"), "supported");
  EXPECT_EQ(reason(ListRecipes(*device), "bf16"), "supported");
  EXPECT_EQ(reason(ListRecipes(*device), "f16"), "supported");
  EXPECT_EQ(reason(ListRecipes(*device), "f32"), "supported");
  EXPECT_THAT(reason(ListRecipes(*device), "fp8_current"), testing::HasSubstr("not built yet"));
  EXPECT_THAT(reason(ListRecipes(*device), "nvfp4"), testing::HasSubstr("10.0"));
  EXPECT_EQ(DefaultEpBackend(*device), "nccl");
  MlpConfig config = {.local_experts = 1, .hidden = 8, .intermediate = 8};
  EXPECT_EQ((*CreateExpertMlp("", *device, config))->name(), "sm90");
  config.hidden = 9;
  EXPECT_EQ((*CreateExpertMlp("", *device, config))->name(), "cublaslt");
  EXPECT_EQ((*CreateExpertMlp("sm90", *device, config))->name(), "sm90");
}

}  // namespace
}  // namespace expertd
