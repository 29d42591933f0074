// Pure: which output tile each cluster of the grouped matrix products makes at each turn.
//
// A product is cut into units, numbered expert by expert; cluster c of n makes units c, c + n, ...
// A unit is one tile for each block of the cluster. The two blocks of a pair always share one
// operand, so that each loads half of it for both: the right one when they make two row tiles of
// the same columns, the left one when an expert's last row tile is left over and they make two
// column tiles of it. Runs on the host and in kernels.
#ifndef KERNELS_MLP_SM90_TILES_H_
#define KERNELS_MLP_SM90_TILES_H_

#include <cstdint>

namespace expertd::sm90 {

// Experts of one launch; a layer with more takes several launches. Passed by value to kernels.
inline constexpr int kMostExperts = 256;
struct ExpertTable {
  int experts = 0;
  int first = 0;  // expert 0 of the table is this one of the layer
  int32_t begin[kMostExperts] = {};
  int32_t count[kMostExperts] = {};
  int32_t padded[kMostExperts] = {};
};

enum class Share : uint8_t { kNone = 0, kLeft, kRight };

struct Tile {
  int expert = -1;  // of the table; -1: there is none
  int row = 0;      // index of the row tile within the expert
  int column = 0;   // index of the column tile
  Share share = Share::kNone;
};

constexpr int CeilDiv(int a, int b) { return (a + b - 1) / b; }

// Units of an expert with that many row and column tiles.
constexpr int UnitsOf(int rows, int columns, int cluster) {
  if (cluster == 1) return rows * columns;
  return rows / 2 * columns + rows % 2 * CeilDiv(columns, 2);
}

// Unit `unit` of an expert: groups of `group` row units, in each of which rows change fastest, so
// that tiles made at the same time share both row tiles and columns.
constexpr Tile TileOf(int unit, int rows, int columns, int cluster, int group, int rank) {
  Tile tile;
  const int row_units = rows / cluster;
  if (unit >= row_units * columns) {
    tile.row = rows - 1;
    tile.column = 2 * (unit - row_units * columns) + rank;
    tile.share = Share::kLeft;
    return tile;
  }
  const int first = unit / (group * columns) * group;
  const int size = row_units - first < group ? row_units - first : group;
  const int inside = unit - first * columns;
  tile.row = (first + inside % size) * cluster + rank;
  tile.column = inside / size;
  tile.share = cluster == 1 ? Share::kNone : Share::kRight;
  return tile;
}

// Row tiles of an expert: of its rows, or of a weight gradient when it has rows.
struct TileGrid {
  int tile_rows = 128;
  int columns = 0;     // column tiles of every expert
  int fixed_rows = 0;  // row tiles of every expert that has rows; 0: as many as its rows need
  int cluster = 1;
  int group = 8;  // row units next to each other in time
};

constexpr int RowTiles(const TileGrid& grid, int count) {
  if (grid.fixed_rows == 0) return CeilDiv(count, grid.tile_rows);
  return count > 0 ? grid.fixed_rows : 0;
}

// Walks the units of a table in rising order.
class TileWalk {
 public:
  constexpr TileWalk(const TileGrid& grid, int rank) : grid_(grid), rank_(rank) {}

  // REQUIRES: `unit` is not below that of the last call.
  constexpr Tile Find(const ExpertTable& table, int unit) {
    while (expert_ < table.experts) {
      const int rows = RowTiles(grid_, table.count[expert_]);
      const int units = UnitsOf(rows, grid_.columns, grid_.cluster);
      if (unit < first_ + units) {
        Tile tile = TileOf(unit - first_, rows, grid_.columns, grid_.cluster, grid_.group, rank_);
        tile.expert = expert_;
        return tile;
      }
      first_ += units;
      ++expert_;
    }
    return {};
  }

 private:
  const TileGrid grid_;
  const int rank_;
  int expert_ = 0;
  int first_ = 0;  // first unit of expert_
};

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_TILES_H_
