// Pure: how the data rows of the experts are cut into runs, and runs into waves of bounded size.
#ifndef KERNELS_MLP_ROW_WAVES_H_
#define KERNELS_MLP_ROW_WAVES_H_

#include <cstdint>
#include <vector>

#include "kernels/expert_mlp.h"
#include "kernels/mlp/mlp_kernels.h"

namespace expertd {

struct WaveLimits {
  int64_t run_rows = 4096;    // rows of one run at most, >= 1
  int64_t wave_rows = 65536;  // rows of a wave at most, but a wave has at least one run
};

// Runs cover every data row once, in order; an expert without rows has none. A wave holds at most
// kMostRuns runs, and its scratch rows count from 0.
std::vector<RowRuns> CutWaves(const ExpertSegments& segments, const WaveLimits& limits);

// Scratch rows of a wave.
int64_t RowsOf(const RowRuns& wave);

}  // namespace expertd

#endif  // KERNELS_MLP_ROW_WAVES_H_
