// CpuEp's Prepare: validation, exchange of counts and of route lists, the handle.
#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/cpu/cpu_ep.h"
#include "kernels/ep/ep_layout.h"

namespace expertd {
namespace {

// What a rank tells all others first; counts[experts] (int64) follow. Hosts of a group share byte
// order.
struct PrepareRecord {
  int64_t experts = 0;
  int64_t top_k = 0;
  int64_t alignment = 0;
  int64_t rejected = 0;  // 1: this rank's own input is bad, `text` says why
  char reason[32] = {};  // its name
  char text[472] = {};
};

void CopyText(std::string_view from, char* to, size_t capacity) {
  std::memcpy(to, from.data(), std::min(from.size(), capacity - 1));
}

}  // namespace

absl::Status CpuEp::CheckPrepare(const PrepareArgs& args) const {
  const RoutingView& routing = args.routing;
  if (routing.tokens > config_.max_tokens_per_rank) {
    return Error(Reason::kTokensOverLimit)
        .Text("tokens of rank ", config_.rank, ": got ", routing.tokens, ", need at most ",
              config_.max_tokens_per_rank)
        .With("tokens", routing.tokens)
        .With("limit", config_.max_tokens_per_rank)
        .With("flag", "max_tokens_per_rank");
  }
  if (routing.top_k < 1 || routing.top_k > config_.max_top_k) {
    return Error(Reason::kShapeMismatch)
        .Text("top_k: got ", routing.top_k, ", need 1 to ", config_.max_top_k);
  }
  if (args.alignment < 1 || (args.alignment & (args.alignment - 1)) != 0) {
    return Error(Reason::kShapeMismatch)
        .Text("alignment: got ", args.alignment, ", need a power of two");
  }
  return ValidateIds(routing, args.expert_count);
}

absl::Status CpuEp::ExchangeRecords(const OpContext& context, const PrepareArgs& args,
                                    const absl::Status& own) {
  PrepareRecord record;
  record.experts = args.expert_count;
  record.top_k = args.routing.top_k;
  record.alignment = args.alignment;
  const auto experts = static_cast<size_t>(args.expert_count);
  counts_.assign(static_cast<size_t>(config_.world) * experts, 0);
  const std::span<int64_t> own_counts =
      std::span(counts_).subspan(static_cast<size_t>(config_.rank) * experts, experts);
  if (own.ok()) {
    CountRoutes(args.routing, own_counts);
  } else {
    record.rejected = 1;
    CopyText(ReasonName(ReasonOf(own)), record.reason, sizeof(record.reason));
    CopyText(StdView(own.message()), record.text, sizeof(record.text));
  }
  const auto bytes = static_cast<int64_t>(sizeof(record) + own_counts.size_bytes());
  LayOutMessages([&](int64_t) { return bytes; }, [&](int64_t) { return bytes; });
  for (int64_t rank = 0; rank < config_.world; ++rank) {
    if (rank == config_.rank) continue;
    std::memcpy(SendData(rank), &record, sizeof(record));
    std::memcpy(SendData(rank) + sizeof(record), own_counts.data(), own_counts.size_bytes());
  }
  RETURN_IF_ERROR(transport_->Exchange(context, send_, recv_));
  for (int64_t rank = 0; rank < config_.world; ++rank) {
    if (rank == config_.rank) continue;
    std::memcpy(&counts_[static_cast<size_t>(rank) * experts], RecvData(rank) + sizeof(record),
                own_counts.size_bytes());
    PrepareRecord peer;
    std::memcpy(&peer, RecvData(rank), sizeof(peer));
    if (peer.experts != record.experts || peer.alignment != record.alignment ||
        peer.top_k != record.top_k) {
      return Error(Reason::kSequenceConflict)
          .Text("prepare differs: rank ", config_.rank, " has experts ", record.experts, ", top_k ",
                record.top_k, ", alignment ", record.alignment, "; rank ", rank, " has ",
                peer.experts, ", ", peer.top_k, ", ", peer.alignment);
    }
  }
  return absl::OkStatus();
}

absl::Status CpuEp::JudgeRecords(const absl::Status& own) const {
  RETURN_IF_ERROR(own);
  for (int64_t rank = 0; rank < config_.world; ++rank) {
    if (rank == config_.rank) continue;
    PrepareRecord peer;
    std::memcpy(&peer, RecvData(rank), sizeof(peer));
    if (peer.rejected == 0) continue;
    return Error(Reason::kPeerRejected)
        .Text("rank ", rank, " rejected its input: ", peer.reason, ": ", peer.text)
        .With("rank", rank)
        .With("peer_reason", peer.reason);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<EpHandle>> CpuEp::Prepare(const OpContext& context,
                                                         const PrepareArgs& args) {
  if (args.expert_count < config_.world || args.expert_count % config_.world != 0 ||
      args.expert_count > config_.max_experts) {
    // The same value on every rank, so all of them stop here.
    return Error(Reason::kShardingMismatch)
        .Text("experts: got ", args.expert_count, ", need a multiple of ", config_.world, " up to ",
              config_.max_experts);
  }
  const absl::Status own = CheckPrepare(args);
  RETURN_IF_ERROR(ExchangeRecords(context, args, own));
  RETURN_IF_ERROR(JudgeRecords(own));
  ASSIGN_OR_RETURN(const EpLayout layout, EpLayout::Create({.world = config_.world,
                                                            .experts = args.expert_count,
                                                            .alignment = args.alignment,
                                                            .capacity = config_.max_recv_rows,
                                                            .policy = config_.capacity_policy},
                                                           counts_));
  const RoutingView& routing = args.routing;
  std::vector<int64_t> slots(static_cast<size_t>(routing.tokens * routing.top_k));
  AssignSlots(routing, layout, config_.rank, slots);

  auto handle = std::make_unique<CpuEpHandle>();
  handle->recv_counts = layout.CountsOf(config_.rank);
  handle->token_count = routing.tokens;
  handle->routes_per_token = routing.top_k;
  handle->row_alignment = args.alignment;
  if (std::find(slots.begin(), slots.end(), kDroppedRoute) != slots.end()) {
    handle->dropped.resize(slots.size());
    std::transform(slots.begin(), slots.end(), handle->dropped.begin(),
                   [](int64_t slot) { return static_cast<uint8_t>(slot == kDroppedRoute); });
  }
  handle->to = BuildRouteLists(routing, layout, slots);
  RETURN_IF_ERROR(ExchangeRoutes(context, layout, *handle));
  return std::unique_ptr<EpHandle>(std::move(handle));
}

absl::Status CpuEp::ExchangeRoutes(const OpContext& context, const EpLayout& layout,
                                   CpuEpHandle& handle) {
  const auto world = static_cast<size_t>(config_.world);
  handle.from.resize(world);
  handle.from_rows.assign(world, 0);
  const auto bytes_between = [&](int64_t source, int64_t target) {
    return layout.KeptBetween(source, target) * static_cast<int64_t>(sizeof(WireRoute));
  };
  LayOutMessages([&](int64_t rank) { return bytes_between(config_.rank, rank); },
                 [&](int64_t rank) { return bytes_between(rank, config_.rank); });
  for (size_t rank = 0; rank < world; ++rank) {
    if (send_[rank].empty()) continue;
    std::memcpy(send_data_[rank], handle.to[rank].routes.data(), send_[rank].size());
  }
  RETURN_IF_ERROR(transport_->Exchange(context, send_, recv_));
  for (size_t rank = 0; rank < world; ++rank) {
    if (recv_[rank].empty()) continue;
    std::vector<WireRoute>& routes = handle.from[rank];
    routes.resize(recv_[rank].size() / sizeof(WireRoute));
    std::memcpy(routes.data(), recv_[rank].data(), recv_[rank].size());
    ASSIGN_OR_RETURN(handle.from_rows[rank], CheckedRows(routes, handle.recv_counts.total));
  }
  return absl::OkStatus();
}

}  // namespace expertd
