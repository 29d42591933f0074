// An ExpertMlp that takes host memory and runs another one on its device: tests stay the same.
//
// Row matrices get a few poisoned rows past the total on the device, which must come back
// untouched.
#ifndef TESTS_KERNELS_STAGED_MLP_H_
#define TESTS_KERNELS_STAGED_MLP_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "kernels/device.h"
#include "kernels/expert_mlp.h"

namespace expertd {

class StagedMlp final : public ExpertMlp {
 public:
  // `device` must outlive this object.
  StagedMlp(const MlpConfig& config, Device& device, std::unique_ptr<ExpertMlp> mlp)
      : config_(config), device_(device), mlp_(std::move(mlp)) {}

  std::string_view name() const override { return mlp_->name(); }

  absl::Status Forward(const MlpForwardArgs& args) override {
    Call call(*this, args.segments.total);
    MlpForwardArgs staged = args;
    staged.weights = call.Weights(args.weights);
    staged.recv_x = call.Rows(args.recv_x, HiddenBytes());
    staged.recv_w = call.Values(args.recv_w);
    staged.h = call.Rows(args.h, InnerBytes());
    staged.z = call.Rows(args.z, HiddenBytes());
    return call.Finish([&] { return mlp_->Forward(staged); });
  }

  absl::Status Dgrad(const MlpDgradArgs& args) override {
    Call call(*this, args.segments.total);
    MlpDgradArgs staged = args;
    staged.weights = call.Weights(args.weights);
    staged.h = call.Rows(args.h, InnerBytes());
    staged.recv_w = call.Values(args.recv_w);
    staged.grad_out = call.Rows(args.grad_out, HiddenBytes());
    staged.grad_h = call.Rows(args.grad_h, InnerBytes());
    staged.grad_recv_x = call.Rows(args.grad_recv_x, HiddenBytes());
    staged.grad_w = call.Values(args.grad_w);
    return call.Finish([&] { return mlp_->Dgrad(staged); });
  }

  absl::Status Wgrad(const MlpWgradArgs& args) override {
    Call call(*this, args.segments.total);
    MlpWgradArgs staged = args;
    staged.recv_x = call.Rows(args.recv_x, HiddenBytes());
    staged.h = call.Rows(args.h, InnerBytes());
    staged.recv_w = call.Values(args.recv_w);
    staged.grad_out = call.Rows(args.grad_out, HiddenBytes());
    staged.grad_h = call.Rows(args.grad_h, InnerBytes());
    const int64_t matrix = config_.local_experts * config_.hidden * config_.intermediate * kFloat;
    MlpGradients& gradients = staged.gradients;
    gradients.gate_up = call.Out(args.gradients.gate_up, 2 * matrix);
    gradients.down = call.Out(args.gradients.down, matrix);
    gradients.gate_up_bias = call.Out(args.gradients.gate_up_bias, GateBiasBytes());
    gradients.down_bias = call.Out(args.gradients.down_bias, DownBiasBytes());
    return call.Finish([&] { return mlp_->Wgrad(staged); });
  }

 private:
  static constexpr int64_t kFloat = sizeof(float);
  static constexpr int64_t kTailRows = 3;

  int64_t TokenBytes() const { return static_cast<int64_t>(DTypeSize(config_.token_dtype)); }
  int64_t HiddenBytes() const { return config_.hidden * TokenBytes(); }
  int64_t InnerBytes() const { return 2 * config_.intermediate * TokenBytes(); }
  int64_t GateBiasBytes() const {
    return config_.local_experts * 2 * config_.intermediate * kFloat;
  }
  int64_t DownBiasBytes() const { return config_.local_experts * config_.hidden * kFloat; }

  // The device copies of one call.
  class Call {
   public:
    Call(StagedMlp& mlp, int64_t rows) : mlp_(mlp), rows_(rows) {}

    // Rows that are written come back; constant ones do not.
    const void* Rows(const void* host, int64_t row_bytes) {
      return Copy(host, nullptr, rows_ * row_bytes, kTailRows * row_bytes);
    }
    void* Rows(void* host, int64_t row_bytes) {
      return Copy(host, host, rows_ * row_bytes, kTailRows * row_bytes);
    }
    const float* Values(const float* host) {
      return static_cast<const float*>(Rows(static_cast<const void*>(host), kFloat));
    }
    float* Values(float* host) {
      return static_cast<float*>(Rows(static_cast<void*>(host), kFloat));
    }
    float* Out(float* host, int64_t bytes) {
      return static_cast<float*>(Copy(host, host, bytes, 0));
    }
    MlpWeights Weights(const MlpWeights& host) {
      const MlpConfig& c = mlp_.config_;
      const int64_t matrix = c.local_experts * c.hidden * c.intermediate *
                             static_cast<int64_t>(DTypeSize(c.weight_dtype));
      MlpWeights weights = host;
      weights.gate_up = Copy(host.gate_up, nullptr, 2 * matrix, 0);
      weights.down = Copy(host.down, nullptr, matrix, 0);
      weights.gate_up_bias =
          static_cast<const float*>(Copy(host.gate_up_bias, nullptr, mlp_.GateBiasBytes(), 0));
      weights.down_bias =
          static_cast<const float*>(Copy(host.down_bias, nullptr, mlp_.DownBiasBytes(), 0));
      return weights;
    }
    template <typename Run>
    absl::Status Finish(const Run& run) {
      RETURN_IF_ERROR(status_);
      RETURN_IF_ERROR(run());
      for (const Piece& piece : pieces_) {
        if (piece.back == nullptr) continue;
        RETURN_IF_ERROR(mlp_.device_.CopyToHost(piece.back, piece.memory.data(), piece.bytes));
        std::vector<std::byte> tail(static_cast<size_t>(piece.tail));
        RETURN_IF_ERROR(mlp_.device_.CopyToHost(
            tail.data(), piece.memory.as<std::byte>() + piece.bytes, piece.tail));
        EXPECT_TRUE(std::all_of(tail.begin(), tail.end(), [](std::byte b) {
          return b == std::byte{0xFF};
        })) << "rows past the total were written";
      }
      return absl::OkStatus();
    }

   private:
    struct Piece {
      DeviceBuffer memory;
      void* back = nullptr;
      int64_t bytes = 0;
      int64_t tail = 0;
    };

    void* Copy(const void* host, void* back, int64_t bytes, int64_t tail) {
      if (host == nullptr && bytes > 0) return nullptr;
      absl::StatusOr<DeviceBuffer> memory = mlp_.device_.Allocate(bytes + tail);
      if (!memory.ok()) {
        status_ = memory.status();
        return nullptr;
      }
      const std::vector<std::byte> poison(static_cast<size_t>(tail), std::byte{0xFF});
      status_.Update(mlp_.device_.CopyToDevice(memory->data(), host, bytes));
      status_.Update(
          mlp_.device_.CopyToDevice(memory->as<std::byte>() + bytes, poison.data(), tail));
      pieces_.push_back({*std::move(memory), back, bytes, tail});
      return pieces_.back().memory.data();
    }

    StagedMlp& mlp_;
    const int64_t rows_;
    absl::Status status_;
    std::deque<Piece> pieces_;
  };

  const MlpConfig config_;
  Device& device_;
  std::unique_ptr<ExpertMlp> mlp_;
};

}  // namespace expertd

#endif  // TESTS_KERNELS_STAGED_MLP_H_
