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

// The products, by what they make. W_gate_up is [L, H, 2I], W_down [L, I, H].
enum class Product : uint8_t {
  kInner = 0,   // h = x W_gate_up, u = act(gate) * up
  kOuter,       // z = u W_down
  kGradInner,   // grad_u = g W_down^T, made into grad_h at once
  kGradTokens,  // grad_x = grad_h W_gate_up^T
  kGradWeights  // dW += left^T right
};

// How the two consumers of a block make tiles of 256 columns.
enum class TileKind : uint8_t {
  kWide = 0,  // 128 rows, half of them each: the fewest bytes for each operation
  kNarrow     // 64 rows, half of the columns each: for experts with few rows
};
constexpr int RowsOf(TileKind kind) { return kind == TileKind::kWide ? 128 : 64; }
inline constexpr int kTileColumns = 256;

// Why the products cannot serve a layer at all; empty when they can.
std::string Refusal(const MlpConfig& config);
// Whether they can serve a call: fewer than 2^31 rows, and matrices at multiples of 16 bytes.
bool CanServe(const ExpertSegments& segments, std::initializer_list<const void*> matrices);

// How one product is cut; see TileGrid.
struct Plan {
  TileKind kind = TileKind::kWide;
  int cluster = 2;
};
std::string ToString(const Plan& plan);
bool HasKind(Product product, TileKind kind);
Plan PlanFor(Product product, const ExpertSegments& segments);

// The experts in tables of at most kMostExperts.
std::vector<ExpertTable> MakeTables(const ExpertSegments& segments);
bool HasRows(const ExpertTable& table);

// Pad rows that no tile of `tile_rows` rows reaches: those far past the last data row.
struct RowRange {
  int64_t begin = 0;
  int64_t rows = 0;
};
std::vector<RowRange> PadsOutsideTiles(const ExpertSegments& segments, int tile_rows);

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_PLAN_H_
