// LsaEp's Prepare: one kernel, one wait for its record, what all ranks conclude from it.
#include <algorithm>
#include <limits>
#include <string>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/cuda/status.h"
#include "kernels/ep/lsa_ep.h"
#include "kernels/ep/route_kernels.h"
#include "kernels/ep/route_record.h"

namespace expertd {
namespace {

constexpr int64_t kInt = sizeof(int32_t);

int32_t Narrow(int64_t value) { return static_cast<int32_t>(value); }

// Ints of a part, so that each begins on 256 bytes.
int64_t Padded(int64_t ints) { return (ints + 63) / 64 * 64; }

}  // namespace

EpLayoutConfig LsaEp::LayoutConfigOf(const PrepareArgs& args) const {
  return {.world = config_.world,
          .experts = args.expert_count,
          .alignment = args.alignment,
          .capacity = config_.max_recv_rows,
          .policy = config_.capacity_policy};
}

// Everything that the kernel writes has room for the worst case: the host learns the sizes later.
absl::StatusOr<LsaPrepareParams> LsaEp::PlanPrepare(const PrepareArgs& args,
                                                    const absl::Status& own, LsaHandle& handle) {
  const int64_t local = args.expert_count / config_.world;
  const int64_t top_k = args.routing.top_k;
  const int64_t tokens = own.ok() ? args.routing.tokens : 0;
  const int64_t slots = Padded(config_.world * layout_.rows * top_k);
  const int64_t owners = Padded(tokens * top_k);
  const int64_t pads = Padded(local * (args.alignment - 1));
  ASSIGN_OR_RETURN(handle.memory,
                   device_.Allocate((slots + owners + pads + Padded(config_.world)) * kInt));
  const int64_t items = config_.world * LsaTiles(layout_);
  RETURN_IF_ERROR(counts_.Reserve(device_, (Padded(args.expert_count * items) + Padded(items) +
                                            config_.world * (kRecordHeader + args.expert_count)) *
                                               kInt));
  LsaPrepareParams params;
  params.ids = args.routing.ids;
  params.wide_ids = args.routing.ids_dtype == DType::kI64;
  params.tokens = Narrow(tokens);
  params.top_k = Narrow(top_k);
  params.experts = Narrow(args.expert_count);
  params.alignment = Narrow(args.alignment);
  params.reject = own.ok() ? 0 : static_cast<int32_t>(ReasonOf(own)) + 1;
  params.limit = Narrow(
      std::min<int64_t>(ExpertLimit(LayoutConfigOf(args)), std::numeric_limits<int32_t>::max()));
  params.slots = handle.memory.as<int32_t>();
  params.owner = params.slots + slots;
  params.pad_slots = params.owner + owners;
  params.sources = params.pad_slots + pads;
  if (config_.capacity_policy == CapacityPolicy::kDrop) {
    RETURN_IF_ERROR(dropped_.Reserve(device_, tokens * top_k));
    params.dropped = dropped_.as<uint8_t>();
  }
  params.cells = static_cast<LsaRecordCell*>(pinned_record_.get());
  params.nonce = ++nonce_;
  params.counts = counts_.as<int32_t>();
  params.bad = params.counts + Padded(args.expert_count * items);
  params.record = params.bad + Padded(items);
  handle.row_alignment = args.alignment;
  handle.routes = {.tokens = params.tokens,
                   .top_k = params.top_k,
                   .slots = params.slots,
                   .owner = params.owner,
                   .sources = params.sources,
                   .pad_slots = params.pad_slots};
  return params;
}

// The one wait of a step's communication. Not for the kernel's end: it still writes tables.
absl::Status LsaEp::AwaitRecord() {
  auto* cells = static_cast<LsaRecordCell*>(pinned_record_.get());
  const int64_t numbers = config_.world * (kRecordHeader + experts_);
  record_.resize(static_cast<size_t>(3 * LsaRecordCells(numbers)));
  int64_t turn = 0;
  for (int64_t i = 0; i < LsaRecordCells(numbers);) {
    const bool ended = turn % 256 == 255 && cudaEventQuery(done_.get()) != cudaErrorNotReady;
    // A cell is stored as a whole, so its nonce tells of its values.
    if (std::atomic_ref<uint32_t>(cells[i].nonce).load(std::memory_order_acquire) == nonce_) {
      std::copy_n(cells[i].value, 3, record_.begin() + 3 * i);
      ++i;
      continue;
    }
    if (++turn % 256 == 0) RETURN_IF_ERROR(Check());
    if (!ended) continue;
    RETURN_IF_ERROR(CudaStatus(cudaEventQuery(done_.get()), "preparing"));
    RETURN_IF_ERROR(Finished());
    return Error(Reason::kInternal).Text("prepare ended without a record");
  }
  return absl::OkStatus();
}

// The ids are read back only when they are known to be bad: for the positions.
absl::Status LsaEp::OwnIdError(const PrepareArgs& args) {
  RoutingView routing = args.routing;
  const int64_t bytes =
      routing.tokens * routing.top_k * static_cast<int64_t>(DTypeSize(routing.ids_dtype));
  std::string ids(static_cast<size_t>(bytes), '\0');
  RETURN_IF_ERROR(device_.CopyToHost(ids.data(), routing.ids, bytes));
  routing.ids = ids.data();
  RETURN_IF_ERROR(ValidateIds(routing, args.expert_count));
  return Error(Reason::kInternal).Text("ids were bad on the device and are good on the host");
}

absl::Status LsaEp::JudgeRecord(const PrepareArgs& args, const absl::Status& own) {
  RETURN_IF_ERROR(own);
  if (HasBadRoute(RecordOf(config_.rank))) return OwnIdError(args);
  std::vector<const int32_t*> records;
  for (int64_t rank = 0; rank < config_.world; ++rank) records.push_back(RecordOf(rank));
  return JudgePeers(records, config_.rank);
}

absl::Status LsaEp::FillHandle(const PrepareArgs& args, const EpLayout& layout, LsaHandle& handle) {
  handle.recv_counts = layout.CountsOf(config_.rank);
  int64_t pads = handle.recv_counts.total;
  for (int64_t routes : handle.recv_counts.tokens_per_expert) pads -= routes;
  handle.routes.pad_rows = Narrow(pads);
  bool drops = false;
  for (int64_t e = 0; e < args.expert_count; ++e) {
    drops = drops || layout.Kept(config_.rank, e) < RecordOf(config_.rank)[kRecordHeader + e];
  }
  for (int64_t rank = 0; rank < config_.world; ++rank) {
    handle.routes.most_tokens = std::max(handle.routes.most_tokens, RecordOf(rank)[kRecordTokens]);
  }
  if (!drops) return absl::OkStatus();
  handle.dropped.resize(static_cast<size_t>(handle.tokens() * handle.top_k()));
  return device_.CopyToHost(handle.dropped.data(), dropped_.data(),
                            static_cast<int64_t>(handle.dropped.size()));
}

absl::StatusOr<std::unique_ptr<EpHandle>> LsaEp::Prepare(const OpContext& context,
                                                         const PrepareArgs& args) {
  RETURN_IF_ERROR(Begin(context));
  if (args.expert_count < config_.world || args.expert_count % config_.world != 0 ||
      args.expert_count > config_.max_experts) {
    // The same value on every rank, so all of them stop here.
    return Error(Reason::kShardingMismatch)
        .Text("experts: got ", args.expert_count, ", need a multiple of ", config_.world, " up to ",
              config_.max_experts);
  }
  const absl::Status own = CheckRouting(args, config_);
  experts_ = args.expert_count;
  PrepareArgs planned = args;
  if (!own.ok()) {
    // It still tells the others; what is wrong may be the very numbers that sizes come from.
    planned.routing.top_k = std::clamp<int64_t>(args.routing.top_k, 1, config_.max_top_k);
    planned.alignment = 1;
  }
  auto handle = std::make_unique<LsaHandle>();
  ASSIGN_OR_RETURN(const LsaPrepareParams params, PlanPrepare(planned, own, *handle));
  ASSIGN_OR_RETURN(const LsaOp op, NextOp(kIdsPart));
  RETURN_IF_ERROR(Queued(
      LaunchLsaPrepare(op, params, ScatterShape(WorkOf(*handle, 0)).blocks, device_.stream()),
      "preparing"));
  RETURN_IF_ERROR(AwaitRecord());
  RETURN_IF_ERROR(JudgeRecord(args, own));
  std::vector<int64_t> counts;
  counts.reserve(static_cast<size_t>(config_.world * experts_));
  for (int64_t rank = 0; rank < config_.world; ++rank) {
    const int32_t* first = RecordOf(rank) + kRecordHeader;
    counts.insert(counts.end(), first, first + experts_);
  }
  ASSIGN_OR_RETURN(const EpLayout layout, EpLayout::Create(LayoutConfigOf(args), counts));
  RETURN_IF_ERROR(FillHandle(args, layout, *handle));
  return std::unique_ptr<EpHandle>(std::move(handle));
}

}  // namespace expertd
