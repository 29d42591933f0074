// An EpBackend that takes host memory and runs another one on its device: tests stay the same.
//
// Everything that an operation reads or writes is copied to the device before and back after it, so
// that bytes it must not touch are seen to be untouched. Outputs are complete when a call returns.
#ifndef TESTS_CONFORMANCE_EP_STAGED_EP_H_
#define TESTS_CONFORMANCE_EP_STAGED_EP_H_

#include <memory>
#include <utility>

#include "base/status_macros.h"
#include "kernels/device.h"
#include "kernels/ep_backend.h"

namespace expertd::conformance {

// A copy of host memory on a device; null stays null.
class StagedMemory {
 public:
  static absl::StatusOr<StagedMemory> Create(Device& device, const void* host, int64_t bytes) {
    StagedMemory staged;
    staged.device_ = &device;
    staged.bytes_ = bytes;
    if (host == nullptr && bytes > 0) return staged;
    ASSIGN_OR_RETURN(staged.buffer_, device.Allocate(bytes));
    RETURN_IF_ERROR(device.CopyToDevice(staged.buffer_.data(), host, bytes));
    staged.present_ = host != nullptr;
    return staged;
  }
  absl::Status CopyBack(void* host) const {
    return present_ ? device_->CopyToHost(host, buffer_.data(), bytes_) : absl::OkStatus();
  }
  // Not null for what holds no bytes: rows of a rank that has none.
  void* data() const { return buffer_.data(); }
  float* values() const { return present_ ? buffer_.as<float>() : nullptr; }

 private:
  Device* device_ = nullptr;
  DeviceBuffer buffer_;
  int64_t bytes_ = 0;
  bool present_ = false;
};

class StagedEp final : public EpBackend {
 public:
  // `device` must outlive this object.
  StagedEp(Device& device, std::unique_ptr<EpBackend> ep) : device_(device), ep_(std::move(ep)) {}

  const EpCapabilities& capabilities() const override { return ep_->capabilities(); }
  void Cancel(uint64_t sequence) override { ep_->Cancel(sequence); }
  void Abort() override { ep_->Abort(); }

  absl::StatusOr<std::unique_ptr<EpHandle>> Prepare(const OpContext& context,
                                                    const PrepareArgs& args) override {
    PrepareArgs staged = args;
    const RoutingView& routing = args.routing;
    ASSIGN_OR_RETURN(const StagedMemory ids,
                     StagedMemory::Create(device_, routing.ids,
                                          routing.tokens * routing.top_k *
                                              static_cast<int64_t>(DTypeSize(routing.ids_dtype))));
    staged.routing.ids = ids.data();
    return ep_->Prepare(context, staged);
  }

  absl::Status Dispatch(const OpContext& context, const EpHandle& handle, ConstMatrix x,
                        const float* topk_weights, Matrix recv_x, float* recv_w) override {
    ASSIGN_OR_RETURN(const StagedMemory rows, Stage(x));
    ASSIGN_OR_RETURN(const StagedMemory weights, Routes(handle, topk_weights));
    ASSIGN_OR_RETURN(const StagedMemory slots, Stage(recv_x));
    ASSIGN_OR_RETURN(const StagedMemory values, Floats(recv_w, recv_x.rows));
    RETURN_IF_ERROR(ep_->Dispatch(context, handle, On(x, rows), weights.values(), On(recv_x, slots),
                                  values.values()));
    RETURN_IF_ERROR(slots.CopyBack(recv_x.data));
    return values.CopyBack(recv_w);
  }

  absl::Status Combine(const OpContext& context, const EpHandle& handle, ConstMatrix z,
                       const float* slot_weights, Matrix y) override {
    ASSIGN_OR_RETURN(const StagedMemory slots, Stage(z));
    ASSIGN_OR_RETURN(const StagedMemory factors, Floats(slot_weights, z.rows));
    ASSIGN_OR_RETURN(const StagedMemory rows, Stage(y));
    RETURN_IF_ERROR(ep_->Combine(context, handle, On(z, slots), factors.values(), On(y, rows)));
    return rows.CopyBack(y.data);
  }

  absl::Status DispatchBackward(const OpContext& context, const EpHandle& handle,
                                ConstMatrix grad_recv_x, const float* grad_recv_w, Matrix grad_x,
                                float* grad_topk_weights) override {
    ASSIGN_OR_RETURN(const StagedMemory slots, Stage(grad_recv_x));
    ASSIGN_OR_RETURN(const StagedMemory values, Floats(grad_recv_w, grad_recv_x.rows));
    ASSIGN_OR_RETURN(const StagedMemory rows, Stage(grad_x));
    ASSIGN_OR_RETURN(const StagedMemory routes, Routes(handle, grad_topk_weights));
    RETURN_IF_ERROR(ep_->DispatchBackward(context, handle, On(grad_recv_x, slots), values.values(),
                                          On(grad_x, rows), routes.values()));
    RETURN_IF_ERROR(rows.CopyBack(grad_x.data));
    return routes.CopyBack(grad_topk_weights);
  }

  absl::Status CombineBackward(const OpContext& context, const EpHandle& handle, ConstMatrix grad_y,
                               const float* slot_weights, Matrix grad_z) override {
    ASSIGN_OR_RETURN(const StagedMemory rows, Stage(grad_y));
    ASSIGN_OR_RETURN(const StagedMemory factors, Floats(slot_weights, grad_z.rows));
    ASSIGN_OR_RETURN(const StagedMemory slots, Stage(grad_z));
    RETURN_IF_ERROR(ep_->CombineBackward(context, handle, On(grad_y, rows), factors.values(),
                                         On(grad_z, slots)));
    return slots.CopyBack(grad_z.data);
  }

  absl::Status AllReduceSum(const OpContext& context, float* data, int64_t count) override {
    ASSIGN_OR_RETURN(const StagedMemory staged, Floats(data, count));
    RETURN_IF_ERROR(ep_->AllReduceSum(context, static_cast<float*>(staged.data()), count));
    return staged.CopyBack(data);
  }

 private:
  absl::StatusOr<StagedMemory> Stage(const ConstMatrix& matrix) {
    return StagedMemory::Create(device_, matrix.data, matrix.bytes());
  }
  absl::StatusOr<StagedMemory> Floats(const float* values, int64_t count) {
    return StagedMemory::Create(device_, values, count * static_cast<int64_t>(sizeof(float)));
  }
  absl::StatusOr<StagedMemory> Routes(const EpHandle& handle, const float* values) {
    return Floats(values, handle.tokens() * handle.top_k());
  }
  static Matrix On(const ConstMatrix& matrix, const StagedMemory& staged) {
    return {staged.data(), matrix.dtype, matrix.rows, matrix.cols};
  }

  Device& device_;
  std::unique_ptr<EpBackend> ep_;
};

}  // namespace expertd::conformance

#endif  // TESTS_CONFORMANCE_EP_STAGED_EP_H_
