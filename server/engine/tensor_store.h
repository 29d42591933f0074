// Resident tensors of the current epoch: their names, their memory, and the streams that fill them.
//
// The bookkeeping may be used from any thread. Memory is allocated, touched and freed by the device
// thread alone: what the last user of a tensor lets go of, on whatever thread, lies here until
// Sweep.
#ifndef SERVER_ENGINE_TENSOR_STORE_H_
#define SERVER_ENGINE_TENSOR_STORE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "kernels/device.h"
#include "kernels/types.h"

namespace expertd::engine {

// Resident tensors at once, those of open streams included; beside their memory, which is a flag.
inline constexpr int64_t kMaxTensors = 65536;

// Never changes once made.
struct TensorInfo {
  std::string buffer_id;
  DType dtype = DType::kInvalid;
  std::vector<int64_t> shape;
  int64_t bytes = 0;  // product(shape) * element size
  uint64_t epoch = 0;
};

struct ResidentTensor {
  TensorInfo info;
  DeviceBuffer memory;  // [bytes], 256-byte aligned; device thread only
  // Differs after every write, and from that of every other tensor.
  std::atomic<uint64_t> version{0};

  // A step is about to write.
  void Touch();
};
// Shared by the store and by the operations that use the tensor, which end in no fixed order.
using TensorPtr = std::shared_ptr<ResidentTensor>;

// `id` for messages: shortened, without control characters.
std::string ShownId(std::string_view id);

class TensorStore {
 public:
  struct Options {
    int64_t limit_bytes = 0;
    int64_t max_streams = 0;
  };
  struct Usage {
    int64_t tensors = 0;  // that have a name
    int64_t bytes = 0;    // of all memory, that of streams and of nameless ones still in use too
  };
  enum class Fill : uint8_t { kChunks, kZeros };

  explicit TensorStore(const Options& options);

  // What follows may be called from any thread.

  // Sets memory aside for a tensor that a stream will fill; allocates nothing. Returns the stream's
  // number. Errors: MEMORY_BUDGET, QUEUE_FULL, EPOCH_STALE when info.epoch is not the current one.
  absl::StatusOr<uint64_t> Reserve(TensorInfo info, Fill fill);
  // Forgets a stream and its tensor; unknown ones are ignored.
  void Cancel(uint64_t stream);
  // Errors: BUFFER_UNKNOWN.
  absl::StatusOr<TensorPtr> Find(const std::string& buffer_id) const;
  absl::Status Erase(const std::string& buffer_id);
  // Why there is none of this id: "no tensor "x" in epoch 7: it belonged to epoch 5".
  std::string WhyUnknown(const std::string& buffer_id) const;
  std::vector<TensorInfo> List() const;
  Usage GetUsage() const;
  int64_t limit_bytes() const { return options_.limit_bytes; }

  // Device thread only.

  void Begin(uint64_t epoch);
  // Forgets every tensor and stream of the epoch.
  void End();
  // Errors: MEMORY_BUDGET when the device has none left; EPOCH_STALE when the epoch has ended.
  // REQUIRES: the chunk lies inside the tensor.
  absl::Status Write(uint64_t stream, int64_t offset, std::string_view chunk, Device& device);
  // Gives the tensor its name, and takes the name from an older one. Errors: as Write.
  absl::StatusOr<TensorInfo> Commit(uint64_t stream, Device& device);
  // Returns the memory of tensors that nobody uses any more.
  void Sweep();

 private:
  struct Stream {
    TensorPtr tensor;
    Fill fill = Fill::kChunks;
  };
  // Outlives the store while a tensor does.
  struct Memory {
    Mutex mutex;
    int64_t tensors ABSL_GUARDED_BY(mutex) = 0;
    int64_t bytes ABSL_GUARDED_BY(mutex) = 0;
    std::vector<DeviceBuffer> unused ABSL_GUARDED_BY(mutex);
  };

  absl::StatusOr<TensorPtr> MakeTensor(TensorInfo info);
  // The stream with its tensor's memory allocated.
  absl::StatusOr<Stream> Prepared(uint64_t stream, Device& device);
  std::string WhyUnknownLocked(const std::string& buffer_id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();

  mutable Mutex mutex_;  // before memory_->mutex
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_stream_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<std::string, TensorPtr> tensors_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Stream> streams_ ABSL_GUARDED_BY(mutex_);
  // Epochs of some ids that are gone with their epoch, for messages.
  std::map<std::string, uint64_t> past_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_TENSOR_STORE_H_
