// Choices by thresholds; see sm90_plan.h.
#include "kernels/mlp/sm90_plan.h"

#include <algorithm>
#include <limits>

#include "base/strings.h"

namespace expertd::sm90 {
namespace {

// Copies move rows in pieces of 16 bytes.
constexpr int64_t kColumnMultiple = 8;
// Below so many rows for an expert, reading its weights takes longer than multiplying.
constexpr int64_t kFewRows = 64;

}  // namespace

std::string Refusal(const MlpConfig& config) {
  if (config.token_dtype != config.weight_dtype) {
    return StrCat("got tokens of ", DTypeName(config.token_dtype), " and weights of ",
                  DTypeName(config.weight_dtype), ", need one dtype");
  }
  if (config.token_dtype != DType::kBF16 && config.token_dtype != DType::kF16) {
    return StrCat("got ", DTypeName(config.token_dtype), ", need DTYPE_BF16 or DTYPE_F16");
  }
  for (int64_t size : {config.hidden, config.intermediate}) {
    if (size % kColumnMultiple != 0) {
      return StrCat("got a size of ", size, ", need a multiple of ", kColumnMultiple);
    }
  }
  if (2 * std::max(config.hidden, config.intermediate) > std::numeric_limits<int32_t>::max()) {
    return "sizes past 2^30";
  }
  return "";
}

bool CanServe(const ExpertSegments& segments, std::initializer_list<const void*> matrices) {
  if (segments.total > std::numeric_limits<int32_t>::max() - kTileColumns) return false;
  return std::all_of(matrices.begin(), matrices.end(), [](const void* matrix) {
    return reinterpret_cast<uintptr_t>(matrix) % 16 == 0;
  });
}

std::string ToString(const Plan& plan) {
  static constexpr const char* kNames[] = {"wide", "narrow"};
  return StrCat(kNames[static_cast<int>(plan.kind)], " ", RowsOf(plan.kind), "x", kTileColumns,
                " cluster=", plan.cluster);
}

bool HasKind(Product product, TileKind kind) {
  return kind == TileKind::kWide || product == Product::kInner || product == Product::kOuter;
}

Plan PlanFor(Product product, const ExpertSegments& segments) {
  int64_t rows = 0;
  int64_t busy = 0;
  for (int64_t count : *segments.counts) {
    rows += count;
    busy += count > 0 ? 1 : 0;
  }
  if (HasKind(product, TileKind::kNarrow) && rows <= kFewRows * busy) {
    return {.kind = TileKind::kNarrow, .cluster = 1};
  }
  return {};
}

std::vector<ExpertTable> MakeTables(const ExpertSegments& segments) {
  std::vector<ExpertTable> tables;
  int64_t begin = 0;
  for (size_t j = 0; j < segments.counts->size(); ++j) {
    if (j % kMostExperts == 0) tables.emplace_back().first = static_cast<int>(j);
    ExpertTable& table = tables.back();
    table.begin[table.experts] = static_cast<int32_t>(begin);
    table.count[table.experts] = static_cast<int32_t>((*segments.counts)[j]);
    table.padded[table.experts] = static_cast<int32_t>((*segments.padded)[j]);
    ++table.experts;
    begin += (*segments.padded)[j];
  }
  return tables;
}

bool HasRows(const ExpertTable& table) {
  return std::any_of(table.count, table.count + table.experts, [](int32_t n) { return n > 0; });
}

std::vector<RowRange> PadsOutsideTiles(const ExpertSegments& segments, int tile_rows) {
  std::vector<RowRange> pads;
  int64_t begin = 0;
  for (size_t j = 0; j < segments.counts->size(); ++j) {
    const int64_t reached = ((*segments.counts)[j] + tile_rows - 1) / tile_rows * tile_rows;
    const int64_t outside = (*segments.padded)[j] - reached;
    if (outside > 0) pads.push_back({begin + reached, outside});
    begin += (*segments.padded)[j];
  }
  return pads;
}

}  // namespace expertd::sm90
