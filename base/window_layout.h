// Where everything lies in a rank's window: the memory that the other ranks of a group write to.
//
// All ranks use one layout, so that a rank knows every address in another's window. Offsets are
// in bytes from the window's begin. Per-source parts hold one piece for each other rank.
#ifndef BASE_WINDOW_LAYOUT_H_
#define BASE_WINDOW_LAYOUT_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "base/memory_plan.h"

namespace expertd {

struct WindowLayout {
  // What a sum of small arrays moves at once.
  static constexpr int64_t kSumSlices = 256;
  static constexpr int64_t kSumSliceBytes = 4096;
  // Expert ids in one 16-byte cell; two more cells are the header of a rank's ids.
  static constexpr int64_t kCellIds = 4;
  static constexpr int64_t kHeaderCells = 2;

  int64_t world = 1;
  int64_t rows = 0;   // row slots of one source: a token's slot is its number
  int64_t pitch = 0;  // bytes from one row slot to the next, a multiple of 16
  int64_t top_k = 0;  // values beside a row
  int64_t cells = 0;  // of one rank's ids, header included

  int64_t arrivals = 0;        // [world] u64: the newest operation that a rank has begun
  int64_t ids = 0;             // [world, cells] of 16 bytes
  int64_t sum_flags = 0;       // [world - 1, kSumSlices] u64
  int64_t sum_slices = 0;      // [world - 1, kSumSlices, kSumSliceBytes]
  int64_t scatter_flags = 0;   // [world - 1, rows] u64: the operation whose row has arrived
  int64_t scatter_values = 0;  // [world - 1, rows, top_k] f32
  int64_t scatter_rows = 0;    // [world - 1, rows, pitch]
  int64_t gather_flags = 0;    // the same for rows that go back
  int64_t gather_values = 0;
  int64_t gather_rows = 0;
  int64_t bytes = 0;
};

// Errors: CONFIG_INVALID when the size does not fit 64 bits.
absl::StatusOr<WindowLayout> PlanWindow(const GroupSizes& group);

// The place of `source` among the per-source parts of `owner`'s window. REQUIRES: they differ.
constexpr int64_t WindowPart(int64_t owner, int64_t source) {
  return source < owner ? source : source - 1;
}

}  // namespace expertd

#endif  // BASE_WINDOW_LAYOUT_H_
