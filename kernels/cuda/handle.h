// The one owner of a library handle: destroys it when it goes out of scope. Move-only.
#ifndef KERNELS_CUDA_HANDLE_H_
#define KERNELS_CUDA_HANDLE_H_

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <utility>

namespace expertd {

// `Destroy` is the library's function; its result is ignored, for destructors cannot act on it.
template <typename T, auto Destroy>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T value) : value_(value) {}
  Handle(Handle&& other) noexcept : value_(std::exchange(other.value_, T{})) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      Reset();
      value_ = std::exchange(other.value_, T{});
    }
    return *this;
  }
  ~Handle() { Reset(); }

  T get() const { return value_; }
  // Where a library's create function stores a new handle. The old one is destroyed first.
  T* receive() {
    Reset();
    return &value_;
  }
  void Reset() {
    if (value_ != T{}) static_cast<void>(Destroy(value_));
    value_ = T{};
  }

 private:
  T value_ = T{};
};

using StreamHandle = Handle<cudaStream_t, cudaStreamDestroy>;
using EventHandle = Handle<cudaEvent_t, cudaEventDestroy>;
using PinnedHandle = Handle<void*, cudaFreeHost>;
using MatmulDescHandle = Handle<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using MatmulLayoutHandle = Handle<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using MatmulPreferenceHandle = Handle<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;
using CublasLtHandle = Handle<cublasLtHandle_t, cublasLtDestroy>;

}  // namespace expertd

#endif  // KERNELS_CUDA_HANDLE_H_
