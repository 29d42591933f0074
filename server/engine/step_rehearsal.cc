// What a new layer does before its first step, where the first use of a kernel is slow.
//
// GPU code is loaded when it is first launched, and matrix products choose their algorithm at the
// first sight of a shape: together that once cost the first Forward a tenth of a second. So
// CreateLayer runs everything once, on zeros, before it answers. Nothing of it stays: a layer that
// is new has zero weights and zero gradients, and gets zeros added; one that exists is only read.
#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/status_macros.h"
#include "server/engine/step_layer.h"
#include "server/engine/step_runner.h"

namespace expertd::engine {
namespace {

// Enough to reach every expert's kernels, too few to hold much memory.
constexpr int64_t kTokens = 128;

// [T, K] ids, distinct in a row and spread over all experts.
std::vector<int64_t> SpreadIds(int64_t tokens, const LayerConfig& layer) {
  std::vector<int64_t> ids;
  const int64_t stride = layer.expert_count / layer.top_k;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t k = 0; k < layer.top_k; ++k) ids.push_back((t + k * stride) % layer.expert_count);
  }
  return ids;
}

}  // namespace

absl::StatusOr<DeviceBuffer> StepRunner::Zeros(int64_t rows, int64_t cols, DType dtype) {
  ASSIGN_OR_RETURN(DeviceBuffer buffer, Allocate(rows, cols, dtype));
  RETURN_IF_ERROR(state_.device->Zero(buffer.data(), buffer.size()));
  return buffer;
}

// Collective: every rank takes the same way through it.
absl::Status StepRunner::RehearseExchange(Step& step, const LayerConfig& config) {
  const int64_t t = std::min(kTokens, session_.config.max_tokens_per_rank);
  const std::vector<int64_t> ids = SpreadIds(t, config);
  EpBackend& ep = *session_.backend;
  ASSIGN_OR_RETURN(DeviceBuffer tokens, Zeros(t, config.hidden, config.token_dtype));
  ASSIGN_OR_RETURN(DeviceBuffer weights, Zeros(t, config.top_k, DType::kF32));
  ASSIGN_OR_RETURN(DeviceBuffer on_device, Allocate(t, config.top_k, DType::kI64));
  RETURN_IF_ERROR(state_.device->CopyToDevice(on_device.data(), ids.data(), on_device.size()));
  const PrepareArgs args{
      {on_device.data(), DType::kI64, t, config.top_k}, config.expert_count, config.alignment};
  absl::StatusOr<std::unique_ptr<EpHandle>> handle = ep.Prepare(step.context, args);
  // All ranks alike: a group that small has no room for a rehearsal.
  if (HasReason(handle.status(), Reason::kRecvCapacity)) return absl::OkStatus();
  RETURN_IF_ERROR(handle.status());
  const int64_t rows = (*handle)->counts().total;
  ASSIGN_OR_RETURN(DeviceBuffer recv, Allocate(rows, config.hidden, config.token_dtype));
  ASSIGN_OR_RETURN(DeviceBuffer recv_w, Allocate(rows, 1, DType::kF32));
  const Matrix token_rows{tokens.data(), config.token_dtype, t, config.hidden};
  const Matrix slots{recv.data(), config.token_dtype, rows, config.hidden};
  RETURN_IF_ERROR(ep.Dispatch(step.context, **handle, token_rows, weights.as<float>(), slots,
                              recv_w.as<float>()));
  for (const float* slot_weights : {recv_w.as<float>(), static_cast<float*>(nullptr)}) {
    RETURN_IF_ERROR(ep.Combine(step.context, **handle, slots, slot_weights, token_rows));
    RETURN_IF_ERROR(ep.CombineBackward(step.context, **handle, token_rows, slot_weights, slots));
  }
  RETURN_IF_ERROR(ep.DispatchBackward(step.context, **handle, slots, recv_w.as<float>(), token_rows,
                                      weights.as<float>()));
  // Waits, so that a peer's failure is this operation's.
  float any = 0;
  return state_.device->CopyToHost(&any, weights.data(), sizeof(any));
}

