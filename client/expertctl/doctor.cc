// The checks of doctor, one function each.
#include "client/expertctl/doctor.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/strings.h"
#include "client/cpp/placement.h"
#include "client/expertctl/doctor_gpu.h"

namespace expertd::expertctl {
namespace {

void Add(Severity severity, std::string subject, std::string text, std::string remedy,
         std::vector<Finding>* findings) {
  findings->push_back({severity, std::move(subject), std::move(text), std::move(remedy)});
}

bool IsLoopback(const std::string& address) {
  return address.rfind("127.", 0) == 0 || address.rfind("localhost", 0) == 0 ||
         address.rfind("[::1]", 0) == 0;
}

bool IsWildcard(const std::string& address) {
  return address.rfind("0.0.0.0", 0) == 0 || address.rfind("[::]", 0) == 0;
}

void CheckReachable(const client::HostReport& host, std::vector<Finding>* findings) {
  if (host.status.ok()) {
    Add(Severity::kGood, host.host,
        StrCat("reachable: slot ", host.info.slot(), ", version ", host.info.version(), ", ",
               host.info.device().kind(), " ", host.info.device().name()),
        "", findings);
    return;
  }
  Add(Severity::kProblem, host.host, StrCat("out of reach: ", host.status.message()),
      "start expertd there and let it --listen on an address that this machine reaches", findings);
}

void CheckBackend(const client::HostReport& host, const std::string& backend,
                  std::vector<Finding>* findings) {
  std::string supported;
  std::string reasons;
  for (const v1::Support& support : host.info.backends()) {
    if (!backend.empty() && support.name() != backend) continue;
    if (support.supported()) {
      StrAppend(&supported, " ", support.name());
    } else {
      StrAppend(&reasons, "; ", support.name(), ": ", support.reason());
    }
  }
  if (!supported.empty()) {
    Add(Severity::kGood, host.host, StrCat("supports", supported), "", findings);
    return;
  }
  Add(Severity::kProblem, host.host,
      StrCat("backend ", backend.empty() ? "(any)" : backend, " is not supported", reasons),
      "install what is missing, or choose another --backend", findings);
}

void CheckState(const client::HostReport& host, std::vector<Finding>* findings) {
  if (host.group.state() == v1::GROUP_STATE_BROKEN) {
    Add(Severity::kWarning, host.host, StrCat("its group is broken: ", host.group.reason()),
        "form the group again: expertctl up", findings);
  }
  if (host.info.draining()) {
    Add(Severity::kProblem, host.host, "draining: it takes no new group",
        "expertctl drain --resume", findings);
  }
}

void CheckAddress(const client::HostReport& host, bool several_machines,
                  std::vector<Finding>* findings) {
  const std::string& address = host.info.address();
  if (IsWildcard(address)) {
    Add(Severity::kProblem, host.host, StrCat("tells its peers the address ", address),
        "give expertd an address that the other daemons can connect to", findings);
  } else if (several_machines && IsLoopback(address)) {
    Add(Severity::kProblem, host.host,
        StrCat("tells peers on other machines the loopback address ", address),
        "let expertd --listen on an address of the machine's network", findings);
  }
}

// Slots, devices and versions: exactly what forming a group would refuse.
void CheckTogether(const std::vector<client::HostInfo>& infos, std::vector<Finding>* findings) {
  if (infos.empty()) return;
  const absl::Status status = client::Place(infos).status();
  if (status.ok()) {
    Add(Severity::kGood, "group", "slots and devices differ, versions fit", "", findings);
    return;
  }
  for (const FieldViolation& violation : DetailOf(status).violations) {
    Add(Severity::kProblem, "group", StrCat(violation.path, ": ", violation.description),
        "give each daemon its own --slot and --device, and one version to all", findings);
  }
}

}  // namespace

std::vector<Finding> Diagnose(const DoctorInput& input) {
  std::vector<Finding> findings;
  std::vector<client::HostInfo> infos;
  std::vector<const client::HostReport*> reached;
  std::set<std::string> machines;
  for (const client::HostReport& host : input.hosts) {
    if (!host.status.ok()) continue;
    infos.push_back({host.host, host.info});
    reached.push_back(&host);
    machines.insert(host.info.boot_id());
  }
  for (const client::HostReport& host : input.hosts) {
    CheckReachable(host, &findings);
    if (!host.status.ok()) continue;
    CheckBackend(host, input.backend, &findings);
    CheckState(host, &findings);
    CheckAddress(host, machines.size() > 1, &findings);
    CheckGpu(host, &findings);
  }
  CheckTogether(infos, &findings);
  CheckGpusTogether(reached, &findings);
  CheckTransports(reached, &findings);
  return findings;
}

bool HasProblem(const std::vector<Finding>& findings) {
  return std::any_of(findings.begin(), findings.end(),
                     [](const Finding& finding) { return finding.severity == Severity::kProblem; });
}

}  // namespace expertd::expertctl
