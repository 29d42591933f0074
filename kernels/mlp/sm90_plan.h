// Pure: from the shape of a layer and its segments to tiles and tables of the `sm90` products.
#ifndef KERNELS_MLP_SM90_PLAN_H_
#define KERNELS_MLP_SM90_PLAN_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "kernels/expert_mlp.h"
#include "kernels/mlp/sm90_tiles.h"

namespace expertd::sm90 {

// Rows of the narrow tiles, for experts with few rows; only the forward products have them.
inline constexpr int kNarrowRows = 64;
inline constexpr int kWideRows = 128;
inline constexpr int kTileColumns = 256;

// Why the products cannot serve a layer at all; empty when they can.
std::string Refusal(const MlpConfig& config);
// Whether they can serve a call: fewer than 2^31 rows, and matrices at multiples of 16 bytes.
bool CanServe(const ExpertSegments& segments, std::initializer_list<const void*> matrices);

// How one product is cut; see TileGrid.
struct Plan {
  int tile_rows = kWideRows;
  int cluster = 2;
  int stagger = 2;
  int group = 8;
  int fetch = 1;
};
std::string ToString(const Plan& plan);
Plan PlanForward(const ExpertSegments& segments);

// The experts in tables of at most kMostExperts.
std::vector<ExpertTable> MakeTables(const ExpertSegments& segments);
bool HasRows(const ExpertTable& table);

// Pad rows that no row tile of `tile_rows` rows reaches: those far past the last data row.
struct RowRange {
  int64_t begin = 0;
  int64_t rows = 0;
};
std::vector<RowRange> PadsOutsideTiles(const ExpertSegments& segments, int tile_rows);

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_PLAN_H_
