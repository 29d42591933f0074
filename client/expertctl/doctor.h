// What keeps a set of daemons from being one group: a pure function of what they say.
#ifndef CLIENT_EXPERTCTL_DOCTOR_H_
#define CLIENT_EXPERTCTL_DOCTOR_H_

#include <string>
#include <vector>

#include "client/cpp/group_controller.h"

namespace expertd::expertctl {

enum class Severity { kGood, kWarning, kProblem };

struct Finding {
  Severity severity = Severity::kGood;
  std::string subject;  // A host, or "group".
  std::string text;
  std::string remedy;  // Empty when good.
};

struct DoctorInput {
  std::vector<client::HostReport> hosts;
  std::string backend;  // Empty: only that some backend is supported.
};

// Findings in a fixed order: per host, then between hosts, then of the group they form.
std::vector<Finding> Diagnose(const DoctorInput& input);

bool HasProblem(const std::vector<Finding>& findings);

}  // namespace expertd::expertctl

#endif  // CLIENT_EXPERTCTL_DOCTOR_H_
