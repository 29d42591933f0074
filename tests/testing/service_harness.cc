// Both kinds of daemons behind one interface, and forming groups of them.
#include "tests/testing/service_harness.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/str_split.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "client/cpp/bootstrap.h"
#include "google/protobuf/util/message_differencer.h"
#include "tests/testing/daemon_group.h"
#include "tests/testing/process_group.h"

namespace expertd::testing {
namespace {

constexpr char kGroupId[] = "service-test";
// One step; the daemons' own limit, from which they answer, is shorter.
constexpr absl::Duration kStepTimeout = absl::Seconds(40);
constexpr int64_t kBaseTimeoutMs = 20000;

class DaemonObjects final : public Daemons {
 public:
  explicit DaemonObjects(std::unique_ptr<DaemonGroup> group) : group_(std::move(group)) {}
  std::vector<std::string> hosts() const override {
    std::vector<std::string> hosts;
    for (int64_t slot = 0; slot < group_->ranks(); ++slot) {
      hosts.push_back(group_->daemon(slot).address());
    }
    return hosts;
  }
  std::string Describe() override { return "daemons in this process: see its stderr\n"; }

 private:
  std::unique_ptr<DaemonGroup> group_;
};

class ProcessDaemons final : public Daemons {
 public:
  explicit ProcessDaemons(std::unique_ptr<ProcessGroup> group) : group_(std::move(group)) {}
  ~ProcessDaemons() override { group_->Stop(absl::Now() + absl::Seconds(10)); }
  std::vector<std::string> hosts() const override { return group_->hosts(); }
  std::string Describe() override { return group_->Describe(); }

 private:
  std::unique_ptr<ProcessGroup> group_;
};

// Started and ended by somebody else.
class GivenDaemons final : public Daemons {
 public:
  explicit GivenDaemons(std::vector<std::string> hosts) : hosts_(std::move(hosts)) {}
  std::vector<std::string> hosts() const override { return hosts_; }
  std::string Describe() override { return "daemons of EXPERTD_TEST_HOSTS: see their logs\n"; }

 private:
  const std::vector<std::string> hosts_;
};

}  // namespace

std::string BackendName(Backend backend) {
  switch (backend) {
    case Backend::kLoopback:
      return "loopback";
    case Backend::kGloo:
      return "gloo";
    case Backend::kNccl:
    case Backend::kNcclNetwork:
      return "nccl";
  }
  return "";
}

std::string ToString(const ServiceShape& shape) {
  return StrCat(BackendName(shape.backend),
                shape.backend == Backend::kNcclNetwork ? "_network_" : "_", shape.world);
}

absl::StatusOr<ServiceShape> ParseShape(const std::string& text) {
  constexpr int64_t kMostRanks = 64;
  for (const Backend backend :
       {Backend::kLoopback, Backend::kGloo, Backend::kNccl, Backend::kNcclNetwork}) {
    for (int64_t world = 1; world <= kMostRanks; ++world) {
      if (const ServiceShape shape{backend, world}; ToString(shape) == text) return shape;
    }
  }
  return absl::InvalidArgumentError(StrCat("shape: got \"", text,
                                           "\", need loopback_N, gloo_N, nccl_N or "
                                           "nccl_network_N with N from 1 to ",
                                           kMostRanks));
}

void PrintTo(const ServiceShape& shape, std::ostream* out) { *out << ToString(shape); }

absl::StatusOr<std::unique_ptr<Daemons>> StartDaemons(const ServiceShape& shape,
                                                      absl::Time deadline) {
  if (shape.backend == Backend::kLoopback) {
    SetLogLevel(LogLevel::kError);  // All daemons share the test's stderr.
    ASSIGN_OR_RETURN(std::unique_ptr<DaemonGroup> group,
                     DaemonGroup::StartDaemons({.ranks = shape.world}));
    return std::make_unique<DaemonObjects>(std::move(group));
  }
  if (const char* hosts = std::getenv("EXPERTD_TEST_HOSTS"); hosts != nullptr && *hosts != '\0') {
    std::vector<std::string> given = absl::StrSplit(hosts, ',');
    const auto world = static_cast<size_t>(shape.world);
    if (given.size() < world) {
      return absl::InvalidArgumentError(
          StrCat("EXPERTD_TEST_HOSTS: got ", given.size(), " daemons, need ", world));
    }
    given.resize(world);
    return std::make_unique<GivenDaemons>(std::move(given));
  }
  ProcessOptions options{.count = shape.world, .flags = {"--cpu_threads", "1"}};
  if (shape.on_gpu()) options.flags = {"--device", "cuda:{slot}"};
  if (shape.backend == Backend::kNcclNetwork) {
    options.environment = {"NCCL_HOSTID=test-host-{slot}", "NCCL_P2P_DISABLE=1",
                           "NCCL_SHM_DISABLE=1"};
  }
  ASSIGN_OR_RETURN(std::unique_ptr<ProcessGroup> group, ProcessGroup::Start(options, deadline));
  return std::make_unique<ProcessDaemons>(std::move(group));
}

v1::GroupConfig SmallGroup(const ServiceShape& shape) {
  v1::GroupConfig config;
  config.set_ep_size(shape.world);
  config.set_backend(BackendName(shape.backend));
  config.set_max_tokens_per_rank(64);
  config.set_max_hidden(96);
  config.set_max_top_k(16);
  config.set_max_experts(64 * shape.world);
  config.set_max_token_dtype(v1::DTYPE_F32);
  config.set_base_timeout_ms(kBaseTimeoutMs);
  return config;
}

absl::StatusOr<std::unique_ptr<ServiceHarness>> ServiceHarness::Start(const ServiceShape& shape) {
  ASSIGN_OR_RETURN(std::unique_ptr<Daemons> daemons, StartDaemons(shape, absl::Now() + kWait));
  return std::unique_ptr<ServiceHarness>(new ServiceHarness(shape, std::move(daemons)));
}

ServiceHarness::~ServiceHarness() {
  driver_.reset();
  if (group_ != nullptr) (void)client::Down(hosts(), {.deadline = absl::Now() + absl::Seconds(5)});
}

absl::Status ServiceHarness::Form(const v1::GroupConfig& config) {
  if (formed_ && google::protobuf::util::MessageDifferencer::Equals(config, config_)) {
    return absl::OkStatus();
  }
  formed_ = false;
  client::UpRequest request;
  request.group_id = kGroupId;
  request.hosts = hosts();
  request.config = config;
  request.claimant = client::MakeClaimant();
  absl::StatusOr<client::Group> group = client::Up(request, Soon());
  if (!group.ok()) return group.status();
  driver_.reset();
  group_ = std::make_unique<client::Group>(*std::move(group));
  driver_ =
      std::make_unique<client::StepDriver>(*group_, client::StepOptions{.timeout = kStepTimeout});
  config_ = config;
  formed_ = true;
  return absl::OkStatus();
}

absl::StatusOr<client::ParameterShard> ServiceHarness::Shard(int64_t rank,
                                                             const std::string& layer_id,
                                                             const std::string& parameter,
                                                             v1::ParameterKind kind) {
  v1::GetParameterRequest request;
  request.set_layer_id(layer_id);
  request.set_parameter(parameter);
  request.set_kind(kind);
  return this->rank(rank).GetParameter(request, absl::Now() + kWait);
}

}  // namespace expertd::testing
