// NcclEp's Prepare: validation, exchange of counts, what all ranks conclude from them.
#include <string>
#include <vector>

#include "base/error.h"
#include "base/status_macros.h"
#include "kernels/cuda/status.h"
#include "kernels/ep/nccl_ep.h"
#include "kernels/ep/route_kernels.h"
#include "kernels/ep/route_record.h"

namespace expertd {
namespace {

constexpr int64_t kInt = sizeof(int32_t);

int32_t Narrow(int64_t value) { return static_cast<int32_t>(value); }

}  // namespace

RouteShape NcclEp::ShapeOf(const PrepareArgs& args) const {
  return {.ids = args.routing.ids,
          .wide_ids = args.routing.ids_dtype == DType::kI64,
          .tokens = args.routing.tokens,
          .top_k = args.routing.top_k,
          .experts = args.expert_count,
          .world = config_.world};
}

// Counts on the device, all ranks' records to the host: the one wait of a step's communication.
absl::Status NcclEp::ExchangeRecords(const PrepareArgs& args, const absl::Status& own) {
  RouteShape shape = ShapeOf(args);
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
  RETURN_IF_ERROR(CudaStatus(LaunchCount(shape, counts, bad, device_.stream()), "counting routes"));
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
  if (HasBadRoute(RecordOf(config_.rank))) return OwnIdError(args);
  std::vector<const int32_t*> records;
  for (int64_t rank = 0; rank < config_.world; ++rank) records.push_back(RecordOf(rank));
  return JudgePeers(records, config_.rank);
}

absl::StatusOr<std::unique_ptr<EpHandle>> NcclEp::Prepare(const OpContext& context,
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
  RETURN_IF_ERROR(ExchangeRecords(args, own));
  RETURN_IF_ERROR(JudgeRecords(args, own));
  std::vector<int64_t> counts;
  counts.reserve(static_cast<size_t>(config_.world * experts_));
  for (int64_t rank = 0; rank < config_.world; ++rank) {
    const int32_t* first = RecordOf(rank) + kRecordHeader;
    counts.insert(counts.end(), first, first + experts_);
  }
  ASSIGN_OR_RETURN(const EpLayout layout, EpLayout::Create({.world = config_.world,
                                                            .experts = args.expert_count,
                                                            .alignment = args.alignment,
                                                            .capacity = config_.max_recv_rows,
                                                            .policy = config_.capacity_policy},
                                                           counts));
  auto handle = std::make_unique<NcclEpHandle>();
  RETURN_IF_ERROR(FillHandle(args, layout, *handle));
  return std::unique_ptr<EpHandle>(std::move(handle));
}

}  // namespace expertd
