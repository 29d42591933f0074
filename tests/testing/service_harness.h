// N daemons served over real gRPC, as a test's client sees them: in this process or as processes.
//
//   auto service = ServiceHarness::Start({Backend::kGloo, 4}).value();
//   ASSERT_TRUE(service->Form(SmallGroup(4)).ok());
//   auto responses = service->driver().Run(std::vector<v1::ForwardRequest>{...});
// Every wait ends within kWait. One thread at a time, but for what driver() and group() allow.
#ifndef TESTS_TESTING_SERVICE_HARNESS_H_
#define TESTS_TESTING_SERVICE_HARNESS_H_

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/group_controller.h"
#include "client/cpp/step_driver.h"

namespace expertd::testing {

// kLoopback: N daemon objects in this process. All others: N `expertd` processes. kNccl: on one GPU
// each. kNcclNetwork: the same, made to believe that each is on a host of its own.
enum class Backend { kLoopback, kGloo, kNccl, kNcclNetwork };
// Of a group's config: "loopback", "gloo" or "nccl".
std::string BackendName(Backend backend);

struct ServiceShape {
  Backend backend = Backend::kLoopback;
  int64_t world = 1;
  bool on_gpu() const { return backend == Backend::kNccl || backend == Backend::kNcclNetwork; }
  friend auto operator<=>(const ServiceShape&, const ServiceShape&) = default;
};
// "gloo_4", "nccl_2", "nccl_network_2".
std::string ToString(const ServiceShape& shape);
// The other way; INVALID_ARGUMENT with what is known.
absl::StatusOr<ServiceShape> ParseShape(const std::string& text);
void PrintTo(const ServiceShape& shape, std::ostream* out);

// The longest that anything here may take; far above what it does take on a busy machine.
inline constexpr absl::Duration kWait = absl::Seconds(60);
inline client::CallOptions Soon() { return {.deadline = absl::Now() + kWait}; }

// The daemons alone, without a group.
class Daemons {
 public:
  virtual ~Daemons() = default;
  // "127.0.0.1:port" in slot order.
  virtual std::vector<std::string> hosts() const = 0;
  // What they logged, for the report of a failure.
  virtual std::string Describe() = 0;
};
// With EXPERTD_TEST_HOSTS ("a:p,b:p") in the environment the first `world` daemons there are used
// instead of new processes, and left running.
absl::StatusOr<std::unique_ptr<Daemons>> StartDaemons(const ServiceShape& shape,
                                                      absl::Time deadline);

// A group config with small maxima: 64 tokens per rank, hidden 96, top_k 16, 64 experts per rank.
v1::GroupConfig SmallGroup(const ServiceShape& shape);

class ServiceHarness {
 public:
  // Starts the daemons. Errors: those of StartDaemons.
  static absl::StatusOr<std::unique_ptr<ServiceHarness>> Start(const ServiceShape& shape);
  // Leaves the group, then ends the daemons.
  ~ServiceHarness();

  const ServiceShape& shape() const { return shape_; }
  int64_t world() const { return shape_.world; }
  std::vector<std::string> hosts() const { return daemons_->hosts(); }
  std::string Describe() { return daemons_->Describe(); }

  // Forms a new epoch with this config, unless the group has it already and works.
  // Errors: those of client::Up.
  absl::Status Form(const v1::GroupConfig& config);
  // The next Form makes a new epoch in any case.
  void Forget() { formed_ = false; }

  // REQUIRES: Form returned OK, for all that follows.
  const client::Group& group() const { return *group_; }
  client::StepDriver& driver() { return *driver_; }
  client::RankClient& rank(int64_t rank) { return *group_->ranks[static_cast<size_t>(rank)]; }

  // One rank's shard. Errors: those of GetParameter.
  absl::StatusOr<client::ParameterShard> Shard(int64_t rank, const std::string& layer_id,
                                               const std::string& parameter,
                                               v1::ParameterKind kind);

 private:
  ServiceHarness(const ServiceShape& shape, std::unique_ptr<Daemons> daemons)
      : shape_(shape), daemons_(std::move(daemons)) {}

  const ServiceShape shape_;
  std::unique_ptr<Daemons> daemons_;
  v1::GroupConfig config_;
  bool formed_ = false;
  std::unique_ptr<client::Group> group_;
  std::unique_ptr<client::StepDriver> driver_;  // Reads group_.
};

}  // namespace expertd::testing

#endif  // TESTS_TESTING_SERVICE_HARNESS_H_
