// One pass over the experts; see row_waves.h.
#include <algorithm>

#include "kernels/mlp/row_waves.h"

namespace expertd {

int64_t RowsOf(const RowRuns& wave) {
  return wave.count == 0 ? 0 : wave.scratch[wave.count - 1] + wave.rows[wave.count - 1];
}

std::vector<RowRuns> CutWaves(const ExpertSegments& segments, const WaveLimits& limits) {
  std::vector<RowRuns> waves;
  int64_t base = 0;
  for (size_t j = 0; j < segments.counts->size(); ++j) {
    const int64_t count = (*segments.counts)[j];
    for (int64_t done = 0; done < count; done += limits.run_rows) {
      const int64_t rows = std::min(limits.run_rows, count - done);
      if (waves.empty() || waves.back().count == kMostRuns ||
          RowsOf(waves.back()) + rows > limits.wave_rows) {
        waves.emplace_back();
      }
      RowRuns& wave = waves.back();
      const int64_t scratch = RowsOf(wave);
      wave.begin[wave.count] = base + done;
      wave.scratch[wave.count] = scratch;
      wave.rows[wave.count] = rows;
      wave.expert[wave.count++] = static_cast<int64_t>(j);
    }
    base += (*segments.padded)[j];
  }
  return waves;
}

}  // namespace expertd
