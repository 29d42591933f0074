// SEAM 2: the experts' feed-forward network over contiguous row segments, forward and backward.
//
// For the rows r of one local expert: h = r W_gate_up + b_gate_up ([rows, 2I], gate first, then
// up), u = act(gate) * up, z = u W_down + b_down. Accumulation in f32, u computed from the f32
// accumulators, every stored tensor rounded once. With EARLY weighting z = (w u) W_down + w b_down
// for the row's route weight w; with LATE z is unweighted and Combine multiplies by w.
//
// Rows of a segment past its count are padding: they are never read as data (they may hold
// anything, NaN included), outputs there are zero. Rows at or past the total are neither read nor
// written. An expert without rows gets exact zeros added to its gradients, and costs no matmul.
// Called from the device thread only; one call at a time; memory of the Device it was made for.
#ifndef KERNELS_EXPERT_MLP_H_
#define KERNELS_EXPERT_MLP_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "kernels/types.h"

namespace expertd {

struct MlpConfig {
  int64_t local_experts = 0;  // L
  int64_t hidden = 0;         // H
  int64_t intermediate = 0;   // I
  Activation activation = Activation::kSilu;
  Weighting weighting = Weighting::kLate;
  bool gate_up_bias = false;
  bool down_bias = false;
  DType token_dtype = DType::kBF16;   // recv_x, h, z and their gradients
  DType weight_dtype = DType::kBF16;  // gate_up and down as the matmuls read them
};

// Where each local expert's rows are. Segment j starts at the sum of padded[i], i < j.
struct ExpertSegments {
  const std::vector<int64_t>* counts = nullptr;  // [L] data rows
  const std::vector<int64_t>* padded = nullptr;  // [L] rows with padding
  int64_t total = 0;                             // sum of padded
};

struct MlpWeights {
  const void* gate_up = nullptr;        // [L, H, 2I] weight_dtype
  const void* down = nullptr;           // [L, I, H] weight_dtype
  const float* gate_up_bias = nullptr;  // [L, 2I] f32, null without bias
  const float* down_bias = nullptr;     // [L, H] f32, null without bias
  // Changes whenever the values behind the pointers change, so that packed copies can be cached.
  uint64_t version = 0;
};

// Accumulators; every call adds to them.
struct MlpGradients {
  float* gate_up = nullptr;       // [L, H, 2I]
  float* down = nullptr;          // [L, I, H]
  float* gate_up_bias = nullptr;  // [L, 2I], null without bias
  float* down_bias = nullptr;     // [L, H], null without bias
};

struct MlpForwardArgs {
  ExpertSegments segments;
  MlpWeights weights;
  const void* recv_x = nullptr;   // [rows, H] token_dtype
  const float* recv_w = nullptr;  // [rows] f32; read only with EARLY weighting
  void* h = nullptr;              // [rows, 2I] token_dtype, or null when no backward follows
  void* z = nullptr;              // [rows, H] token_dtype
};

// grad_out is the gradient of the layer's output at each slot WITHOUT the route weight, for both
// weightings: du' = g W_down^T; grad_w = <u, du'> + <b_down, g>; du = w du'. (The same number as
// <g, z> with LATE and <du, u>/w with EARLY, without keeping z.)
struct MlpDgradArgs {
  ExpertSegments segments;
  MlpWeights weights;
  const void* h = nullptr;         // [rows, 2I] from Forward
  const float* recv_w = nullptr;   // [rows] f32
  const void* grad_out = nullptr;  // [rows, H] token_dtype
  void* grad_h = nullptr;          // [rows, 2I] token_dtype; Wgrad reads it
  void* grad_recv_x = nullptr;     // [rows, H] token_dtype
  float* grad_w = nullptr;         // [rows] f32, 0 in pad rows
};

// dW_gate_up += r^T grad_h, db_gate_up += column sums of grad_h, dW_down += (w u)^T g,
// db_down += sum of w g; f32 accumulation.
struct MlpWgradArgs {
  ExpertSegments segments;
  const void* recv_x = nullptr;    // [rows, H]
  const void* h = nullptr;         // [rows, 2I]
  const float* recv_w = nullptr;   // [rows] f32
  const void* grad_out = nullptr;  // [rows, H]
  const void* grad_h = nullptr;    // [rows, 2I]
  MlpGradients gradients;
};

class ExpertMlp {
 public:
  virtual ~ExpertMlp() = default;
  virtual std::string_view name() const = 0;  // "plain", "onednn", ...
  virtual absl::Status Forward(const MlpForwardArgs& args) = 0;
  virtual absl::Status Dgrad(const MlpDgradArgs& args) = 0;
  virtual absl::Status Wgrad(const MlpWgradArgs& args) = 0;
  // Numbers of rows of one expert, up to `max_rows`, whose first call is slow because code is
  // loaded or an algorithm chosen: calls with each make all later ones fast. Empty: none is.
  virtual std::vector<int64_t> WarmRows(int64_t /*max_rows*/) const { return {}; }
};

}  // namespace expertd

#endif  // KERNELS_EXPERT_MLP_H_
