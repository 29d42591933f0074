// CpuEp's all-reduce: sums in rank order, the same bits on every rank.
#include <algorithm>
#include <cstring>

#include "base/status_macros.h"
#include "kernels/cpu/cpu_ep.h"
#include "kernels/cpu/float_convert.h"

namespace expertd {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);
// Up to this size an all-reduce sends everything to everyone in one round.
constexpr int64_t kSmallReduceBytes = 64 << 10;

}  // namespace

absl::Status CpuEp::AllReduceSum(const OpContext& context, float* data, int64_t count) {
  if (count * config_.world * kFloatBytes <= kSmallReduceBytes) {
    return AllReduceSmall(context, data, count);
  }
  return AllReduceLarge(context, data, count);
}

absl::Status CpuEp::AllReduceSmall(const OpContext& context, float* data, int64_t count) {
  const auto bytes = [&](int64_t) { return count * kFloatBytes; };
  LayOutMessages(bytes, bytes);
  for (size_t rank = 0; rank < send_.size(); ++rank) {
    if (!send_[rank].empty()) std::memcpy(send_data_[rank], data, send_[rank].size());
  }
  RETURN_IF_ERROR(transport_->Exchange(context, send_, recv_));
  float* sum = sum_arena_.ReserveArray<float>(static_cast<size_t>(count));
  for (int64_t rank = 0; rank < config_.world; ++rank) {
    const void* part = rank == config_.rank ? static_cast<const void*>(data) : RecvData(rank);
    if (rank == 0) {
      RowToF32(DType::kF32, part, count, sum);
    } else {
      AddRow(DType::kF32, part, count, sum);
    }
  }
  std::copy_n(sum, count, data);
  return absl::OkStatus();
}

// Rank r sums chunk r of everyone's data in rank order and sends the sum to all: the order of the
// additions, and so the bits, are those of AllReduceSmall.
absl::Status CpuEp::AllReduceLarge(const OpContext& context, float* data, int64_t count) {
  const int64_t chunk = (count + config_.world - 1) / config_.world;
  const auto begin_of = [&](int64_t rank) { return std::min(rank * chunk, count); };
  const auto count_of = [&](int64_t rank) { return begin_of(rank + 1) - begin_of(rank); };
  const auto bytes_of = [&](int64_t rank) { return count_of(rank) * kFloatBytes; };
  const int64_t mine = count_of(config_.rank);
  LayOutMessages(bytes_of, [&](int64_t) { return mine * kFloatBytes; });
  for (int64_t rank = 0; rank < config_.world; ++rank) {
    const auto index = static_cast<size_t>(rank);
    if (send_[index].empty()) continue;
    std::memcpy(send_data_[index], data + begin_of(rank), send_[index].size());
  }
  RETURN_IF_ERROR(transport_->Exchange(context, send_, recv_));
  float* sum = sum_arena_.ReserveArray<float>(static_cast<size_t>(mine));
  for (int64_t rank = 0; rank < config_.world; ++rank) {
    const void* part = rank == config_.rank
                           ? static_cast<const void*>(data + begin_of(config_.rank))
                           : RecvData(rank);
    if (rank == 0) {
      RowToF32(DType::kF32, part, mine, sum);
    } else {
      AddRow(DType::kF32, part, mine, sum);
    }
  }
  std::copy_n(sum, mine, data + begin_of(config_.rank));

  LayOutMessages([&](int64_t) { return mine * kFloatBytes; }, bytes_of);
  for (size_t rank = 0; rank < send_.size(); ++rank) {
    if (!send_[rank].empty()) std::memcpy(send_data_[rank], sum, send_[rank].size());
  }
  RETURN_IF_ERROR(transport_->Exchange(context, send_, recv_));
  for (int64_t rank = 0; rank < config_.world; ++rank) {
    if (rank == config_.rank || count_of(rank) == 0) continue;
    std::memcpy(data + begin_of(rank), RecvData(rank), recv_[static_cast<size_t>(rank)].size());
  }
  return absl::OkStatus();
}

}  // namespace expertd
