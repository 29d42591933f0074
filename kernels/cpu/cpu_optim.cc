// Vectorised loops of the parameter arithmetic; constants are computed in f64 and rounded once.
// The vector loops need these, and every function inlined into them too, so ahead of all headers.
#pragma GCC optimize("O3", "no-trapping-math", "no-math-errno", "fp-contract=off")

#include "kernels/cpu/cpu_optim.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/error.h"
#include "kernels/cpu/float_convert.h"
#include "kernels/cpu/vector_dispatch.h"
#include "kernels/optim/philox.h"

namespace expertd {
namespace {

constexpr int kLanes = 8;

struct SgdFactors {
  float learning_rate;
  float momentum;
  float weight_decay;
  float gradient_scale;
};

struct AdamWFactors {
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float first_correction;   // 1 / (1 - beta1^step)
  float second_correction;  // 1 / (1 - beta2^step)
  float epsilon;
  float learning_rate;
  float weight_decay;
  float gradient_scale;
};

struct AdamWRows {
  const float* gradient;
  float* first;
  float* second;
  float* weight;
};

EXPERTD_INLINE void SumSquaresBody(const float* __restrict values, int64_t count,
                                   double* __restrict lanes, uint32_t* special) {
  double sums[kLanes] = {};
  uint32_t seen = 0;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = values[i + lane];
      sums[lane] += static_cast<double>(value) * static_cast<double>(value);
      seen |= (std::bit_cast<uint32_t>(value) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
    }
  }
  for (int lane = 0; i + lane < count; ++lane) {
    const float value = values[i + lane];
    sums[lane] += static_cast<double>(value) * static_cast<double>(value);
    seen |= (std::bit_cast<uint32_t>(value) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  }
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = sums[lane];
  *special = seen;
}

EXPERTD_INLINE void SgdRowsBody(const SgdFactors& f, const float* __restrict gradient,
                                int64_t count, float* __restrict buffer, float* __restrict weight) {
  for (int64_t i = 0; i < count; ++i) {
    const float step =
        f.momentum * buffer[i] + f.gradient_scale * gradient[i] + f.weight_decay * weight[i];
    buffer[i] = step;
    weight[i] -= f.learning_rate * step;
  }
}

EXPERTD_INLINE void PlainSgdRowsBody(const SgdFactors& f, const float* __restrict gradient,
                                     int64_t count, float* __restrict weight) {
  for (int64_t i = 0; i < count; ++i) {
    const float step = f.gradient_scale * gradient[i] + f.weight_decay * weight[i];
    weight[i] -= f.learning_rate * step;
  }
}

EXPERTD_INLINE void AdamWRowsLoopBody(const AdamWFactors& factors, const AdamWRows& rows,
                                      int64_t count) {
  const AdamWFactors f = factors;  // a copy that no store can change
  const float* __restrict gradient = rows.gradient;
  float* __restrict first = rows.first;
  float* __restrict second = rows.second;
  float* __restrict weight = rows.weight;
  for (int64_t i = 0; i < count; ++i) {
    const float g = f.gradient_scale * gradient[i];
    const float m = f.beta1 * first[i] + f.one_minus_beta1 * g;
    const float v = f.beta2 * second[i] + f.one_minus_beta2 * (g * g);
    first[i] = m;
    second[i] = v;
    const float denominator = __builtin_sqrtf(v * f.second_correction) + f.epsilon;
    const float step = (m * f.first_correction) / denominator + f.weight_decay * weight[i];
    weight[i] -= f.learning_rate * step;
  }
}

EXPERTD_VECTORIZED(SumSquares,
                   (const float* values, int64_t count, double* lanes, uint32_t* special),
                   (values, count, lanes, special))
EXPERTD_VECTORIZED(SgdRows,
                   (const SgdFactors& f, const float* gradient, int64_t count, float* buffer,
                    float* weight),
                   (f, gradient, count, buffer, weight))
EXPERTD_VECTORIZED(PlainSgdRows,
                   (const SgdFactors& f, const float* gradient, int64_t count, float* weight),
                   (f, gradient, count, weight))
EXPERTD_VECTORIZED(AdamWRowsLoop,
                   (const AdamWFactors& factors, const AdamWRows& rows, int64_t count),
                   (factors, rows, count))

class CpuOptim final : public OptimKernels {
 public:
  absl::Status InitUniform(const InitArgs& args, float* out) override {
    const PhiloxKey key = StreamKey(args.seed, args.layer_key, args.parameter_key);
    const float unit = UniformUnit(args.bound);
    int64_t done = 0;
    while (done < args.count) {
      const auto index = static_cast<uint64_t>(args.first_index + done);
      const PhiloxBlock block = StreamBlock(key, index / 4);
      for (uint64_t word = index % 4; word < 4 && done < args.count; ++word) {
        out[done++] = UniformFromWord(block.word[word], unit);
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<GradientFacts> Inspect(const float* gradient, int64_t count) override {
    double lanes[kLanes];
    uint32_t special = 0;
    SumSquares(gradient, count, lanes, &special);
    GradientFacts facts;
    for (double lane : lanes) facts.sum_of_squares += lane;
    facts.finite = special == 0;
    return facts;
  }

  absl::Status Sgd(const SgdArgs& args, const float* gradient, int64_t count,
                   float* momentum_buffer, float* weight) override {
    const SgdFactors factors = {.learning_rate = static_cast<float>(args.learning_rate),
                                .momentum = static_cast<float>(args.momentum),
                                .weight_decay = static_cast<float>(args.weight_decay),
                                .gradient_scale = static_cast<float>(args.gradient_scale)};
    if (momentum_buffer != nullptr) {
      SgdRows(factors, gradient, count, momentum_buffer, weight);
    } else if (args.momentum == 0) {
      PlainSgdRows(factors, gradient, count, weight);
    } else {
      return Error(Reason::kInternal).Text("SGD with momentum ", args.momentum, " needs a buffer");
    }
    return absl::OkStatus();
  }

  absl::Status AdamW(const AdamWArgs& args, const float* gradient, int64_t count, float* first,
                     float* second, float* weight) override {
    const auto step = static_cast<double>(args.step);
    const AdamWFactors factors = {
        .beta1 = static_cast<float>(args.beta1),
        .one_minus_beta1 = static_cast<float>(1 - args.beta1),
        .beta2 = static_cast<float>(args.beta2),
        .one_minus_beta2 = static_cast<float>(1 - args.beta2),
        .first_correction = static_cast<float>(1 / (1 - std::pow(args.beta1, step))),
        .second_correction = static_cast<float>(1 / (1 - std::pow(args.beta2, step))),
        .epsilon = static_cast<float>(args.epsilon),
        .learning_rate = static_cast<float>(args.learning_rate),
        .weight_decay = static_cast<float>(args.weight_decay),
        .gradient_scale = static_cast<float>(args.gradient_scale)};
    AdamWRowsLoop(factors, {gradient, first, second, weight}, count);
    return absl::OkStatus();
  }

  absl::Status Round(const float* from, int64_t count, DType dtype, void* to) override {
    if (dtype != DType::kBF16 && dtype != DType::kF16) {
      return Error(Reason::kDtypeUnsupported)
          .Text("rounded weights: got ", DTypeName(dtype), ", need DTYPE_BF16 or DTYPE_F16");
    }
    RowFromF32(dtype, from, count, to);
    return absl::OkStatus();
  }
};

}  // namespace

std::unique_ptr<OptimKernels> CreateCpuOptim() { return std::make_unique<CpuOptim>(); }

}  // namespace expertd
