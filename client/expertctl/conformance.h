// Checks of a live group against the documented semantics, through the public API only.
//
// Data is chosen so that every expected value is exact in f32, f16 and bf16: token rows hold
// integers of at most 32 in magnitude and differ per (rank, token), and weights are powers of two.
#ifndef CLIENT_EXPERTCTL_CONFORMANCE_H_
#define CLIENT_EXPERTCTL_CONFORMANCE_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/expertctl/common.h"
#include "client/expertctl/conformance_layout.h"

namespace expertd::expertctl {

struct Conformance {
  const Session* session = nullptr;
  v1::LayerInfo layer;
  // One line per check: its name, and what went wrong.
  std::function<void(const std::string& name, const absl::Status& status)> report;

  client::StepDriver& driver() const { return *session->driver; }
  int64_t ranks() const { return session->group.world(); }
  ScenarioShape shape() const;

  // Runs one check unless a signal asked to stop.
  void Check(const std::string& name, const std::function<absl::Status()>& check) const;
};

// A layer that fits the group and the checks: small, with alignment 4.
// Errors: CONFIG_INVALID when the group's maxima leave no room for one.
absl::StatusOr<v1::LayerConfig> ConformanceLayer(const client::Group& group);

// Prepare, Dispatch, Combine and their backwards, bit for bit, over all scenarios.
void CheckPrimitives(const Conformance& conformance);
// Forward, Backward, tickets, gradients, sharding.
void CheckLayer(const Conformance& conformance);
// Bad requests get their own error, their peers PEER_REJECTED, and the next step works.
void CheckAbuse(const Conformance& conformance);

// An integer-valued row, different for each (rank, token): `salt` makes several of them.
float RowValue(int64_t rank, int64_t token, int64_t column, int64_t salt);
// INTERNAL with the first index where they differ; bits are compared, so -0 differs from 0.
absl::Status ExpectBits(const std::string& what, const std::vector<float>& got,
                        const std::vector<float>& want);
absl::Status ExpectTrue(bool condition, const std::string& what);

}  // namespace expertd::expertctl

#endif  // CLIENT_EXPERTCTL_CONFORMANCE_H_
