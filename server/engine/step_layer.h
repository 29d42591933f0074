// Small helpers that forward and backward of a layer share.
#ifndef SERVER_ENGINE_STEP_LAYER_H_
#define SERVER_ENGINE_STEP_LAYER_H_

#include "kernels/ep_backend.h"
#include "kernels/expert_mlp.h"
#include "server/engine/config.h"
#include "server/engine/operations.h"

namespace expertd::engine {

inline ExpertSegments SegmentsOf(const EpHandle& handle) {
  const RecvCounts& counts = handle.counts();
  return {&counts.tokens_per_expert, &counts.padded_per_expert, counts.total};
}

// c * E / (K * N^2): what multiplies sum_e n_e * sum_t a_te in the auxiliary loss, for N tokens of
// the whole group; 0 without tokens.
inline double AuxFactor(const LayerConfig& layer, int64_t group_tokens) {
  if (group_tokens == 0) return 0;
  const auto n = static_cast<double>(group_tokens);
  return layer.aux_loss_coefficient * static_cast<double>(layer.expert_count) /
         (static_cast<double>(layer.top_k) * n * n);
}

inline void RecordCounts(const EpHandle& handle, StepStats& stats) {
  const RecvCounts& counts = handle.counts();
  stats.tokens_per_expert = counts.tokens_per_expert;
  stats.padded_per_expert = counts.padded_per_expert;
  for (int64_t dropped : counts.dropped_per_expert) stats.routes_dropped += dropped;
}

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_STEP_LAYER_H_