absl::Status StepRunner::RehearseExperts(Layer& layer) {
  const LayerConfig& config = layer.config();
  const auto local = static_cast<size_t>(layer.info().local_experts);
  const int64_t most = std::min(session_.config.max_tokens_per_rank * session_.world,
                                session_.config.max_recv_rows_per_rank);
  const std::vector<int64_t> all = layer.mlp().WarmRows(most);
  if (all.empty()) return absl::OkStatus();
  const int64_t largest = *std::max_element(all.begin(), all.end());
  const int64_t inner = 2 * config.intermediate;
  ASSIGN_OR_RETURN(const DeviceBuffer x, Zeros(largest, config.hidden, config.token_dtype));
  ASSIGN_OR_RETURN(const DeviceBuffer w, Zeros(largest, 1, DType::kF32));
  ASSIGN_OR_RETURN(const DeviceBuffer h, Zeros(largest, inner, config.token_dtype));
  ASSIGN_OR_RETURN(const DeviceBuffer z, Zeros(largest, config.hidden, config.token_dtype));
  ASSIGN_OR_RETURN(const DeviceBuffer grad_h, Zeros(largest, inner, config.token_dtype));
  ASSIGN_OR_RETURN(const DeviceBuffer grad_x, Zeros(largest, config.hidden, config.token_dtype));
  ASSIGN_OR_RETURN(const DeviceBuffer grad_w, Zeros(largest, 1, DType::kF32));
  std::vector<int64_t> counts(local);
  for (size_t i = 0; i < all.size(); ++i) {
    std::fill(counts.begin(), counts.end(), 0);
    counts[i % local] = all[i];
    const ExpertSegments segments{&counts, &counts, all[i]};
    RETURN_IF_ERROR(layer.mlp().Forward(
        {segments, layer.Weights(), x.data(), w.as<float>(), h.data(), z.data()}));
    RETURN_IF_ERROR(layer.mlp().Dgrad({segments, layer.Weights(), h.data(), w.as<float>(), z.data(),
                                       grad_h.data(), grad_x.data(), grad_w.as<float>()}));
    RETURN_IF_ERROR(layer.mlp().Wgrad(
        {segments, x.data(), h.data(), w.as<float>(), z.data(), grad_h.data(), layer.Gradients()}));
  }
  float any = 0;  // waits: a failure here is this operation's
  return state_.device->CopyToHost(&any, grad_w.data(), sizeof(any));
}

absl::Status StepRunner::RehearseRouter(Layer& layer) {
  const LayerConfig& config = layer.config();
  if (config.router.kind == RouterKind::kNone) return absl::OkStatus();
  const int64_t t = std::min(kTokens, session_.config.max_tokens_per_rank);
  const int64_t experts = config.expert_count;
  ASSIGN_OR_RETURN(DeviceBuffer logits, Zeros(t, experts, DType::kF32));
  ASSIGN_OR_RETURN(DeviceBuffer grad_logits, Zeros(t, experts, DType::kF32));
  ASSIGN_OR_RETURN(DeviceBuffer ids, Zeros(t, config.top_k, DType::kI64));
  ASSIGN_OR_RETURN(DeviceBuffer weights, Zeros(t, config.top_k, DType::kF32));
  ASSIGN_OR_RETURN(DeviceBuffer sums, Zeros(2, experts, DType::kF32));
  RouterKernels& kernels = *state_.router;
  RETURN_IF_ERROR(kernels.Select(config.router, logits.as<float>(), nullptr, t, ids.as<int64_t>(),
                                 weights.as<float>()));
  RETURN_IF_ERROR(kernels.SelectBackward(config.router, logits.as<float>(), ids.as<int64_t>(),
                                         weights.as<float>(), t, grad_logits.as<float>()));
  RETURN_IF_ERROR(kernels.AuxSums(config.router, logits.as<float>(), ids.as<int64_t>(), t,
                                  sums.as<float>(), sums.as<float>() + experts));
  RETURN_IF_ERROR(kernels.AuxBackward(config.router, logits.as<float>(), sums.as<float>(), t,
                                      grad_logits.as<float>()));
  const Parameter* router = layer.Find("router");
  if (router == nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(DeviceBuffer x, Zeros(t, config.hidden, config.token_dtype));
  ASSIGN_OR_RETURN(DeviceBuffer extra, Zeros(t, config.hidden, DType::kF32));
  ASSIGN_OR_RETURN(DeviceBuffer grad_weight, Zeros(config.hidden, experts, DType::kF32));
  const Matrix rows{x.data(), config.token_dtype, t, config.hidden};
  RETURN_IF_ERROR(kernels.Logits(rows, router->master.as<float>(), experts, logits.as<float>()));
  RETURN_IF_ERROR(kernels.LogitsBackward(rows, router->master.as<float>(), experts,
                                         grad_logits.as<float>(), extra.as<float>(),
                                         grad_weight.as<float>()));
  return kernels.AddTo(extra.as<float>(), rows);
}

}  // namespace expertd::engine
