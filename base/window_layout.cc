// Adds up the parts of window_layout.h with checked arithmetic.
#include "base/window_layout.h"

#include <algorithm>

#include "base/error.h"

namespace expertd {
namespace {

// Parts begin where no two of them share a cache line.
constexpr int64_t kPartAlignment = 256;
constexpr int64_t kFlagBytes = 8;
constexpr int64_t kCellBytes = 16;
constexpr int64_t kValueBytes = 4;

// Hands out parts one after the other and remembers an overflow.
class Parts {
 public:
  int64_t Take(int64_t count, int64_t each) {
    const int64_t begin = end_;
    int64_t size = 0;
    overflow_ = overflow_ || __builtin_mul_overflow(count, each, &size) ||
                __builtin_add_overflow(end_, size, &end_) ||
                __builtin_add_overflow(end_, kPartAlignment - 1, &end_);
    end_ = end_ / kPartAlignment * kPartAlignment;
    return begin;
  }
  int64_t end() const { return end_; }
  bool overflow() const { return overflow_; }

 private:
  int64_t end_ = 0;
  bool overflow_ = false;
};

int64_t Product(int64_t a, int64_t b, bool& overflow) {
  int64_t product = 0;
  overflow = __builtin_mul_overflow(a, b, &product) || overflow;
  return product;
}

}  // namespace

absl::StatusOr<WindowLayout> PlanWindow(const GroupSizes& group) {
  WindowLayout window;
  bool overflow = false;
  window.world = std::max<int64_t>(group.ranks, 1);
  window.rows = group.max_tokens_per_rank;
  window.top_k = group.max_top_k;
  const int64_t row = Product(group.max_hidden, group.token_bytes, overflow);
  overflow = overflow || row > INT64_MAX - kCellBytes;
  window.pitch = overflow ? 0 : (row + 15) / 16 * 16;
  const int64_t routes = Product(window.rows, window.top_k, overflow);
  window.cells = WindowLayout::kHeaderCells + routes / WindowLayout::kCellIds + 1;
  const int64_t others = window.world - 1;
  const int64_t other_rows = Product(others, window.rows, overflow);
  Parts parts;
  window.arrivals = parts.Take(window.world, kFlagBytes);
  window.ids = parts.Take(Product(window.world, window.cells, overflow), kCellBytes);
  const int64_t slices = Product(others, WindowLayout::kSumSlices, overflow);
  window.sum_flags = parts.Take(slices, kFlagBytes);
  window.sum_slices = parts.Take(slices, WindowLayout::kSumSliceBytes);
  const int64_t values = Product(other_rows, window.top_k, overflow);
  window.scatter_flags = parts.Take(other_rows, kFlagBytes);
  window.scatter_values = parts.Take(values, kValueBytes);
  window.scatter_rows = parts.Take(other_rows, window.pitch);
  window.gather_flags = parts.Take(other_rows, kFlagBytes);
  window.gather_values = parts.Take(values, kValueBytes);
  window.gather_rows = parts.Take(other_rows, window.pitch);
  window.bytes = parts.end();
  if (overflow || parts.overflow()) {
    return Error(Reason::kConfigInvalid)
        .Text("the window of ", group.ranks, " ranks with ", group.max_tokens_per_rank,
              " tokens of ", group.max_hidden, " elements does not fit 64 bits");
  }
  return window;
}

}  // namespace expertd
