// NcclEp's handles: rows between ranks, slots of routes, and the tables that ranks send each other.
#include <utility>

#include "base/status_macros.h"
#include "kernels/cuda/status.h"
#include "kernels/ep/nccl_ep.h"
#include "kernels/ep/route_kernels.h"

namespace expertd {
namespace {

constexpr int64_t kInt = sizeof(int32_t);

int32_t Narrow(int64_t value) { return static_cast<int32_t>(value); }

}  // namespace

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

// A token whose routes to a rank were all dropped may still travel there, for which tokens those
// are only their rank knows; but nothing travels to a rank that keeps none of this rank's routes.
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

// Writes what LaunchAssign reads to pinned memory: first slots [E], kept routes [E], wire begins
// [R], pad begins [L], pad sums [L + 1]. The last user of that memory was done before this Prepare
// read its counts.
int64_t NcclEp::WriteLayout(const EpLayout& layout, const NcclEpHandle& handle) {
  const int64_t local = layout.local_experts();
  const RecvCounts& counts = handle.recv_counts;
  auto* host = static_cast<int32_t*>(pinned_layout_.get());
  int64_t size = 0;
  const auto put = [&](int64_t value) { host[size++] = Narrow(value); };
  for (int64_t e = 0; e < experts_; ++e) put(layout.FirstSlot(config_.rank, e));
  for (int64_t e = 0; e < experts_; ++e) put(layout.Kept(config_.rank, e));
  for (size_t rank = 0; rank < handle.out.rows.size(); ++rank) {
    put(handle.out.rows[rank] > 0 ? handle.out.begin[rank] : -1);
  }
  for (int64_t j = 0; j < local; ++j) {
    put(layout.Base(config_.rank * local + j) + counts.tokens_per_expert[static_cast<size_t>(j)]);
  }
  int64_t pads = 0;
  for (size_t j = 0; j < counts.padded_per_expert.size(); ++j) {
    put(pads);
    pads += counts.padded_per_expert[j] - counts.tokens_per_expert[j];
  }
  put(pads);
  return size;
}

// Whether any of this rank's routes are over the capacity of their experts.
bool NcclEp::DropsRoutes(const EpLayout& layout) const {
  const int32_t* routes = RecordOf(config_.rank) + kRecordHeader;
  for (int64_t e = 0; e < experts_; ++e) {
    if (layout.Kept(config_.rank, e) < routes[e]) return true;
  }
  return false;
}

absl::Status NcclEp::AssignRoutes(const PrepareArgs& args, const EpLayout& layout,
                                  NcclEpHandle& handle) {
  const int64_t ints = WriteLayout(layout, handle);
  RETURN_IF_ERROR(layout_.Reserve(device_, ints * kInt));
  auto* device = layout_.as<int32_t>();
  RETURN_IF_ERROR(
      CudaStatus(cudaMemcpyAsync(device, pinned_layout_.get(), static_cast<size_t>(ints * kInt),
                                 cudaMemcpyHostToDevice, device_.stream()),
                 "sending the layout"));
  const int64_t routes = handle.token_count * handle.routes_per_token;
  const bool drops = DropsRoutes(layout);
  if (drops) RETURN_IF_ERROR(dropped_.Reserve(device_, routes));
  AssignParams assign;
  assign.shape = ShapeOf(args);
  assign.rank = config_.rank;
  assign.counts = tile_counts_.as<int32_t>();
  assign.first_slot = device;
  assign.kept = device + experts_;
  assign.wire_begin = device + 2 * experts_;
  assign.pad_begin = assign.wire_begin + config_.world;
  assign.pad_sums = assign.pad_begin + layout.local_experts();
  assign.own_slots = handle.own_slots;
  assign.tables = handle.tables;
  assign.dropped = drops ? dropped_.as<uint8_t>() : nullptr;
  RETURN_IF_ERROR(CudaStatus(LaunchAssign(assign, device_.stream()), "assigning slots"));
  RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(handle.wire_begin, assign.wire_begin,
                                             static_cast<size_t>(config_.world * kInt),
                                             cudaMemcpyDeviceToDevice, device_.stream()),
                             "keeping the layout"));
  if (!drops) return absl::OkStatus();
  handle.dropped.resize(static_cast<size_t>(routes));
  return device_.CopyToHost(handle.dropped.data(), dropped_.data(), routes);
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
