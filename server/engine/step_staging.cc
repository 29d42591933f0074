// How tensors of requests get to the device, and results to where they are wanted.
#include <cstdint>
#include <utility>

#include "base/status_macros.h"
#include "server/engine/step_runner.h"

namespace expertd::engine {
namespace {

// What the GPU's allocator gives, and what its matrix products may assume of an operand.
constexpr uintptr_t kGpuAlignment = 256;

bool OnCpu(const Device& device) { return device.facts().kind == "cpu"; }

int64_t BytesOf(DType dtype, const std::vector<int64_t>& shape) {
  int64_t bytes = static_cast<int64_t>(DTypeSize(dtype));
  for (const int64_t size : shape) bytes *= size;
  return bytes;
}

}  // namespace

bool StepRunner::Aligned(const void* address, DType dtype) const {
  const uintptr_t need = OnCpu(*state_.device) ? DTypeSize(dtype) : kGpuAlignment;
  return reinterpret_cast<uintptr_t>(address) % need == 0;
}

absl::StatusOr<const void*> StepRunner::StageIn(const TensorInput& input, DeviceBuffer& hold) {
  if (!input.present()) return nullptr;
  // Null means "absent" in the seams: a rank with zero tokens has none of its own to give.
  static constexpr int64_t kNoElements = 0;
  const bool cpu = OnCpu(*state_.device);
  if (cpu && input.bytes == 0) return &kNoElements;
  // The bytes of a request lie where the parser left them: at any address.
  const void* readable = input.buffer.present() ? input.buffer.memory : cpu ? input.data : nullptr;
  if (readable != nullptr && Aligned(readable, input.dtype)) return readable;
  ASSIGN_OR_RETURN(hold, state_.device->Allocate(input.bytes));
  RETURN_IF_ERROR(CopyIn(input, hold.data()));
  return hold.data();
}

absl::Status StepRunner::CopyIn(const TensorInput& input, void* device_data) {
  if (input.buffer.present()) {
    return state_.device->CopyOnDevice(device_data, input.buffer.memory, input.bytes);
  }
  return state_.device->CopyToDevice(device_data, input.data, input.bytes);
}

absl::Status StepRunner::FetchValues(TensorInput& input) {
  if (!input.buffer.present()) return absl::OkStatus();
  if (OnCpu(*state_.device)) {
    input.data = input.buffer.memory;
    return absl::OkStatus();
  }
  input.fetched.resize(static_cast<size_t>(input.bytes));
  input.data = input.fetched.data();
  return state_.device->CopyToHost(input.fetched.data(), input.buffer.memory, input.bytes);
}

absl::StatusOr<void*> StepRunner::Place(const TensorOutput& output, int64_t rows, int64_t cols,
                                        DType dtype, DeviceBuffer& hold) {
  if (output.buffer.present() && Aligned(output.buffer.memory, dtype)) return output.buffer.memory;
  ASSIGN_OR_RETURN(hold, Allocate(rows, cols, dtype));
  return hold.data();
}

absl::Status StepRunner::StageOut(const void* device_data, DType dtype, std::vector<int64_t> shape,
                                  TensorOutput& output) {
  const int64_t bytes = BytesOf(dtype, shape);
  output.dtype = dtype;
  output.shape = std::move(shape);
  if (!output.buffer.present()) {
    output.data.resize(static_cast<size_t>(bytes));
    return state_.device->CopyToHost(output.data.data(), device_data, bytes);
  }
  if (device_data == output.buffer.memory) return absl::OkStatus();
  return state_.device->CopyOnDevice(output.buffer.memory, device_data, bytes);
}

absl::StatusOr<DeviceBuffer> StepRunner::Allocate(int64_t rows, int64_t cols, DType dtype) {
  return state_.device->Allocate(rows * cols * static_cast<int64_t>(DTypeSize(dtype)));
}

}  // namespace expertd::engine
