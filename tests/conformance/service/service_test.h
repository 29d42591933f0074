// The fixture of the service's conformance suite: a shared group per parameter, layers per case.
//
// Every TEST_P(ServiceTest, ...) of this folder runs at every backend and world size, through real
// gRPC: on the CPU, unless EXPERTD_TEST_SHAPES names others. Daemons and their group are started
// once for each parameter and live until the program ends; a case makes layers of its own, which go
// when it ends.
#ifndef TESTS_CONFORMANCE_SERVICE_SERVICE_TEST_H_
#define TESTS_CONFORMANCE_SERVICE_SERVICE_TEST_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "client/cpp/tensor.h"
#include "tests/reference/ep.h"
#include "tests/testing/service_harness.h"

namespace expertd::conformance {

#define ASSERT_OK(expression)                             \
  do {                                                    \
    const auto& ok_result = (expression);                 \
    ASSERT_TRUE(ok_result.ok()) << StatusText(ok_result); \
  } while (false)

inline std::string StatusText(const absl::Status& status) { return status.ToString(); }
template <typename T>
std::string StatusText(const absl::StatusOr<T>& result) {
  return result.status().ToString();
}

class ServiceTest : public ::testing::TestWithParam<testing::ServiceShape> {
 public:
  int64_t world() const { return GetParam().world; }
  testing::ServiceHarness& service() { return *service_; }
  client::StepDriver& driver() { return service_->driver(); }

  // The smallest width of a row from `hidden` on that the devices take.
  int64_t FitHidden(int64_t hidden, v1::DType dtype) const;

  // Makes the next steps run in a group with this config. Layers stay.
  void UseGroup(const v1::GroupConfig& config);
  v1::GroupConfig DefaultGroup() const { return testing::SmallGroup(GetParam()); }

  // Creates a layer on every rank and returns its id; with a seed, initialises its weights.
  // A failure is fatal to the case: check HasFatalFailure.
  std::string MakeLayer(const v1::LayerConfig& config);
  std::string MakeLayer(const v1::LayerConfig& config, uint64_t seed);
  // To be deleted too.
  void Remember(const std::string& layer_id) { layers_.push_back(layer_id); }

  // Runs one collective on all ranks; on an error the case fails and the responses are empty.
  template <typename Request>
  std::vector<client::ResponseOf<Request>> Run(std::vector<Request> requests) {
    auto responses = driver().Run(std::move(requests));
    if (responses.ok()) return *std::move(responses);
    ADD_FAILURE() << responses.status();
    return {};
  }
  template <typename Request>
  std::vector<client::ResponseOf<Request>> RunSame(const Request& request) {
    return Run(std::vector<Request>(static_cast<size_t>(world()), request));
  }

  // A parameter of all ranks: shards in rank order, or the one copy that all ranks must share.
  std::vector<float> Parameter(const std::string& layer_id, const std::string& parameter,
                               v1::ParameterKind kind);
  // The same, not put together: per rank.
  std::vector<std::vector<float>> Shards(const std::string& layer_id, const std::string& parameter,
                                         v1::ParameterKind kind);

 protected:
  void SetUp() override;
  // Deletes the case's layers. After a failure: shows the logs and gives up the daemons.
  void TearDown() override;

 private:
  testing::ServiceHarness* service_ = nullptr;
  std::vector<std::string> layers_;
};

// The shared daemons of one parameter, started on first use; null with a failure recorded.
testing::ServiceHarness* SharedService(const testing::ServiceShape& shape);

// A layer config with what every case sets: SILU, f32, alignment 1, no router.
v1::LayerConfig SmallLayer(int64_t experts, int64_t top_k, int64_t hidden, int64_t intermediate);

// The values of a float tensor, widened; a failure when it is none.
std::vector<double> Values(const v1::Tensor& tensor);
std::vector<int64_t> Ints(const v1::Tensor& tensor);
std::vector<float> Floats(const std::vector<double>& values);
// Rounds to the dtype, as the tensor will.
std::vector<double> RoundTo(v1::DType dtype, std::vector<double> values);

v1::Tensor TokenTensor(v1::DType dtype, const std::vector<double>& values, int64_t columns);
v1::Tensor IdTensor(const std::vector<int64_t>& ids, int64_t top_k);
v1::Tensor WeightTensor(const std::vector<double>& values, int64_t columns);

}  // namespace expertd::conformance

#endif  // TESTS_CONFORMANCE_SERVICE_SERVICE_TEST_H_
