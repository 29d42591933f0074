// CpuMlp over plain_matmul.h.
#include "kernels/cpu/plain_mlp.h"

#include <cstddef>

#include "kernels/cpu/cpu_mlp.h"
#include "kernels/cpu/plain_matmul.h"

namespace expertd {
namespace {

class PlainExpertMatmul final : public ExpertMatmul {
 public:
  explicit PlainExpertMatmul(const MlpConfig& config) : config_(config) {}

  std::string_view name() const override { return "plain"; }
  DType operand_dtype() const override { return DType::kF32; }

  absl::Status UseWeights(const MlpWeights& weights) override {
    weights_ = weights;
    return absl::OkStatus();
  }

  absl::Status Multiply(WeightUse use, int64_t expert, int64_t rows, const void* in,
                        float* out) override {
    const bool gate_up = use == WeightUse::kGateUp || use == WeightUse::kGateUpTransposed;
    ConstMatrix weight = {.data = gate_up ? weights_.gate_up : weights_.down,
                          .dtype = config_.weight_dtype,
                          .rows = gate_up ? config_.hidden : config_.intermediate,
                          .cols = gate_up ? 2 * config_.intermediate : config_.hidden};
    weight.data = static_cast<const std::byte*>(weight.data) + expert * weight.bytes();
    const auto* rows_in = static_cast<const float*>(in);
    if (use == WeightUse::kGateUp || use == WeightUse::kDown) {
      PlainMultiply(rows, rows_in, weight, scratch_, out);
    } else {
      PlainMultiplyTransposed(rows, rows_in, weight, scratch_, out);
    }
    return absl::OkStatus();
  }

  absl::Status AddProduct(int64_t rows, int64_t m, int64_t n, const void* left, const void* right,
                          float* sum) override {
    PlainAddProduct(rows, m, n, static_cast<const float*>(left), static_cast<const float*>(right),
                    sum);
    return absl::OkStatus();
  }

 private:
  const MlpConfig config_;
  MlpWeights weights_;
  ByteArena scratch_;
};

}  // namespace

std::unique_ptr<ExpertMlp> CreatePlainMlp(const MlpConfig& config) {
  return std::make_unique<CpuMlp>(config, std::make_unique<PlainExpertMatmul>(config));
}

}  // namespace expertd
