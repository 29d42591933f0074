// Correctness of a benchmark rank's buffers: a wrong result is reported, not timed.
#include <algorithm>
#include <cmath>

#include "base/status_macros.h"
#include "kernels/cpu/float_convert.h"
#include "tests/bench/bench_rank.h"

namespace expertd::bench {
namespace {

// Largest relative error of rounding to a dtype: half the gap between 1 and the next value.
double Unit(DType dtype) {
  if (dtype == DType::kBF16) return std::ldexp(1.0, -8);
  if (dtype == DType::kF16) return std::ldexp(1.0, -11);
  return std::ldexp(1.0, -24);
}

}  // namespace

absl::StatusOr<std::vector<float>> BenchRank::ReadRow(const DeviceBuffer& buffer, int64_t row,
                                                      int64_t cols) {
  const int64_t bytes = cols * static_cast<int64_t>(DTypeSize(options_.dtype));
  std::vector<std::byte> raw(static_cast<size_t>(bytes));
  RETURN_IF_ERROR(device_->CopyToHost(raw.data(), buffer.as<std::byte>() + row * bytes, bytes));
  std::vector<float> values(static_cast<size_t>(cols));
  RowToF32(options_.dtype, raw.data(), cols, values.data());
  return values;
}

absl::StatusOr<bool> BenchRank::CheckDispatch(const std::vector<Routing>& by_rank) {
  const int64_t local = workload_.experts_per_rank;
  const int64_t row_bytes = workload_.hidden * static_cast<int64_t>(DTypeSize(options_.dtype));
  std::vector<std::byte> all(static_cast<size_t>(capacity_ * row_bytes));
  RETURN_IF_ERROR(device_->CopyToHost(all.data(), recv_x_.data(), capacity_ * row_bytes));
  std::vector<float> weights(static_cast<size_t>(capacity_));
  RETURN_IF_ERROR(device_->CopyToHost(weights.data(), recv_w_.data(), capacity_ * 4));
  const std::vector<std::vector<int64_t>> slots = SlotsOf(workload_, options_.alignment, by_rank);
  std::vector<float> row(static_cast<size_t>(workload_.hidden));
  std::vector<std::byte> expected(static_cast<size_t>(row_bytes));
  int64_t found = 0;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (size_t i = 0; i < by_rank[rank].ids.size(); ++i) {
      if (by_rank[rank].ids[i] / local != options_.rank) continue;
      const int64_t token = static_cast<int64_t>(i) / workload_.top_k;
      for (int64_t c = 0; c < workload_.hidden; ++c) {
        row[static_cast<size_t>(c)] = TokenValue(static_cast<int64_t>(rank), token, c);
      }
      RowFromF32(options_.dtype, row.data(), workload_.hidden, expected.data());
      const int64_t slot = slots[rank][i];
      if (!std::equal(expected.begin(), expected.end(), all.begin() + slot * row_bytes) ||
          weights[static_cast<size_t>(slot)] != by_rank[rank].weights[i]) {
        return false;
      }
      ++found;
    }
  }
  int64_t counted = 0;
  for (int64_t count : handle_->counts().tokens_per_expert) counted += count;
  return found == counted;
}

// The first row of a few experts in f64, at a few columns. Bound: u is rounded once and z once; the
// f32 sums add far less.
absl::StatusOr<bool> BenchRank::CheckExperts() {
  const int64_t hidden = workload_.hidden;
  const int64_t inner = workload_.intermediate;
  int64_t base = 0;
  for (int64_t j = 0; j < workload_.experts_per_rank; ++j) {
    const int64_t first = base;
    base += handle_->counts().padded_per_expert[static_cast<size_t>(j)];
    if (handle_->counts().tokens_per_expert[static_cast<size_t>(j)] == 0 || j % 7 != 0) continue;
    ASSIGN_OR_RETURN(const std::vector<float> x, ReadRow(recv_x_, first, hidden));
    ASSIGN_OR_RETURN(const std::vector<float> z, ReadRow(z_, first, hidden));
    std::vector<double> h(static_cast<size_t>(2 * inner));
    for (int64_t k = 0; k < hidden; ++k) {
      ASSIGN_OR_RETURN(const std::vector<float> w, ReadRow(gate_up_, j * hidden + k, 2 * inner));
      for (size_t c = 0; c < h.size(); ++c) {
        h[c] += static_cast<double>(x[static_cast<size_t>(k)]) * static_cast<double>(w[c]);
      }
    }
    std::vector<double> want(static_cast<size_t>(hidden));
    double magnitude = 0;
    for (int64_t i = 0; i < inner; ++i) {
      const double gate = h[static_cast<size_t>(i)];
      const double u = gate / (1 + std::exp(-gate)) * h[static_cast<size_t>(inner + i)];
      ASSIGN_OR_RETURN(const std::vector<float> w, ReadRow(down_, j * inner + i, hidden));
      for (size_t c = 0; c < want.size(); ++c) want[c] += u * static_cast<double>(w[c]);
      magnitude += std::abs(u);
    }
    // |w_down| stays below 6 standard deviations of 1/sqrt(I).
    const double bound =
        4 * Unit(options_.dtype) * magnitude * 6 / std::sqrt(static_cast<double>(inner)) + 1e-4;
    for (size_t c = 0; c < want.size(); ++c) {
      if (!(std::abs(want[c] - static_cast<double>(z[c])) <= bound)) return false;
    }
  }
  return true;
}

absl::StatusOr<bool> BenchRank::CheckCombine(const std::vector<Routing>& by_rank,
                                             const std::vector<std::unique_ptr<BenchRank>>& ranks) {
  constexpr int64_t kSamples = 16;
  const Routing& own = by_rank[static_cast<size_t>(options_.rank)];
  const std::vector<int64_t> slots =
      SlotsOf(workload_, options_.alignment, by_rank)[static_cast<size_t>(options_.rank)];
  const int64_t stride = std::max<int64_t>(1, workload_.tokens_per_rank / kSamples);
  for (int64_t t = 0; t < workload_.tokens_per_rank; t += stride) {
    std::vector<double> want(static_cast<size_t>(workload_.hidden));
    std::vector<double> magnitude(want.size());
    for (int64_t k = 0; k < workload_.top_k; ++k) {
      const auto i = static_cast<size_t>(t * workload_.top_k + k);
      BenchRank& owner = *ranks[static_cast<size_t>(own.ids[i] / workload_.experts_per_rank)];
      ASSIGN_OR_RETURN(const std::vector<float> z,
                       owner.ReadRow(owner.z_, slots[i], workload_.hidden));
      for (size_t c = 0; c < want.size(); ++c) {
        const double product = static_cast<double>(own.weights[i]) * static_cast<double>(z[c]);
        want[c] += product;
        magnitude[c] += std::abs(product);
      }
    }
    ASSIGN_OR_RETURN(const std::vector<float> y, ReadRow(y_, t, workload_.hidden));
    for (size_t c = 0; c < want.size(); ++c) {
      // A partial per rank and the sum, each rounded once.
      const double bound = 3 * Unit(options_.dtype) * magnitude[c] + 1e-6;
      if (!(std::abs(want[c] - static_cast<double>(y[c])) <= bound)) return false;
    }
  }
  return true;
}

}  // namespace expertd::bench
