// conformance: one line per check of a live group.
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "client/cpp/json.h"
#include "client/expertctl/common.h"
#include "client/expertctl/conformance.h"
#include "client/expertctl/layers.h"
#include "client/expertctl/verbs.h"

namespace expertd::expertctl {
namespace {

struct Tally {
  int64_t passed = 0;
  int64_t failed = 0;
};

void Report(const std::string& name, const absl::Status& status, bool json, Tally* tally) {
  ++(status.ok() ? tally->passed : tally->failed);
  if (json) {
    client::JsonObject row;
    row.Add("check", name).Add("passed", status.ok());
    if (!status.ok()) row.Add("error", status.message());
    PrintLine(row.Text());
    return;
  }
  PrintLine(absl::StrFormat("%-4s %s", status.ok() ? "ok" : "FAIL", name));
  if (!status.ok()) PrintLine(absl::StrFormat("     %s", status.message()));
}

}  // namespace

absl::StatusOr<int> RunConformance(const Args& args) {
  TargetFlags target;
  FlagSet flags("conformance",
                "checks a live group through the public API on a temporary layer; exit code 1 "
                "when a check fails");
  target.AddTo(&flags);
  RETURN_IF_ERROR(flags.Parse(args));
  ASSIGN_OR_RETURN(const Session session, OpenSession(target));
  ASSIGN_OR_RETURN(const v1::LayerConfig config, ConformanceLayer(session.group));
  Tally tally;
  RETURN_IF_ERROR(WithTemporaryLayer(
      "conformance", config, session, [&](const v1::LayerInfo& layer) -> absl::Status {
        Conformance conformance;
        conformance.session = &session;
        conformance.layer = layer;
        conformance.report = [&](const std::string& name, const absl::Status& status) {
          Report(name, status, target.json, &tally);
        };
        CheckPrimitives(conformance);
        CheckLayer(conformance);
        CheckAbuse(conformance);
        return absl::OkStatus();
      }));
  client::JsonObject summary;
  summary.Add("passed", tally.passed).Add("failed", tally.failed);
  PrintLine(target.json ? summary.Text()
                        : absl::StrFormat("%d passed, %d failed", tally.passed, tally.failed));
  if (StopFlag()->load()) return kExitInterrupted;
  return tally.failed == 0 ? kExitOk : kExitFailed;
}

}  // namespace expertd::expertctl
