// Constants in f64 rounded once, then one launch each; see optim_cuda.h.
#include "kernels/optim/optim_cuda.h"

#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/status_macros.h"
#include "kernels/cuda/scratch.h"
#include "kernels/cuda/status.h"
#include "kernels/optim/update_kernels.h"

namespace expertd {
namespace {

float Narrow(double value) { return static_cast<float>(value); }

class CudaOptim final : public OptimKernels {
 public:
  explicit CudaOptim(CudaDevice& device) : device_(device) {}

  absl::Status InitUniform(const InitArgs& args, float* out) override {
    RETURN_IF_ERROR(device_.MakeCurrent());
    return CudaStatus(LaunchInitUniform({.seed = args.seed,
                                         .layer_key = args.layer_key,
                                         .parameter_key = args.parameter_key,
                                         .first_index = static_cast<uint64_t>(args.first_index),
                                         .count = args.count,
                                         .bound = args.bound,
                                         .out = out},
                                        device_.stream()),
                      "initialising weights");
  }

  absl::StatusOr<GradientFacts> Inspect(const float* gradient, int64_t count) override {
    RETURN_IF_ERROR(device_.MakeCurrent());
    RETURN_IF_ERROR(results_.Reserve(device_, InspectBytes()));
    RETURN_IF_ERROR(
        CudaStatus(LaunchInspect(gradient, count, results_.as<InspectResult>(), device_.stream()),
                   "inspecting gradients"));
    InspectResult result;
    RETURN_IF_ERROR(device_.CopyToHost(&result, results_.data(), sizeof(result)));
    return GradientFacts{.sum_of_squares = result.sum_of_squares, .finite = result.special == 0};
  }

  absl::Status Sgd(const SgdArgs& args, const float* gradient, int64_t count,
                   float* momentum_buffer, float* weight) override {
    if (momentum_buffer == nullptr && args.momentum != 0) {
      return Error(Reason::kInternal).Text("SGD with momentum ", args.momentum, " needs a buffer");
    }
    RETURN_IF_ERROR(device_.MakeCurrent());
    return CudaStatus(LaunchSgd({.learning_rate = Narrow(args.learning_rate),
                                 .momentum = Narrow(args.momentum),
                                 .weight_decay = Narrow(args.weight_decay),
                                 .gradient_scale = Narrow(args.gradient_scale),
                                 .count = count,
                                 .gradient = gradient,
                                 .buffer = momentum_buffer,
                                 .weight = weight},
                                device_.stream()),
                      "SGD");
  }

  absl::Status AdamW(const AdamWArgs& args, const float* gradient, int64_t count, float* first,
                     float* second, float* weight) override {
    const auto step = static_cast<double>(args.step);
    RETURN_IF_ERROR(device_.MakeCurrent());
    return CudaStatus(
        LaunchAdamW({.beta1 = Narrow(args.beta1),
                     .one_minus_beta1 = Narrow(1 - args.beta1),
                     .beta2 = Narrow(args.beta2),
                     .one_minus_beta2 = Narrow(1 - args.beta2),
                     .first_correction = Narrow(1 / (1 - std::pow(args.beta1, step))),
                     .second_correction = Narrow(1 / (1 - std::pow(args.beta2, step))),
                     .epsilon = Narrow(args.epsilon),
                     .learning_rate = Narrow(args.learning_rate),
                     .weight_decay = Narrow(args.weight_decay),
                     .gradient_scale = Narrow(args.gradient_scale),
                     .count = count,
                     .gradient = gradient,
                     .first = first,
                     .second = second,
                     .weight = weight},
                    device_.stream()),
        "AdamW");
  }

  absl::Status Round(const float* from, int64_t count, DType dtype, void* to) override {
    if (dtype != DType::kBF16 && dtype != DType::kF16) {
      return Error(Reason::kDtypeUnsupported)
          .Text("rounded weights: got ", DTypeName(dtype), ", need DTYPE_BF16 or DTYPE_F16");
    }
    RETURN_IF_ERROR(device_.MakeCurrent());
    return CudaStatus(LaunchRound(from, count, dtype, to, device_.stream()), "rounding weights");
  }

 private:
  CudaDevice& device_;
  Scratch results_;
};

}  // namespace

std::unique_ptr<OptimKernels> CreateCudaOptim(CudaDevice& device) {
  return std::make_unique<CudaOptim>(device);
}

}  // namespace expertd
