// doctor: findings about daemons that should be one group.
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "client/cpp/json.h"
#include "client/expertctl/common.h"
#include "client/expertctl/doctor.h"
#include "client/expertctl/verbs.h"

namespace expertd::expertctl {
namespace {

const char* Name(Severity severity) {
  switch (severity) {
    case Severity::kGood:
      return "ok";
    case Severity::kWarning:
      return "warning";
    case Severity::kProblem:
      return "problem";
  }
  return "";
}

std::string FindingJson(const Finding& finding) {
  client::JsonObject json;
  json.Add("severity", Name(finding.severity))
      .Add("subject", finding.subject)
      .Add("text", finding.text)
      .Add("remedy", finding.remedy);
  return json.Text();
}

}  // namespace

absl::StatusOr<int> RunDoctor(const Args& args) {
  TargetFlags target;
  std::string backend;
  FlagSet flags("doctor", "looks for what keeps a group from forming; exit code 1 on a problem");
  target.AddTo(&flags);
  flags.Add("backend", "that the group will use; empty: the file's, or any", &backend);
  RETURN_IF_ERROR(flags.Parse(args));
  ASSIGN_OR_RETURN(const v1::GroupFile file, target.Read(TargetFlags::Need::kHosts));
  DoctorInput input;
  input.hosts = client::ReadHosts(Hosts(file), target.QuickOptions());
  input.backend = backend.empty() ? file.config().backend() : backend;
  const std::vector<Finding> findings = Diagnose(input);
  std::vector<std::string> rows;
  for (const Finding& finding : findings) {
    if (target.json) {
      rows.push_back(FindingJson(finding));
      continue;
    }
    PrintLine(
        absl::StrFormat("%-8s %s: %s", Name(finding.severity), finding.subject, finding.text));
    if (!finding.remedy.empty()) PrintLine(absl::StrFormat("         remedy: %s", finding.remedy));
  }
  if (target.json) PrintLine(client::JsonArray(rows));
  return HasProblem(findings) ? kExitFailed : kExitOk;
}

}  // namespace expertd::expertctl
