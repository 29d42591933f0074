// The verbs of expertctl. Each takes the words after its name and returns an exit code or an error.
#ifndef CLIENT_EXPERTCTL_VERBS_H_
#define CLIENT_EXPERTCTL_VERBS_H_

#include "absl/status/statusor.h"
#include "client/expertctl/common.h"

namespace expertd::expertctl {

// verb_group.cc
absl::StatusOr<int> RunUp(const Args& args);
absl::StatusOr<int> RunDown(const Args& args);
absl::StatusOr<int> RunDrain(const Args& args);
// verb_status.cc
absl::StatusOr<int> RunStatus(const Args& args);
absl::StatusOr<int> RunDescribe(const Args& args);
// verb_top.cc
absl::StatusOr<int> RunTop(const Args& args);
// verb_plan.cc
absl::StatusOr<int> RunPlan(const Args& args);
// verb_forward.cc
absl::StatusOr<int> RunForward(const Args& args);
// verb_bench.cc
absl::StatusOr<int> RunBench(const Args& args);
// verb_doctor.cc
absl::StatusOr<int> RunDoctor(const Args& args);
// verb_conformance.cc
absl::StatusOr<int> RunConformance(const Args& args);
// verb_weights.cc
absl::StatusOr<int> RunSave(const Args& args);
absl::StatusOr<int> RunLoad(const Args& args);
// verb_train.cc
absl::StatusOr<int> RunTrain(const Args& args);

}  // namespace expertd::expertctl

#endif  // CLIENT_EXPERTCTL_VERBS_H_
