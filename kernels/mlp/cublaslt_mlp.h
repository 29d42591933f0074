// The `cublaslt` expert MLP: one matrix product per expert that has rows, on a few streams.
//
// Rows go through in waves of bounded size: all first products of a wave, one kernel over all its
// rows, all second products. Products of a wave are dealt to lanes, streams that start after all
// that the device's stream holds and that it waits for. Products put their f32 sums into scratch,
// from where our kernels make what is stored: u is computed from f32 accumulators and everything is
// rounded once. Where token and weight dtypes differ, both are widened to f32 and multiplied so.
#ifndef KERNELS_MLP_CUBLASLT_MLP_H_
#define KERNELS_MLP_CUBLASLT_MLP_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/scratch.h"
#include "kernels/cuda/stream.h"
#include "kernels/expert_mlp.h"
#include "kernels/mlp/mlp_kernels.h"
#include "kernels/mlp/row_waves.h"

namespace expertd {

class CublasLtMlp final : public ExpertMlp {
 public:
  // REQUIRES: float dtypes in `config`; lanes >= 1; limits.run_rows >= 1.
  static absl::StatusOr<std::unique_ptr<CublasLtMlp>> Create(const MlpConfig& config,
                                                             CudaDevice& device);
  // Streams and wave sizes other than the default, for tests and measurements.
  static absl::StatusOr<std::unique_ptr<CublasLtMlp>> Create(const MlpConfig& config,
                                                             CudaDevice& device, int64_t lanes,
                                                             const WaveLimits& limits);
  static WaveLimits DefaultLimits(const MlpConfig& config);

  std::string_view name() const override { return "cublaslt"; }
  absl::Status Forward(const MlpForwardArgs& args) override;
  absl::Status Dgrad(const MlpDgradArgs& args) override;
  absl::Status Wgrad(const MlpWgradArgs& args) override;
  std::vector<int64_t> WarmRows(int64_t max_rows) const override;

 private:
  struct Lane {
    StreamHandle stream;
    EventHandle done;
  };
  // A run of rows of one expert, and where its products go.
  struct Run {
    int64_t expert = 0;
    int64_t begin = 0;
    int64_t scratch = 0;
    int64_t rows = 0;
    int64_t lane = 0;
  };
  using RunStep = std::function<absl::Status(const Run&)>;
  // Bytes of scratch for each row of a wave.
  struct ScratchWidths {
    int64_t sums = 0;
    int64_t out = 0;
    int64_t u = 0;
    int64_t left = 0;
    int64_t right = 0;
  };

  CublasLtMlp(const MlpConfig& config, CudaDevice& device, const WaveLimits& limits)
      : config_(config), limits_(limits), device_(device) {}
  absl::Status Open(int64_t lanes);

  // The waves of a call, with scratch for the largest.
  absl::StatusOr<std::vector<RowRuns>> Begin(const ExpertSegments& segments,
                                             const ScratchWidths& widths);
  // Calls `step` for all runs between fork and join of the lanes; runs of one expert on one lane.
  absl::Status ForRuns(const RowRuns& wave, const RunStep& step);
  absl::Status ForwardWave(const MlpForwardArgs& args, const RowRuns& wave);
  absl::Status DgradWave(const MlpDgradArgs& args, const RowRuns& wave);
  absl::Status WgradWave(const MlpWgradArgs& args, const RowRuns& wave);
  absl::Status WgradRun(const MlpWgradArgs& args, const Run& run);
  absl::Status BiasGradients(const MlpWgradArgs& args, const Run& run);

  // The weights as the products read them: in place, or widened copies.
  absl::Status UseWeights(const MlpWeights& weights);
  const void* Weight(const void* matrix, int64_t expert) const;
  // Rows of a [rows, cols] token-dtype matrix as an operand: in place, or widened to `scratch`.
  absl::StatusOr<const void*> Operand(const void* matrix, const Run& run, int64_t cols,
                                      const Scratch& scratch);
  // out rows (token dtype) = left @ right (+ factor * bias), rounded once.
  absl::Status MultiplyToTokens(MatmulArgs product, const Run& run, const float* bias,
                                const float* factors, void* out);
  // Zeroes the pad rows of up to three matrices of the given widths in bytes.
  struct PadTarget {
    void* matrix = nullptr;
    int64_t row_bytes = 0;
  };
  absl::Status ZeroPads(const ExpertSegments& segments, const std::vector<PadTarget>& targets);

  int64_t TokenBytes() const { return static_cast<int64_t>(DTypeSize(config_.token_dtype)); }
  int64_t OperandBytes() const { return static_cast<int64_t>(DTypeSize(OperandDType())); }
  // f32 bytes of a row of an operand that must be widened; 0 when it is read in place.
  int64_t WidenedBytes(int64_t cols) const {
    return OperandDType() == config_.token_dtype ? 0 : cols * static_cast<int64_t>(sizeof(float));
  }
  DType OperandDType() const {
    return config_.token_dtype == config_.weight_dtype ? config_.token_dtype : DType::kF32;
  }
  void* RowsAt(void* matrix, const Run& run, int64_t cols) const {
    return static_cast<std::byte*>(matrix) + run.begin * cols * TokenBytes();
  }
  const void* RowsAt(const void* matrix, const Run& run, int64_t cols) const {
    return static_cast<const std::byte*>(matrix) + run.begin * cols * TokenBytes();
  }
  float* SumsAt(const Run& run, int64_t cols) const {
    return sums_.as<float>() + run.scratch * cols;
  }
  std::byte* UAt(const Run& run) const {
    return u_.as<std::byte>() + run.scratch * config_.intermediate * OperandBytes();
  }
  cudaStream_t StreamOf(const Run& run) const {
    return lanes_[static_cast<size_t>(run.lane)].stream.get();
  }

  const MlpConfig config_;
  const WaveLimits limits_;
  CudaDevice& device_;
  std::unique_ptr<CublasMatmul> matmul_;
  std::vector<Lane> lanes_;
  EventHandle fork_;
  // Scratch of a wave.
  Scratch sums_;  // [wave rows, 2I or I] f32
  Scratch out_;   // [wave rows, H] f32, where the product cannot store the tokens itself
  Scratch u_;     // [wave rows, I] operand dtype
  Scratch left_;  // widened operands
  Scratch right_;
  // Weights of the call in progress.
  const void* gate_up_ = nullptr;
  const void* down_ = nullptr;
  Scratch wide_gate_up_;
  Scratch wide_down_;
  uint64_t wide_version_ = 0;
  const void* wide_source_ = nullptr;
};

}  // namespace expertd

#endif  // KERNELS_MLP_CUBLASLT_MLP_H_
