// CudaDevice: facts, copies of any size, the pool, and what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

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
  EXPECT_EQ(reason(ListEpBackends(*device), "nccl_lsa"), "not available yet");
  EXPECT_THAT(reason(ListEpBackends(*device), "gloo"), testing::HasSubstr("cpu"));
  EXPECT_EQ(reason(ListExpertMlps(*device), "cublaslt"), "supported");
  EXPECT_EQ(reason(ListRecipes(*device), "bf16"), "supported");
  EXPECT_EQ(reason(ListRecipes(*device), "fp8_current"), "not available yet");
  EXPECT_THAT(reason(ListRecipes(*device), "nvfp4"), testing::HasSubstr("10.0"));
  EXPECT_EQ(DefaultEpBackend(*device), "nccl");
  EXPECT_EQ(
      (*CreateExpertMlp("", *device, {.local_experts = 1, .hidden = 8, .intermediate = 8}))->name(),
      "cublaslt");
}

}  // namespace
}  // namespace expertd
