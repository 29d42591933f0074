// Checks and conclusions of route_record.h.
#include "kernels/ep/route_record.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/strings.h"

namespace expertd {
namespace {

// Why a rank's record says that its input is bad; kInternal when it does not.
Reason RejectReason(const int32_t* record) {
  if (record[kRecordReject] != 0) return static_cast<Reason>(record[kRecordReject] - 1);
  if (!HasBadRoute(record)) return Reason::kInternal;
  return record[kRecordBadRoute] % 2 == 1 ? Reason::kDuplicateExpert : Reason::kExpertIdRange;
}

absl::Status PeerRejected(size_t rank, const int32_t* record) {
  const Reason reason = RejectReason(record);
  std::string where;
  if (HasBadRoute(record)) {
    const int32_t index = record[kRecordBadRoute] / 2;
    const int32_t top_k = record[kRecordTopK];
    where = StrCat(": topk_ids[", index / top_k, ",", index % top_k, "]");
  }
  return Error(Reason::kPeerRejected)
      .Text("rank ", rank, " rejected its input: ", ReasonName(reason), where)
      .With("rank", rank)
      .With("peer_reason", ReasonName(reason));
}

}  // namespace

absl::Status CheckRouting(const PrepareArgs& args, const EpGroupConfig& config) {
  const RoutingView& routing = args.routing;
  if (routing.ids_dtype != DType::kI32 && routing.ids_dtype != DType::kI64) {
    return Error(Reason::kDtypeUnsupported)
        .At("topk_ids.dtype",
            StrCat("got ", DTypeName(routing.ids_dtype), ", need DTYPE_I32 or DTYPE_I64"));
  }
  if (routing.tokens > config.max_tokens_per_rank) {
    return Error(Reason::kTokensOverLimit)
        .Text("tokens of rank ", config.rank, ": got ", routing.tokens, ", need at most ",
              config.max_tokens_per_rank)
        .With("tokens", routing.tokens)
        .With("limit", config.max_tokens_per_rank)
        .With("flag", "max_tokens_per_rank");
  }
  if (routing.top_k < 1 || routing.top_k > config.max_top_k) {
    return Error(Reason::kShapeMismatch)
        .Text("top_k: got ", routing.top_k, ", need 1 to ", config.max_top_k);
  }
  if (args.alignment < 1 || (args.alignment & (args.alignment - 1)) != 0) {
    return Error(Reason::kShapeMismatch)
        .Text("alignment: got ", args.alignment, ", need a power of two");
  }
  return absl::OkStatus();
}

absl::Status JudgePeers(std::span<const int32_t* const> records, int64_t rank) {
  const int32_t* mine = records[static_cast<size_t>(rank)];
  // A refused input stands before a difference that may come from it.
  for (size_t r = 0; r < records.size(); ++r) {
    if (records[r][kRecordReject] != 0) return PeerRejected(r, records[r]);
  }
  for (size_t r = 0; r < records.size(); ++r) {
    const int32_t* peer = records[r];
    if (std::equal(peer + kRecordExperts, peer + kRecordAlignment + 1, mine + kRecordExperts)) {
      continue;
    }
    return Error(Reason::kSequenceConflict)
        .Text("prepare differs: rank ", rank, " has experts ", mine[kRecordExperts], ", top_k ",
              mine[kRecordTopK], ", alignment ", mine[kRecordAlignment], "; rank ", r, " has ",
              peer[kRecordExperts], ", ", peer[kRecordTopK], ", ", peer[kRecordAlignment]);
  }
  for (size_t r = 0; r < records.size(); ++r) {
    if (HasBadRoute(records[r])) return PeerRejected(r, records[r]);
  }
  return absl::OkStatus();
}

}  // namespace expertd
