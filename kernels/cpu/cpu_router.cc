// Loops over tokens around plain_matmul.h and TokenSelector.
#include "kernels/cpu/cpu_router.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/error.h"
#include "base/status_macros.h"
#include "kernels/cpu/byte_arena.h"
#include "kernels/cpu/float_convert.h"
#include "kernels/cpu/plain_matmul.h"
#include "kernels/router/selection.h"

namespace expertd {
namespace {

absl::Status CheckFloat(DType dtype) {
  if (IsFloat(dtype)) return absl::OkStatus();
  return Error(Reason::kDtypeUnsupported)
      .Text("router tokens: got ", DTypeName(dtype), ", need DTYPE_F32, DTYPE_F16 or DTYPE_BF16");
}

class CpuRouter final : public RouterKernels {
 public:
  absl::Status Logits(ConstMatrix x, const float* weight, int64_t experts, float* logits) override {
    RETURN_IF_ERROR(CheckFloat(x.dtype));
    if (x.rows == 0) return absl::OkStatus();
    const ConstMatrix matrix = {weight, DType::kF32, x.cols, experts};
    PlainMultiply(x.rows, AsF32(x), matrix, scratch_, logits);
    return absl::OkStatus();
  }

  absl::Status LogitsBackward(ConstMatrix x, const float* weight, int64_t experts,
                              const float* grad_logits, float* grad_x,
                              float* grad_weight) override {
    RETURN_IF_ERROR(CheckFloat(x.dtype));
    if (x.rows == 0) return absl::OkStatus();
    const ConstMatrix matrix = {weight, DType::kF32, x.cols, experts};
    auto* product = product_.ReserveArray<float>(static_cast<size_t>(x.rows * x.cols));
    PlainMultiplyTransposed(x.rows, grad_logits, matrix, scratch_, product);
    AddRow(DType::kF32, product, x.rows * x.cols, grad_x);
    PlainAddProduct(x.rows, x.cols, experts, AsF32(x), grad_logits, grad_weight);
    return absl::OkStatus();
  }

  absl::Status Select(const RouterConfig& config, const float* logits, const float* bias,
                      int64_t tokens, int64_t* ids, float* weights) override {
    TokenSelector selector(config);
    for (int64_t t = 0; t < tokens; ++t) {
      selector.Select(logits + t * config.expert_count, bias, ids + t * config.top_k,
                      weights + t * config.top_k);
    }
    return absl::OkStatus();
  }

  absl::Status SelectBackward(const RouterConfig& config, const float* logits, const int64_t* ids,
                              const float* grad_weights, int64_t tokens,
                              float* grad_logits) override {
    TokenSelector selector(config);
    for (int64_t t = 0; t < tokens; ++t) {
      selector.SelectBackward(logits + t * config.expert_count, ids + t * config.top_k,
                              grad_weights + t * config.top_k,
                              grad_logits + t * config.expert_count);
    }
    return absl::OkStatus();
  }

  absl::Status AuxSums(const RouterConfig& config, const float* logits, const int64_t* ids,
                       int64_t tokens, float* routed, float* affinity) override {
    TokenSelector selector(config);
    std::vector<double> sums(static_cast<size_t>(config.expert_count), 0.0);
    std::vector<int64_t> counts(static_cast<size_t>(config.expert_count), 0);
    for (int64_t t = 0; t < tokens; ++t) {
      selector.AddAffinity(logits + t * config.expert_count, sums.data());
    }
    for (int64_t i = 0; i < tokens * config.top_k; ++i) {
      if (ids[i] >= 0) ++counts[static_cast<size_t>(ids[i])];
    }
    for (size_t e = 0; e < sums.size(); ++e) {
      affinity[e] = static_cast<float>(sums[e]);
      routed[e] = static_cast<float>(counts[e]);
    }
    return absl::OkStatus();
  }

  absl::Status AuxBackward(const RouterConfig& config, const float* logits, const float* scale,
                           int64_t tokens, float* grad_logits) override {
    TokenSelector selector(config);
    for (int64_t t = 0; t < tokens; ++t) {
      selector.AddAffinityGradient(logits + t * config.expert_count, scale,
                                   grad_logits + t * config.expert_count);
    }
    return absl::OkStatus();
  }

  absl::Status AddTo(const float* extra, Matrix grad) override {
    RETURN_IF_ERROR(CheckFloat(grad.dtype));
    auto* sum = product_.ReserveArray<float>(static_cast<size_t>(grad.cols));
    for (int64_t row = 0; row < grad.rows; ++row) {
      auto* values = static_cast<std::byte*>(grad.data) +
                     row * grad.cols * static_cast<int64_t>(DTypeSize(grad.dtype));
      RowToF32(grad.dtype, values, grad.cols, sum);
      AddRow(DType::kF32, extra + row * grad.cols, grad.cols, sum);
      RowFromF32(grad.dtype, sum, grad.cols, values);
    }
    return absl::OkStatus();
  }

 private:
  const float* AsF32(const ConstMatrix& x) {
    if (x.dtype == DType::kF32) return static_cast<const float*>(x.data);
    auto* rows = tokens_.ReserveArray<float>(static_cast<size_t>(x.rows * x.cols));
    RowToF32(x.dtype, x.data, x.rows * x.cols, rows);
    return rows;
  }

  ByteArena scratch_;
  ByteArena product_;
  ByteArena tokens_;
};

}  // namespace

std::unique_ptr<RouterKernels> CreateCpuRouter() { return std::make_unique<CpuRouter>(); }

}  // namespace expertd
