// Device on host memory: pooled 256-byte aligned blocks, facts of this machine, thread count.
//
// Freed blocks are kept in size classes of four steps per power of two, so that steps of about the
// same size reuse them. Blocks in use and in the pool together never exceed the memory the machine
// has. Called from the device thread only, except facts() and the thread count.
#ifndef KERNELS_CPU_CPU_DEVICE_H_
#define KERNELS_CPU_CPU_DEVICE_H_

#include <cstdint>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "kernels/device.h"

namespace expertd {

class CpuDevice final : public Device {
 public:
  CpuDevice();
  // `memory_bytes` bounds what the pool hands out: tests make it small.
  explicit CpuDevice(int64_t memory_bytes);
  // REQUIRES: every buffer of this device is gone.
  ~CpuDevice() override;
  CpuDevice(const CpuDevice&) = delete;
  CpuDevice& operator=(const CpuDevice&) = delete;

  const DeviceFacts& facts() const override { return facts_; }
  absl::Status CopyToDevice(void* device, const void* host, int64_t bytes) override;
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes) override;
  absl::Status CopyOnDevice(void* to, const void* from, int64_t bytes) override;
  absl::Status Zero(void* device, int64_t bytes) override;
  void ForgetMarks() override { marks_.clear(); }
  absl::StatusOr<int64_t> Mark() override;
  absl::StatusOr<double> MicrosBetween(int64_t from, int64_t to) override;
  absl::Status Drain() override { return absl::OkStatus(); }  // nothing runs behind its caller
  int64_t block_allocations() const override { return block_allocations_; }

 protected:
  absl::StatusOr<std::pair<void*, int64_t>> TakeBlock(int64_t bytes) override;
  void ReturnBlock(void* block, int64_t block_bytes) override;

 private:
  void FreePool();

  DeviceFacts facts_;
  std::map<int64_t, std::vector<void*>> pool_;  // free blocks by block size
  int64_t held_bytes_ = 0;                      // in use and in the pool
  int64_t block_allocations_ = 0;
  std::vector<SteadyTime> marks_;  // everything runs at once here: a mark is passed when made
};

// The pooled block size for a request: at least 256, a multiple of 256, at most 25 % more than
// asked for large sizes.
int64_t CpuBlockSize(int64_t bytes);

// "model name" of the first processor in the text of /proc/cpuinfo; "unknown CPU" without one.
std::string_view CpuModelName(std::string_view cpuinfo);

// Threads that one CPU kernel call may use: what SetCpuThreads (kernels/backends.h) said last.
int CpuThreads();

}  // namespace expertd

#endif  // KERNELS_CPU_CPU_DEVICE_H_
