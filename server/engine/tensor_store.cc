// Names and memory of resident tensors; the deleter of a tensor leaves its memory for Sweep.
#include "server/engine/tensor_store.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"

namespace expertd::engine {
namespace {

constexpr size_t kShownIdBytes = 64;
constexpr size_t kPastIds = 4096;

uint64_t NextVersion() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1);
}

absl::Status EpochEnded() {
  return Error(Reason::kEpochStale).Text("the tensor's epoch ended while it was being stored");
}

}  // namespace

void ResidentTensor::Touch() { version = NextVersion(); }

std::string ShownId(std::string_view id) {
  const bool whole = id.size() <= kShownIdBytes;
  return StrCat("\"", absl::CEscape(AbslView(id.substr(0, kShownIdBytes))), whole ? "" : "...",
                "\"");
}

TensorStore::TensorStore(const Options& options) : options_(options) {}

absl::StatusOr<TensorPtr> TensorStore::MakeTensor(TensorInfo info) {
  {
    MutexLock lock(memory_->mutex);
    const bool many = memory_->tensors >= kMaxTensors;
    if (many || info.bytes > options_.limit_bytes - memory_->bytes) {
      return Error(Reason::kMemoryBudget)
          .Text("tensor ", ShownId(info.buffer_id), " of ", info.bytes, " bytes beside ",
                memory_->tensors, " tensors of ", memory_->bytes, " bytes, need at most ",
                many ? StrCat(kMaxTensors, " tensors")
                     : StrCat(options_.limit_bytes, " bytes (flag --tensor_memory_bytes)"))
          .With("bytes", info.bytes)
          .With("used", memory_->bytes)
          .With("limit", options_.limit_bytes)
          .With("flag", "tensor_memory_bytes");
    }
    ++memory_->tensors;
    memory_->bytes += info.bytes;
  }
  auto* tensor = new ResidentTensor;
  tensor->info = std::move(info);
  return TensorPtr(tensor, [memory = memory_](ResidentTensor* gone) {
    {
      MutexLock lock(memory->mutex);
      --memory->tensors;
      memory->bytes -= gone->info.bytes;
      if (gone->memory.data() != nullptr) memory->unused.push_back(std::move(gone->memory));
    }
    delete gone;
  });
}

absl::StatusOr<uint64_t> TensorStore::Reserve(TensorInfo info, Fill fill) {
  MutexLock lock(mutex_);
  if (info.epoch != epoch_) return EpochEnded();
  if (static_cast<int64_t>(streams_.size()) >= options_.max_streams) {
    return Error(Reason::kQueueFull)
        .Text("too many tensors are being stored at once: ", streams_.size(), ", limit ",
              options_.max_streams, " (flag --queue_capacity)")
        .With("limit", options_.max_streams)
        .With("flag", "queue_capacity");
  }
  ASSIGN_OR_RETURN(TensorPtr tensor, MakeTensor(std::move(info)));
  const uint64_t stream = next_stream_++;
  streams_[stream] = {std::move(tensor), fill};
  return stream;
}

void TensorStore::Cancel(uint64_t stream) {
  MutexLock lock(mutex_);
  streams_.erase(stream);
}

std::string TensorStore::WhyUnknownLocked(const std::string& buffer_id) const {
  const auto past = past_.find(buffer_id);
  return StrCat("no resident tensor ", ShownId(buffer_id), " in epoch ", epoch_,
                past == past_.end() ? ": deleted, or never stored"
                                    : StrCat(": it belonged to epoch ", past->second));
}

std::string TensorStore::WhyUnknown(const std::string& buffer_id) const {
  MutexLock lock(mutex_);
  return WhyUnknownLocked(buffer_id);
}

absl::StatusOr<TensorPtr> TensorStore::Find(const std::string& buffer_id) const {
  MutexLock lock(mutex_);
  const auto found = tensors_.find(buffer_id);
  if (found != tensors_.end()) return found->second;
  return Error(Reason::kBufferUnknown)
      .Text(WhyUnknownLocked(buffer_id))
      .With("buffer_id", ShownId(buffer_id))
      .With("epoch", epoch_);
}

absl::Status TensorStore::Erase(const std::string& buffer_id) {
  MutexLock lock(mutex_);
  if (tensors_.erase(buffer_id) != 0) return absl::OkStatus();
  return Error(Reason::kBufferUnknown)
      .Text(WhyUnknownLocked(buffer_id))
      .With("buffer_id", ShownId(buffer_id))
      .With("epoch", epoch_);
}

std::vector<TensorInfo> TensorStore::List() const {
  MutexLock lock(mutex_);
  std::vector<TensorInfo> list;
  for (const auto& [id, tensor] : tensors_) list.push_back(tensor->info);
  return list;
}

TensorStore::Usage TensorStore::GetUsage() const {
  Usage usage;
  {
    MutexLock lock(mutex_);
    usage.tensors = static_cast<int64_t>(tensors_.size());
  }
  MutexLock lock(memory_->mutex);
  usage.bytes = memory_->bytes;
  return usage;
}

void TensorStore::Begin(uint64_t epoch) {
  End();
  MutexLock lock(mutex_);
  epoch_ = epoch;
}

void TensorStore::End() {
  {
    MutexLock lock(mutex_);
    for (const auto& [id, tensor] : tensors_) past_[id] = tensor->info.epoch;
    while (past_.size() > kPastIds) past_.erase(past_.begin());
    tensors_.clear();
    streams_.clear();
    epoch_ = 0;
  }
  Sweep();
}

absl::StatusOr<TensorStore::Stream> TensorStore::Prepared(uint64_t stream, Device& device) {
  Stream found;
  {
    MutexLock lock(mutex_);
    const auto place = streams_.find(stream);
    if (place == streams_.end()) return EpochEnded();
    found = place->second;
  }
  if (found.tensor->memory.data() != nullptr) return found;
  Sweep();
  ASSIGN_OR_RETURN(found.tensor->memory, device.Allocate(found.tensor->info.bytes));
  return found;
}

absl::Status TensorStore::Write(uint64_t stream, int64_t offset, std::string_view chunk,
                                Device& device) {
  ASSIGN_OR_RETURN(const Stream found, Prepared(stream, device));
  const auto size = static_cast<int64_t>(chunk.size());
  if (offset < 0 || offset > found.tensor->info.bytes - size) {
    return Error(Reason::kInternal).Text("a chunk outside of its tensor");
  }
  return device.CopyToDevice(found.tensor->memory.as<char>() + offset, chunk.data(), size);
}

absl::StatusOr<TensorInfo> TensorStore::Commit(uint64_t stream, Device& device) {
  ASSIGN_OR_RETURN(const Stream found, Prepared(stream, device));
  const TensorInfo& info = found.tensor->info;
  if (found.fill == Fill::kZeros) {
    RETURN_IF_ERROR(device.Zero(found.tensor->memory.data(), info.bytes));
  }
  // A failed copy must not become a tensor.
  RETURN_IF_ERROR(device.Drain());
  found.tensor->Touch();
  MutexLock lock(mutex_);
  if (streams_.erase(stream) == 0) return EpochEnded();  // cancelled meanwhile
  past_.erase(info.buffer_id);
  tensors_[info.buffer_id] = found.tensor;
  return info;
}

void TensorStore::Sweep() {
  std::vector<DeviceBuffer> unused;
  MutexLock lock(memory_->mutex);
  unused.swap(memory_->unused);
}

}  // namespace expertd::engine
