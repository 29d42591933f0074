// Factories and support lists: what is refused, and that the refusal says why.
#include "kernels/backends.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "kernels/cpu/gloo_address.h"

namespace expertd {
namespace {

using testing::HasSubstr;

std::unique_ptr<Device> Cpu() { return *CreateDevice("cpu"); }

Support Find(const std::vector<Support>& list, std::string_view name) {
  for (const Support& support : list) {
    if (support.name == name) return support;
  }
  ADD_FAILURE() << name << " is not listed";
  return {};
}

// Answers for the other rank with a blob of its own.
class OtherProcess final : public BootstrapExchange {
 public:
  absl::StatusOr<std::vector<std::string>> AllGather(std::string_view, std::string_view blob,
                                                     SteadyTime) override {
    return std::vector<std::string>{std::string(blob), "pid 1 of host elsewhere"};
  }
};

TEST(Backends, UnknownDevicesAreRefusedByName) {
  for (const char* spec : {"", "gpu", "cuda", "CPU"}) {
    const absl::Status status = CreateDevice(spec).status();
    EXPECT_TRUE(HasReason(status, Reason::kBackendUnsupported)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("cuda:N"));
  }
}

TEST(Backends, CpuServesLoopbackGlooAndBf16) {
  auto device = Cpu();
  EXPECT_TRUE(Find(ListEpBackends(*device), "loopback").supported);
  EXPECT_TRUE(Find(ListEpBackends(*device), "gloo").supported);
  for (const char* recipe : {"bf16", "f16", "f32"}) {
    EXPECT_TRUE(Find(ListRecipes(*device), recipe).supported) << recipe;
  }
  EXPECT_TRUE(Find(ListExpertMlps(*device), "plain").supported);
  EXPECT_TRUE(Find(ListExpertMlps(*device), "onednn").supported);
  EXPECT_EQ(DefaultEpBackend(*device), "gloo");
}

TEST(Backends, WhatTheCpuCannotDoHasAReason) {
  auto device = Cpu();
  for (const char* name : {"nccl", "nccl_lsa"}) {
    EXPECT_FALSE(Find(ListEpBackends(*device), name).supported);
    EXPECT_FALSE(Find(ListEpBackends(*device), name).reason.empty());
    const absl::Status status = CreateEpBackend(name, *device, {}, {}).status();
    EXPECT_TRUE(HasReason(status, Reason::kBackendUnsupported)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(name));
  }
  EXPECT_THAT(Find(ListRecipes(*device), "fp8_current").reason, HasSubstr("8.9"));
  EXPECT_THAT(Find(ListRecipes(*device), "fp8_block").reason, HasSubstr("9.0"));
  EXPECT_THAT(Find(ListRecipes(*device), "mxfp8").reason, HasSubstr("10.0"));
  EXPECT_THAT(Find(ListRecipes(*device), "nvfp4").reason, HasSubstr("10.0"));
  for (const char* name : {"cublaslt", "sm90"}) {
    EXPECT_FALSE(Find(ListExpertMlps(*device), name).reason.empty());
  }
}

TEST(Backends, UnknownNamesListTheKnownOnes) {
  auto device = Cpu();
  const absl::Status status = CreateEpBackend("mpi", *device, {}, {}).status();
  EXPECT_TRUE(HasReason(status, Reason::kBackendUnsupported));
  EXPECT_THAT(std::string(status.message()), HasSubstr("loopback, gloo, nccl, nccl_lsa"));
}

TEST(Backends, LoopbackRefusesRanksOfOtherProcessesByName) {
  auto device = Cpu();
  OtherProcess exchange;
  const EpGroupConfig config = {.rank = 0, .world = 2, .max_recv_rows = 8};
  const absl::Status status =
      CreateEpBackend("loopback", *device, config, {.group_id = "apart", .exchange = &exchange})
          .status();
  EXPECT_TRUE(HasReason(status, Reason::kBackendUnsupported)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("loopback"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 is pid 1 of host elsewhere"));
}

TEST(Backends, LoopbackRefusesARankThatIsTaken) {
  auto device = Cpu();
  const EpGroupConfig config = {.max_recv_rows = 8};
  const EpBootstrap bootstrap = {.group_id = "taken", .epoch = 3};
  auto first = CreateEpBackend("loopback", *device, config, bootstrap);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(HasReason(CreateEpBackend("loopback", *device, config, bootstrap).status(),
                        Reason::kConfigMismatch));
  first->reset();
  EXPECT_TRUE(CreateEpBackend("loopback", *device, config, bootstrap).ok())
      << "the hub is gone with its last rank";
}

TEST(Backends, GlooNamesAnAddressItCannotListenOn) {
  auto device = Cpu();
  OtherProcess exchange;
  const absl::Status status =
      CreateEpBackend("gloo", *device, {.world = 2, .max_recv_rows = 8},
                      {.listen_host = "203.0.113.7",
                       .exchange = &exchange,
                       .deadline = Clock::Real().Now() + std::chrono::seconds(1)})
          .status();
  EXPECT_TRUE(HasReason(status, Reason::kConfigInvalid)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("203.0.113.7"));
}

TEST(Backends, BadGroupConfigsReportEveryProblem) {
  auto device = Cpu();
  const absl::Status status =
      CreateEpBackend("loopback", *device, {.max_tokens_per_rank = -1, .max_recv_rows = 0}, {})
          .status();
  EXPECT_TRUE(HasReason(status, Reason::kConfigInvalid)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("max_recv_rows_per_rank"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("max_tokens_per_rank"));
}

TEST(Backends, ExpertMlpDefaultsToOnednnAndRefusesOtherDtypes) {
  auto device = Cpu();
  MlpConfig config = {.local_experts = 1, .hidden = 4, .intermediate = 4};
  EXPECT_EQ((*CreateExpertMlp("", *device, config))->name(), "onednn");
  EXPECT_EQ((*CreateExpertMlp("plain", *device, config))->name(), "plain");
  EXPECT_TRUE(
      HasReason(CreateExpertMlp("sm90", *device, config).status(), Reason::kBackendUnsupported));
  config.token_dtype = DType::kF8E4M3FN;
  EXPECT_TRUE(HasReason(CreateExpertMlp("", *device, config).status(), Reason::kDtypeUnsupported));
}

TEST(GlooAddress, RoundTripAndEveryTruncation) {
  const std::vector<std::vector<char>> addresses = {{'a', 'b'}, {}, {'c'}};
  const std::string blob = EncodeAddresses(addresses);
  for (size_t rank = 0; rank < 3; ++rank) EXPECT_EQ(DecodeAddress(blob, rank, 3), addresses[rank]);
  for (size_t size = 0; size < blob.size(); ++size) {
    EXPECT_FALSE(DecodeAddress(blob.substr(0, size), 0, 3).has_value()) << size;
  }
  EXPECT_FALSE(DecodeAddress(blob + "x", 0, 3).has_value());
  EXPECT_FALSE(DecodeAddress(blob, 0, 2).has_value());
  EXPECT_FALSE(DecodeAddress("\xff\xff\xff\xff", 0, 1).has_value());
}

}  // namespace
}  // namespace expertd
