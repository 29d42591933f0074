// Both kinds of daemons behind one interface, and forming groups of them.
#include "tests/testing/service_harness.h"

#include <utility>

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

}  // namespace

std::string BackendName(Backend backend) {
  return backend == Backend::kLoopback ? "loopback" : "gloo";
}

std::string ToString(const ServiceShape& shape) {
  return StrCat(BackendName(shape.backend), "_", shape.world);
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
  ASSIGN_OR_RETURN(
      std::unique_ptr<ProcessGroup> group,
      ProcessGroup::Start({.count = shape.world, .flags = {"--cpu_threads", "1"}}, deadline));
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
