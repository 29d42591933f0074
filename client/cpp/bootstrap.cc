// Choosing and claiming an epoch.
#include "client/cpp/bootstrap.h"

#include <unistd.h>

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "base/ids.h"
#include "base/status_macros.h"
#include "base/strings.h"

namespace expertd::client {

absl::StatusOr<uint64_t> ChooseEpoch(uint64_t highest_seen, int64_t unix_ms) {
  if (highest_seen == std::numeric_limits<uint64_t>::max()) {
    return Error(Reason::kConfigInvalid)
        .Text("epoch: a daemon has seen ", highest_seen,
              ", need one below it; restart that daemon");
  }
  return std::max(highest_seen + 1, static_cast<uint64_t>(std::max<int64_t>(unix_ms, 1)));
}

absl::StatusOr<Bootstrap> ClaimEpoch(RankClient& lowest_slot, const std::string& group_id,
                                     uint64_t epoch, const std::string& claimant,
                                     const CallOptions& options) {
  v1::CreateBootstrapIdRequest request;
  request.set_group_id(group_id);
  request.set_epoch(epoch);
  request.set_claimant(claimant);
  ASSIGN_OR_RETURN(v1::CreateBootstrapIdResponse response, lowest_slot.Call(request, options));
  return Bootstrap{epoch, std::move(*response.mutable_bootstrap_id()),
                   std::move(*response.mutable_fingerprint())};
}

std::string MakeClaimant() {
  char host[256] = "unknown";
  gethostname(host, sizeof(host) - 1);
  return StrCat(host, ":", getpid(), ":", Hex(RandomId()));
}

}  // namespace expertd::client
