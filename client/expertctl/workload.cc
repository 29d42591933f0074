// Random inputs from a counter-based generator.
#include "client/expertctl/workload.h"

#include <numeric>
#include <string>
#include <utility>

#include "client/cpp/tensor.h"
#include "client/expertctl/train/random.h"

namespace expertd::expertctl {
namespace {

enum Stream : uint64_t { kTokens = 1, kIds = 2, kWeights = 3, kLogits = 4 };

// Streams of different ranks never meet.
uint64_t StreamOf(const Workload& workload, Stream stream) {
  return stream + 16 * static_cast<uint64_t>(workload.rank);
}

std::vector<float> Uniform(const Workload& workload, Stream stream, int64_t count) {
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = train::RandomUniform(workload.seed, StreamOf(workload, stream), i);
  }
  return values;
}

}  // namespace

v1::Tensor RandomTokens(const Workload& workload) {
  const int64_t hidden = workload.config.hidden();
  return client::FloatTensor(workload.config.token_dtype(), {workload.tokens, hidden},
                             Uniform(workload, kTokens, workload.tokens * hidden));
}

v1::Tensor RandomIds(const Workload& workload) {
  const int64_t experts = workload.config.expert_count();
  const int64_t top_k = workload.config.top_k();
  std::vector<int32_t> ids;
  std::vector<int32_t> deck(experts);
  for (int64_t t = 0; t < workload.tokens; ++t) {
    std::iota(deck.begin(), deck.end(), 0);
    for (int64_t k = 0; k < top_k; ++k) {  // The first top_k cards of a shuffle.
      const uint64_t bits =
          train::RandomBits(workload.seed, StreamOf(workload, kIds), t * top_k + k);
      std::swap(deck[k], deck[k + bits % static_cast<uint64_t>(experts - k)]);
      ids.push_back(deck[k]);
    }
  }
  return client::Int32Tensor({workload.tokens, top_k}, ids);
}

v1::Tensor RandomWeights(const Workload& workload) {
  const int64_t top_k = workload.config.top_k();
  std::vector<float> weights = Uniform(workload, kWeights, workload.tokens * top_k);
  for (int64_t t = 0; t < workload.tokens; ++t) {
    float sum = 0;
    for (int64_t k = 0; k < top_k; ++k) sum += weights[t * top_k + k] += 1.5f;
    for (int64_t k = 0; k < top_k; ++k) weights[t * top_k + k] /= sum;
  }
  return client::FloatTensor(v1::DTYPE_F32, {workload.tokens, top_k}, weights);
}

v1::ForwardRequest RandomForward(const Workload& workload, const std::string& layer_id) {
  v1::ForwardRequest request;
  request.set_layer_id(layer_id);
  *request.mutable_tokens() = RandomTokens(workload);
  const v1::RouterConfig& router = workload.config.router();
  if (router.kind() == v1::ROUTER_KIND_NONE) {
    *request.mutable_topk()->mutable_topk_ids() = RandomIds(workload);
    *request.mutable_topk()->mutable_topk_weights() = RandomWeights(workload);
  } else if (router.on_server()) {
    request.set_layer_router(true);
  } else {
    const int64_t experts = workload.config.expert_count();
    *request.mutable_router_logits() =
        client::FloatTensor(v1::DTYPE_F32, {workload.tokens, experts},
                            Uniform(workload, kLogits, workload.tokens * experts));
  }
  return request;
}

}  // namespace expertd::expertctl
