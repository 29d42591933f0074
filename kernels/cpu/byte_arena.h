// Uninitialised, 64-byte aligned scratch memory that only grows.
#ifndef KERNELS_CPU_BYTE_ARENA_H_
#define KERNELS_CPU_BYTE_ARENA_H_

#include <cstddef>
#include <memory>
#include <new>

namespace expertd {

class ByteArena {
 public:
  // At least `bytes` of memory; what an earlier call returned is no longer valid.
  std::byte* Reserve(size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      memory_.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
      size_ = bytes;
    }
    return memory_.get();
  }
  template <typename T>
  T* ReserveArray(size_t count) {
    return reinterpret_cast<T*>(Reserve(count * sizeof(T)));
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  size_t size_ = 0;
};

}  // namespace expertd

#endif  // KERNELS_CPU_BYTE_ARENA_H_
