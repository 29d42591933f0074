// The `onednn` expert MLP: oneDNN matrix products, our own row loops around them.
//
// bf16 operands where tokens and weights are bf16 and the CPU has bf16 instructions; else
// everything is converted to f32. Weights are repacked once per MlpWeights.version and use.
#ifndef KERNELS_CPU_ONEDNN_MLP_H_
#define KERNELS_CPU_ONEDNN_MLP_H_

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/expert_mlp.h"

namespace expertd {

// What is worth knowing about this machine: empty, or that bf16 is computed in f32.
std::string OnednnNote();

// REQUIRES: float dtypes in `config`.
std::unique_ptr<ExpertMlp> CreateOnednnMlp(const MlpConfig& config);

// The row count, at least `rows`, that a product of `rows` is run with: few distinct values, so
// that few primitives are made, and at most an eighth more from 128 rows on.
int64_t OnednnRowClass(int64_t rows);

}  // namespace expertd

#endif  // KERNELS_CPU_ONEDNN_MLP_H_
