// NcclEp's Prepare: validation, exchange of counts, layout, slots and wire tables.
#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/cuda/status.h"
#include "kernels/ep/nccl_ep.h"
#include "kernels/ep/route_kernels.h"

namespace expertd {
namespace {

constexpr int64_t kInt = sizeof(int32_t);

RouteShape ShapeOf(const PrepareArgs& args, int64_t world) {
  return {.ids = args.routing.ids,
          .wide_ids = args.routing.ids_dtype == DType::kI64,
          .tokens = args.routing.tokens,
          .top_k = args.routing.top_k,
          .experts = args.expert_count,
          .world = world};
}

int32_t Narrow(int64_t value) { return static_cast<int32_t>(value); }

bool HasBadRoute(const int32_t* record) { return record[kRecordBadRoute] != kNoBadRoute; }

// Why a rank's record says that its input is bad; kInternal when it does not.
Reason RejectReason(const int32_t* record) {
  if (record[kRecordReject] != 0) return static_cast<Reason>(record[kRecordReject] - 1);
  if (!HasBadRoute(record)) return Reason::kInternal;
  return record[kRecordBadRoute] % 2 == 1 ? Reason::kDuplicateExpert : Reason::kExpertIdRange;
}

absl::Status PeerRejected(int64_t rank, const int32_t* record) {
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

absl::Status NcclEp::CheckPrepare(const PrepareArgs& args) const {
  const RoutingView& routing = args.routing;
  if (routing.ids_dtype != DType::kI32 && routing.ids_dtype != DType::kI64) {
    return Error(Reason::kDtypeUnsupported)
        .At("topk_ids.dtype",
            StrCat("got ", DTypeName(routing.ids_dtype), ", need DTYPE_I32 or DTYPE_I64"));
  }
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
  return absl::OkStatus();
}

// Counts on the device, all ranks' records to the host: the one wait of a step's communication.
absl::Status NcclEp::ExchangeRecords(const PrepareArgs& args, const absl::Status& own) {
  RouteShape shape = ShapeOf(args, config_.world);
  if (!own.ok()) shape.tokens = 0;
  experts_ = args.expert_count;
  const int64_t tiles = RouteTiles(shape.tokens);
  const int64_t record_ints = RecordInts(experts_);
  RETURN_IF_ERROR(tile_counts_.Reserve(device_, (shape.columns() + 1) * tiles * kInt));
  RETURN_IF_ERROR(record_.Reserve(device_, (config_.world + 1) * record_ints * kInt));
  auto* counts = tile_counts_.as<int32_t>();
  auto* bad = counts + shape.columns() * tiles;
  auto* all = record_.as<int32_t>();
  auto* mine = config_.world == 1 ? all : all + config_.world * record_ints;
  RETURN_IF_ERROR(CudaStatus(LaunchCount(shape, counts, bad, device_.stream()),
                             "counting routes"));
  ScanParams scan;
  scan.tiles = tiles;
  scan.columns = shape.columns();
  scan.counts = counts;
  scan.bad = bad;
  scan.header[kRecordReject] = own.ok() ? 0 : static_cast<int32_t>(ReasonOf(own)) + 1;
  scan.header[kRecordExperts] = Narrow(args.expert_count);
  scan.header[kRecordTopK] = Narrow(args.routing.top_k);
  scan.header[kRecordAlignment] = Narrow(args.alignment);
  scan.record = mine;
  RETURN_IF_ERROR(CudaStatus(LaunchScan(scan, device_.stream()), "adding up routes"));
  if (config_.world > 1) {
    RETURN_IF_ERROR(GatherFromAll(mine, record_ints * kInt, all));
  }
  RETURN_IF_ERROR(CudaStatus(
      cudaMemcpyAsync(records_, all, static_cast<size_t>(config_.world * record_ints * kInt),
                      cudaMemcpyDeviceToHost, device_.stream()),
      "reading counts"));
  RETURN_IF_ERROR(Record(records_ready_, device_.stream()));
  return PollEvent(records_ready_, this);
}

// The ids are read back only when they are known to be bad: for the positions.
absl::Status NcclEp::OwnIdError(const PrepareArgs& args) {
  RoutingView routing = args.routing;
  const int64_t bytes =
      routing.tokens * routing.top_k * static_cast<int64_t>(DTypeSize(routing.ids_dtype));
  std::string ids(static_cast<size_t>(bytes), '\0');
  RETURN_IF_ERROR(device_.CopyToHost(ids.data(), routing.ids, bytes));
  routing.ids = ids.data();
  RETURN_IF_ERROR(ValidateIds(routing, args.expert_count));
  return Error(Reason::kInternal).Text("ids were bad on the device and are good on the host");
}

absl::Status NcclEp::JudgeRecords(const PrepareArgs& args, const absl::Status& own) {
  RETURN_IF_ERROR(own);
  const int32_t* mine = RecordOf(config_.rank);
  if (HasBadRoute(mine)) return OwnIdError(args);
  for (int64_t rank = 0; rank < config_.world; ++rank) {
    const int32_t* peer = RecordOf(rank);
    if (std::equal(peer + kRecordExperts, peer + kRecordAlignment + 1, mine + kRecordExperts)) {
      continue;
    }
    return Error(Reason::kSequenceConflict)
        .Text("prepare differs: rank ", config_.rank, " has experts ", mine[kRecordExperts],
              ", top_k ", mine[kRecordTopK], ", alignment ", mine[kRecordAlignment], "; rank ",
              rank, " has ", peer[kRecordExperts], ", ", peer[kRecordTopK], ", ",
              peer[kRecordAlignment]);
  }
  for (int64_t rank = 0; rank < config_.world; ++rank) {
    const int32_t* peer = RecordOf(rank);
    if (peer[kRecordReject] != 0 || HasBadRoute(peer)) return PeerRejected(rank, peer);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<EpHandle>> NcclEp::Prepare(const OpContext& context,
                                                          const PrepareArgs& args) {
  RETURN_IF_ERROR(Begin(context));
  if (args.expert_count < config_.world || args.expert_count % config_.world != 0 ||
      args.expert_count > config_.max_experts) {
    // The same value on every rank, so all of them stop here.
    return Error(Reason::kShardingMismatch)
        .Text("experts: got ", args.expert_count, ", need a multiple of ", config_.world,
              " up to ", config_.max_experts);
  }
  const absl::Status own = CheckPrepare(args);
  RETURN_IF_ERROR(ExchangeRecords(args, own));
  RETURN_IF_ERROR(JudgeRecords(args, own));
  std::vector<int64_t> counts;
  counts.reserve(static_cast<size_t>(config_.world * experts_));
  for (int64_t rank = 0; rank < config_.world; ++rank) {
    const int32_t* first = RecordOf(rank) + kRecordHeader;
    counts.insert(counts.end(), first, first + experts_);
  }
  ASSIGN_OR_RETURN(const EpLayout layout,
                   EpLayout::Create({.world = config_.world,
                                     .experts = args.expert_count,
                                     .alignment = args.alignment,
                                     .capacity = config_.max_recv_rows,
                                     .policy = config_.capacity_policy},
                                    counts));
  auto handle = std::make_unique<NcclEpHandle>();
  RETURN_IF_ERROR(FillHandle(args, layout, *handle));
  return std::unique_ptr<EpHandle>(std::move(handle));
}

absl::Status NcclEp::FillHandle(const PrepareArgs& args, const EpLayout& layout,
                                NcclEpHandle& handle) {
  handle.recv_counts = layout.CountsOf(config_.rank);
  handle.token_count = args.routing.tokens;
  handle.routes_per_token = args.routing.top_k;
  handle.row_alignment = args.alignment;
  handle.pad_rows = handle.recv_counts.total;
  for (int64_t routes : handle.recv_counts.tokens_per_expert) handle.pad_rows -= routes;
  CountWireRows(layout, handle);
  RETURN_IF_ERROR(PlaceTables(handle));
  RETURN_IF_ERROR(AssignRoutes(args, layout, handle));
  return ExchangeTables(handle);
}

// A token whose routes to a rank were all dropped may still travel there, for which tokens those are
// only their rank knows; but nothing travels to a rank that keeps none of this rank's routes.
void NcclEp::CountWireRows(const EpLayout& layout, NcclEpHandle& handle) const {
  const auto rows_between = [&](int64_t source, int64_t target) -> int64_t {
    if (source != target && layout.KeptBetween(source, target) == 0) return 0;
    return RecordOf(source)[kRecordHeader + experts_ + target];
  };
  const auto add = [&](WireRows& wire, int64_t rank, int64_t rows) {
    wire.rows.push_back(rows);
    wire.begin.push_back(wire.total);
    if (rank != config_.rank) wire.total += rows;
  };
  for (int64_t rank = 0; rank < config_.world; ++rank) {
    add(handle.out, rank, rows_between(config_.rank, rank));
    add(handle.in, rank, rows_between(rank, config_.rank));
  }
  handle.own_rows = handle.in.rows[static_cast<size_t>(config_.rank)];
  handle.own_begin = handle.in.begin[static_cast<size_t>(config_.rank)];
}

// One block of device memory for all tables, filled with -1.
absl::Status NcclEp::PlaceTables(NcclEpHandle& handle) {
  const int64_t top_k = handle.routes_per_token;
  RouteTables& tables = handle.tables;
  const std::pair<int32_t**, int64_t> parts[] = {
      {&tables.route_owner, handle.token_count * top_k},
      {&tables.row_of, handle.token_count * config_.world},
      {&tables.wire_tokens, handle.out.total},
      {&tables.wire_slots, handle.out.total * top_k},
      {&tables.own_tokens, handle.own_rows},
      {&tables.recv_slots, (handle.in.total + handle.own_rows) * top_k},
      {&tables.pad_slots, handle.pad_rows},
      {&handle.wire_begin, config_.world},
  };
  constexpr int64_t kStep = 64;  // ints; keeps every table 256-byte aligned
  int64_t ints = 0;
  for (const auto& [table, size] : parts) ints += (size + kStep - 1) / kStep * kStep;
  ASSIGN_OR_RETURN(handle.memory, device_.Allocate(ints * kInt));
  auto* next = handle.memory.as<int32_t>();
  for (const auto& [table, size] : parts) {
    *table = next;
    next += (size + kStep - 1) / kStep * kStep;
  }
  handle.own_slots = tables.recv_slots + handle.own_begin * top_k;
  return CudaStatus(cudaMemsetAsync(handle.memory.data(), 0xFF, static_cast<size_t>(ints * kInt),
                                    device_.stream()),
                    "clearing routing tables");
}

absl::Status NcclEp::AssignRoutes(const PrepareArgs& args, const EpLayout& layout,
                                  NcclEpHandle& handle) {
  const int64_t local = layout.local_experts();
  const int64_t ints = 2 * experts_ + config_.world + 2 * local + 1;
  RETURN_IF_ERROR(layout_.Reserve(device_, ints * kInt));
  // The last user of the pinned block was done before this Prepare read its counts.
  auto* host = static_cast<int32_t*>(pinned_layout_.get());
  int64_t at = 0;
  bool drops = false;
  const auto put = [&](int64_t value) { host[at++] = Narrow(value); };
  const int32_t* routes = RecordOf(config_.rank) + kRecordHeader;
  for (int64_t e = 0; e < experts_; ++e) put(layout.FirstSlot(config_.rank, e));
  for (int64_t e = 0; e < experts_; ++e) {
    put(layout.Kept(config_.rank, e));
    drops = drops || layout.Kept(config_.rank, e) < routes[e];
  }
  for (size_t rank = 0; rank < handle.out.rows.size(); ++rank) {
    put(handle.out.rows[rank] > 0 ? handle.out.begin[rank] : -1);
  }
  const RecvCounts& counts = handle.recv_counts;
  int64_t pads = 0;
  for (int64_t j = 0; j < local; ++j) {
    put(layout.Base(config_.rank * local + j) + counts.tokens_per_expert[static_cast<size_t>(j)]);
  }
  for (int64_t j = 0; j < local; ++j) {
    put(pads);
    pads += counts.padded_per_expert[static_cast<size_t>(j)] -
            counts.tokens_per_expert[static_cast<size_t>(j)];
  }
  put(pads);
  auto* device = layout_.as<int32_t>();
  RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(device, host, static_cast<size_t>(ints * kInt),
                                             cudaMemcpyHostToDevice, device_.stream()),
                             "sending the layout"));
  const int64_t routes_total = handle.token_count * handle.routes_per_token;
  if (drops) RETURN_IF_ERROR(dropped_.Reserve(device_, routes_total));
  AssignParams assign;
  assign.shape = ShapeOf(args, config_.world);
  assign.rank = config_.rank;
  assign.counts = tile_counts_.as<int32_t>();
  assign.first_slot = device;
  assign.kept = device + experts_;
  assign.wire_begin = device + 2 * experts_;
  assign.pad_begin = assign.wire_begin + config_.world;
  assign.pad_sums = assign.pad_begin + local;
  assign.own_slots = handle.own_slots;
  assign.tables = handle.tables;
  assign.dropped = drops ? dropped_.as<uint8_t>() : nullptr;
  RETURN_IF_ERROR(CudaStatus(LaunchAssign(assign, device_.stream()), "assigning slots"));
  RETURN_IF_ERROR(CudaStatus(
      cudaMemcpyAsync(handle.wire_begin, assign.wire_begin,
                      static_cast<size_t>(config_.world * kInt), cudaMemcpyDeviceToDevice,
                      device_.stream()),
      "keeping the layout"));
  if (!drops) return absl::OkStatus();
  handle.dropped.resize(static_cast<size_t>(routes_total));
  return device_.CopyToHost(handle.dropped.data(), dropped_.data(), routes_total);
}

// Each rank tells the others which slots its rows go to.
absl::Status NcclEp::ExchangeTables(NcclEpHandle& handle) {
  const int64_t row_bytes = handle.routes_per_token * kInt;
  WireRows in = handle.in;  // as laid out in recv_slots: with the own rows
  for (size_t rank = static_cast<size_t>(config_.rank) + 1; rank < in.begin.size(); ++rank) {
    in.begin[rank] += handle.own_rows;
  }
  const WirePart part = {handle.tables.wire_slots, handle.tables.recv_slots, row_bytes};
  return Exchange(handle.out, in, std::span(&part, 1));
}

}  // namespace expertd
