// CpuEp's row operations: tokens out to slots, slots back to tokens, summed.
#include "kernels/cpu/cpu_ep.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/cpu/float_convert.h"

namespace expertd {
namespace {

constexpr int64_t kMessageAlignment = 64;
constexpr int64_t kFloatBytes = sizeof(float);

int64_t RowBytes(const ConstMatrix& matrix) {
  return matrix.cols * static_cast<int64_t>(DTypeSize(matrix.dtype));
}

const std::byte* RowOf(const ConstMatrix& matrix, int64_t row) {
  return static_cast<const std::byte*>(matrix.data) + row * RowBytes(matrix);
}

std::byte* RowOf(const Matrix& matrix, int64_t row) {
  return static_cast<std::byte*>(matrix.data) + row * RowBytes(matrix);
}

const CpuEpHandle& Cast(const EpHandle& handle) { return static_cast<const CpuEpHandle&>(handle); }

int64_t Size(size_t size) { return static_cast<int64_t>(size); }

// sum[0, cols) = f32 sum over the routes of one row, in their order.
void SumSlots(const ConstMatrix& slots, const float* factors, std::span<const WireRoute> routes,
              float* sum) {
  bool first = true;
  for (const WireRoute& route : routes) {
    const std::byte* row = RowOf(slots, route.slot);
    if (factors != nullptr) {
      if (first) std::fill(sum, sum + slots.cols, 0.0f);
      AddScaledRow(slots.dtype, row, factors[route.slot], slots.cols, sum);
    } else if (first) {
      RowToF32(slots.dtype, row, slots.cols, sum);
    } else {
      AddRow(slots.dtype, row, slots.cols, sum);
    }
    first = false;
  }
}

// The routes from `begin` on that belong to the same row.
std::span<const WireRoute> RowRoutes(std::span<const WireRoute> routes, size_t begin) {
  size_t end = begin;
  while (end < routes.size() && routes[end].row == routes[begin].row) ++end;
  return routes.subspan(begin, end - begin);
}

void ZeroPads(const RecvCounts& counts, const Matrix& slots, float* values) {
  int64_t base = 0;
  for (size_t j = 0; j < counts.padded_per_expert.size(); ++j) {
    const int64_t begin = base + counts.tokens_per_expert[j];
    base += counts.padded_per_expert[j];
    if (begin == base) continue;
    std::memset(RowOf(slots, begin), 0, static_cast<size_t>((base - begin) * RowBytes(slots)));
    if (values != nullptr) std::fill(values + begin, values + base, 0.0f);
  }
}

}  // namespace

CpuEp::CpuEp(const EpGroupConfig& config, std::unique_ptr<CpuTransport> transport)
    : config_(config),
      transport_(std::move(transport)),
      send_(static_cast<size_t>(config.world)),
      send_data_(static_cast<size_t>(config.world)),
      recv_(static_cast<size_t>(config.world)),
      cursor_(static_cast<size_t>(config.world)) {}

absl::StatusOr<std::unique_ptr<CpuEp>> CpuEp::Create(const EpGroupConfig& config,
                                                     std::unique_ptr<CpuTransport> transport) {
  Violations violations;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto check = [&](std::string_view name, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return;
    violations.Add(Reason::kConfigInvalid, std::string(name),
                   StrCat("got ", value, ", need ", low, " to ", high));
  };
  check("world", config.world, 1, transport->capabilities().max_world);
  check("rank", config.rank, 0, config.world - 1);
  check("max_recv_rows_per_rank", config.max_recv_rows, 1, kMost);
  check("max_tokens_per_rank", config.max_tokens_per_rank, 0, kMost);
  RETURN_IF_ERROR(violations.ToStatus("EP group"));
  return std::unique_ptr<CpuEp>(new CpuEp(config, std::move(transport)));
}

void CpuEp::LayOutMessages(const SizeOf& send_size, const SizeOf& recv_size) {
  const auto place = [&](const SizeOf& size_of, ByteArena& arena, const auto& set) {
    const auto padded = [](int64_t size) {
      return (size + kMessageAlignment - 1) / kMessageAlignment * kMessageAlignment;
    };
    int64_t sum = 0;
    for (int64_t rank = 0; rank < config_.world; ++rank) {
      if (rank != config_.rank) sum += padded(size_of(rank));
    }
    std::byte* next = arena.Reserve(static_cast<size_t>(sum));
    for (int64_t rank = 0; rank < config_.world; ++rank) {
      const int64_t size = rank == config_.rank ? 0 : size_of(rank);
      set(static_cast<size_t>(rank), next, static_cast<size_t>(size));
      next += padded(size);
    }
  };
  place(send_size, send_arena_, [&](size_t rank, std::byte* data, size_t size) {
    send_data_[rank] = data;
    send_[rank] = ConstBytes(data, size);
  });
  place(recv_size, recv_arena_,
        [&](size_t rank, std::byte* data, size_t size) { recv_[rank] = MutableBytes(data, size); });
}

absl::Status CpuEp::CheckMatrices(const CpuEpHandle& handle, ConstMatrix tokens,
                                  ConstMatrix slots) const {
  if (tokens.rows == handle.token_count && slots.rows >= handle.recv_counts.total &&
      tokens.cols == slots.cols && tokens.dtype == slots.dtype && DTypeSize(tokens.dtype) > 0) {
    return absl::OkStatus();
  }
  return Error(Reason::kShapeMismatch)
      .Text("rank ", config_.rank, ": tokens [", tokens.rows, ", ", tokens.cols, "] ",
            DTypeName(tokens.dtype), " and slots [", slots.rows, ", ", slots.cols, "] ",
            DTypeName(slots.dtype), ", need ", handle.token_count, " and at least ",
            handle.recv_counts.total, " rows of one width and dtype");
}

absl::Status CpuEp::Dispatch(const OpContext& context, const EpHandle& handle, ConstMatrix x,
                             const float* topk_weights, Matrix recv_x, float* recv_w) {
  return Scatter(context, Cast(handle),
                 {.rows = x, .route_values = topk_weights, .slots = recv_x, .slot_values = recv_w});
}

absl::Status CpuEp::CombineBackward(const OpContext& context, const EpHandle& handle,
                                    ConstMatrix grad_y, const float* slot_weights, Matrix grad_z) {
  return Scatter(context, Cast(handle),
                 {.rows = grad_y, .slots = grad_z, .slot_factors = slot_weights});
}

absl::Status CpuEp::Combine(const OpContext& context, const EpHandle& handle, ConstMatrix z,
                            const float* slot_weights, Matrix y) {
  return Gather(context, Cast(handle), {.slots = z, .slot_factors = slot_weights, .rows = y});
}

absl::Status CpuEp::DispatchBackward(const OpContext& context, const EpHandle& handle,
                                     ConstMatrix grad_recv_x, const float* grad_recv_w,
                                     Matrix grad_x, float* grad_topk_weights) {
  return Gather(context, Cast(handle),
                {.slots = grad_recv_x,
                 .slot_values = grad_recv_w,
                 .rows = grad_x,
                 .route_values = grad_topk_weights});
}

absl::Status CpuEp::CheckValues(const CpuEpHandle& handle, const float* route_values,
                                const float* slot_values) const {
  const bool with_values = route_values != nullptr || slot_values != nullptr;
  const bool routes_missing =
      route_values == nullptr && handle.token_count * handle.routes_per_token > 0;
  const bool slots_missing = slot_values == nullptr && handle.recv_counts.total > 0;
  if (!with_values || (!routes_missing && !slots_missing)) return absl::OkStatus();
  return Error(Reason::kShapeMismatch)
      .Text("rank ", config_.rank, ": route weights given for one of tokens and slots, need both");
}

// A message is [routes] f32 values, when there are any, then [rows] rows. A rank without tokens may
// have null route values and one without received rows null slot values, whatever the others have:
// either pointer says that values travel, and an empty message does not tell.
absl::Status CpuEp::Scatter(const OpContext& context, const CpuEpHandle& handle,
                            const ScatterArgs& args) {
  RETURN_IF_ERROR(CheckMatrices(handle, args.rows, args.slots));
  RETURN_IF_ERROR(CheckValues(handle, args.route_values, args.slot_values));
  if (args.slot_factors != nullptr && !IsFloat(args.rows.dtype)) {
    return Error(Reason::kDtypeUnsupported)
        .Text("weighted rows: got ", DTypeName(args.rows.dtype), ", need a float dtype");
  }
  const int64_t row_bytes = RowBytes(args.rows);
  const bool with_values = args.route_values != nullptr || args.slot_values != nullptr;
  const int64_t value_bytes = with_values ? kFloatBytes : 0;
  LayOutMessages(
      [&](int64_t rank) {
        const RouteList& list = handle.to[static_cast<size_t>(rank)];
        return Size(list.routes.size()) * value_bytes + list.rows() * row_bytes;
      },
      [&](int64_t rank) {
        const auto index = static_cast<size_t>(rank);
        return Size(handle.from[index].size()) * value_bytes + handle.from_rows[index] * row_bytes;
      });
  for (size_t rank = 0; rank < send_.size(); ++rank) {
    if (send_[rank].empty()) continue;
    std::byte* next = send_data_[rank];
    if (with_values) {
      for (int64_t position : handle.to[rank].positions) {
        std::memcpy(next, &args.route_values[position], kFloatBytes);
        next += kFloatBytes;
      }
    }
    for (int64_t token : handle.to[rank].tokens) {
      std::memcpy(next, RowOf(args.rows, token), static_cast<size_t>(row_bytes));
      next += row_bytes;
    }
  }
  RETURN_IF_ERROR(transport_->Exchange(context, send_, recv_));
  for (int64_t source = 0; source < config_.world; ++source) ScatterFrom(handle, source, args);
  ZeroPads(handle.recv_counts, args.slots, args.slot_values);
  return absl::OkStatus();
}

void CpuEp::ScatterFrom(const CpuEpHandle& handle, int64_t source, const ScatterArgs& args) {
  const bool own = source == config_.rank;
  const std::vector<WireRoute>& routes = handle.RoutesFrom(source, config_.rank);
  const RouteList& own_list = handle.to[static_cast<size_t>(config_.rank)];
  const std::byte* message = RecvData(source);
  const bool with_values = args.slot_values != nullptr;
  const std::byte* rows = message + (with_values ? Size(routes.size()) * kFloatBytes : 0);
  const int64_t row_bytes = RowBytes(args.rows);
  for (size_t i = 0; i < routes.size(); ++i) {
    const auto [row, slot] = routes[i];
    const std::byte* from =
        own ? RowOf(args.rows, own_list.tokens[static_cast<size_t>(row)]) : rows + row * row_bytes;
    std::byte* to = RowOf(args.slots, slot);
    if (args.slot_factors != nullptr) {
      ScaleRow(args.rows.dtype, from, args.slot_factors[slot], args.rows.cols, to);
    } else {
      std::memcpy(to, from, static_cast<size_t>(row_bytes));
    }
    if (!with_values) continue;
    const void* value = own ? static_cast<const void*>(&args.route_values[own_list.positions[i]])
                            : message + Size(i) * kFloatBytes;
    std::memcpy(&args.slot_values[slot], value, kFloatBytes);
  }
}

absl::Status CpuEp::Gather(const OpContext& context, const CpuEpHandle& handle,
                           const GatherArgs& args) {
  RETURN_IF_ERROR(CheckMatrices(handle, args.rows, args.slots));
  RETURN_IF_ERROR(CheckValues(handle, args.route_values, args.slot_values));
  if (!IsFloat(args.rows.dtype)) {
    return Error(Reason::kDtypeUnsupported)
        .Text("summed rows: got ", DTypeName(args.rows.dtype), ", need a float dtype");
  }
  const int64_t row_bytes = RowBytes(args.rows);
  const bool with_values = args.route_values != nullptr || args.slot_values != nullptr;
  const int64_t value_bytes = with_values ? kFloatBytes : 0;
  LayOutMessages(
      [&](int64_t rank) {
        const auto index = static_cast<size_t>(rank);
        return Size(handle.from[index].size()) * value_bytes + handle.from_rows[index] * row_bytes;
      },
      [&](int64_t rank) {
        const RouteList& list = handle.to[static_cast<size_t>(rank)];
        return Size(list.routes.size()) * value_bytes + list.rows() * row_bytes;
      });
  for (int64_t rank = 0; rank < config_.world; ++rank) PackPartials(handle, rank, args);
  RETURN_IF_ERROR(transport_->Exchange(context, send_, recv_));
  AddPartials(handle, args);
  return absl::OkStatus();
}

void CpuEp::PackPartials(const CpuEpHandle& handle, int64_t target, const GatherArgs& args) {
  const auto index = static_cast<size_t>(target);
  if (send_[index].empty()) return;
  const std::vector<WireRoute>& routes = handle.from[index];
  std::byte* next = send_data_[index];
  if (args.slot_values != nullptr) {
    for (const WireRoute& route : routes) {
      std::memcpy(next, &args.slot_values[route.slot], kFloatBytes);
      next += kFloatBytes;
    }
  }
  const int64_t cols = args.slots.cols;
  const int64_t row_bytes = RowBytes(args.slots);
  float* sum = sum_arena_.ReserveArray<float>(static_cast<size_t>(2 * cols));
  for (size_t i = 0; i < routes.size(); next += row_bytes) {
    const std::span<const WireRoute> row = RowRoutes(routes, i);
    if (row.size() == 1 && args.slot_factors == nullptr) {
      std::memcpy(next, RowOf(args.slots, row[0].slot), static_cast<size_t>(row_bytes));
    } else {
      SumSlots(args.slots, args.slot_factors, row, sum);
      RowFromF32(args.slots.dtype, sum, cols, next);
    }
    i += row.size();
  }
}

void CpuEp::AddPartials(const CpuEpHandle& handle, const GatherArgs& args) {
  const int64_t cols = args.rows.cols;
  const int64_t row_bytes = RowBytes(args.rows);
  if (args.route_values != nullptr) {
    std::fill_n(args.route_values, handle.token_count * handle.routes_per_token, 0.0f);
  }
  std::vector<const std::byte*> rows(static_cast<size_t>(config_.world));
  for (int64_t rank = 0; rank < config_.world; ++rank) {
    const auto index = static_cast<size_t>(rank);
    const RouteList& list = handle.to[index];
    rows[index] = RecvData(rank);
    cursor_[index] = 0;
    if (args.route_values == nullptr) continue;
    for (size_t i = 0; i < list.positions.size(); ++i) {
      const void* value = rank == config_.rank
                              ? static_cast<const void*>(&args.slot_values[list.routes[i].slot])
                              : rows[index] + Size(i) * kFloatBytes;
      std::memcpy(&args.route_values[list.positions[i]], value, kFloatBytes);
    }
    rows[index] += Size(list.positions.size()) * kFloatBytes;
  }

  float* sum = sum_arena_.ReserveArray<float>(static_cast<size_t>(2 * cols));
  float* own = sum + cols;
  size_t own_route = 0;
  for (int64_t t = 0; t < handle.token_count; ++t) {
    bool first = true;
    for (size_t rank = 0; rank < rows.size(); ++rank) {
      const RouteList& list = handle.to[rank];
      size_t& row = cursor_[rank];
      if (row == list.tokens.size() || list.tokens[row] != t) continue;
      const std::byte* partial = rows[rank] + Size(row) * row_bytes;
      DType dtype = args.rows.dtype;
      if (static_cast<int64_t>(rank) == config_.rank) {
        const std::span<const WireRoute> routes = RowRoutes(list.routes, own_route);
        SumSlots(args.slots, args.slot_factors, routes, own);
        own_route += routes.size();
        partial = reinterpret_cast<const std::byte*>(own);
        dtype = DType::kF32;
      }
      if (first) {
        RowToF32(dtype, partial, cols, sum);
      } else {
        AddRow(dtype, partial, cols, sum);
      }
      first = false;
      ++row;
    }
    if (first) std::fill(sum, sum + cols, 0.0f);
    RowFromF32(args.rows.dtype, sum, cols, RowOf(args.rows, t));
  }
}

}  // namespace expertd
