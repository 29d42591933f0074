// The host memory pool and the facts read from /proc/cpuinfo and sysconf.
#include "kernels/cpu/cpu_device.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "base/error.h"
#include "kernels/backends.h"

namespace expertd {
namespace {

constexpr int64_t kAlignment = 256;

int64_t PhysicalMemory() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<int64_t>(sysconf(_SC_PAGESIZE));
}

int UsableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

std::atomic<int>& ThreadCount() {
  static std::atomic<int> threads{UsableCores()};
  return threads;
}

}  // namespace

int64_t CpuBlockSize(int64_t bytes) {
  if (bytes <= kAlignment) return kAlignment;
  // Quarter steps of the power of two below: 4, 5, 6, 7 eighths of the next one.
  const auto below = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes - 1)));
  const int64_t step = std::max(below / 4, kAlignment);
  return (bytes + step - 1) / step * step;
}

std::string_view CpuModelName(std::string_view cpuinfo) {
  const size_t key = cpuinfo.find("model name");
  if (key == std::string_view::npos) return "unknown CPU";
  const size_t colon = cpuinfo.find(':', key);
  const size_t end = cpuinfo.find('\n', key);
  if (colon == std::string_view::npos || colon > end) return "unknown CPU";
  std::string_view name = cpuinfo.substr(colon + 1, end - colon - 1);
  while (!name.empty() && name.front() == ' ') name.remove_prefix(1);
  return name.empty() ? "unknown CPU" : name;
}

void SetCpuThreads(int threads) { ThreadCount().store(std::max(1, threads)); }
int CpuThreads() { return ThreadCount().load(); }

CpuDevice::CpuDevice() : CpuDevice(PhysicalMemory()) {}

CpuDevice::CpuDevice(int64_t memory_bytes) {
  std::ifstream file("/proc/cpuinfo");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  facts_.kind = "cpu";
  facts_.name = std::string(CpuModelName(text));
  facts_.memory_bytes = memory_bytes;
}

CpuDevice::~CpuDevice() { FreePool(); }

void CpuDevice::FreePool() {
  for (auto& [size, blocks] : pool_) {
    for (void* block : blocks) std::free(block);
    held_bytes_ -= size * static_cast<int64_t>(blocks.size());
    blocks.clear();
  }
}

absl::StatusOr<std::pair<void*, int64_t>> CpuDevice::TakeBlock(int64_t bytes) {
  const auto refuse = [&]() -> absl::Status {
    return Error(Reason::kMemoryBudget)
        .Text("host memory: ", bytes, " bytes asked, ", held_bytes_, " in use, need at most ",
              facts_.memory_bytes, " together")
        .With("bytes", bytes)
        .With("limit", facts_.memory_bytes);
  };
  if (bytes < 0 || bytes > facts_.memory_bytes) return refuse();
  const int64_t size = CpuBlockSize(bytes);
  std::vector<void*>& free_blocks = pool_[size];
  if (!free_blocks.empty()) {
    void* block = free_blocks.back();
    free_blocks.pop_back();
    return std::pair<void*, int64_t>(block, size);
  }
  if (held_bytes_ > facts_.memory_bytes - size) FreePool();
  if (held_bytes_ > facts_.memory_bytes - size) return refuse();
  void* block = std::aligned_alloc(kAlignment, static_cast<size_t>(size));
  if (block == nullptr) return refuse();
  held_bytes_ += size;
  ++block_allocations_;
  return std::pair<void*, int64_t>(block, size);
}

void CpuDevice::ReturnBlock(void* block, int64_t block_bytes) {
  pool_[block_bytes].push_back(block);
}

absl::Status CpuDevice::CopyToDevice(void* device, const void* host, int64_t bytes) {
  return CopyOnDevice(device, host, bytes);
}

absl::Status CpuDevice::CopyToHost(void* host, const void* device, int64_t bytes) {
  return CopyOnDevice(host, device, bytes);
}

absl::Status CpuDevice::CopyOnDevice(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::Status CpuDevice::Zero(void* device, int64_t bytes) {
  if (bytes > 0) std::memset(device, 0, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::StatusOr<int64_t> CpuDevice::Mark() {
  marks_.push_back(Clock::Real().Now());
  return static_cast<int64_t>(marks_.size()) - 1;
}

absl::StatusOr<double> CpuDevice::MicrosBetween(int64_t from, int64_t to) {
  return ToMicros(marks_[static_cast<size_t>(to)] - marks_[static_cast<size_t>(from)]);
}

}  // namespace expertd
