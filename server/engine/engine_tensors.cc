// Resident tensors of the engine: names at once, memory on the device thread.
#include <utility>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "server/engine/engine_impl.h"

namespace expertd::engine {

absl::StatusOr<uint64_t> EngineImpl::BeginTensor(TensorInfo info, TensorStore::Fill fill) {
  {
    MutexLock lock(mutex_);
    if (info.epoch == 0) info.epoch = machine_.epoch();
    RETURN_IF_ERROR(machine_.CheckStep(machine_.group_id(), info.epoch));
  }
  return tensors_.Reserve(std::move(info), fill);
}

void EngineImpl::WriteTensor(uint64_t store, int64_t offset, std::string piece,
                             std::function<void(absl::Status)> done) {
  device_thread_->Post([this, store, offset, piece = std::move(piece), done = std::move(done)] {
    done(tensors_.Write(store, offset, piece, *state_.device));
  });
}

void EngineImpl::FinishTensor(uint64_t store,
                              std::function<void(absl::StatusOr<TensorInfo>)> done) {
  device_thread_->Post([this, store, done = std::move(done)] {
    absl::StatusOr<TensorInfo> info = tensors_.Commit(store, *state_.device);
    if (!info.ok()) tensors_.Cancel(store);
    tensors_.Sweep();  // of the one that had the name before
    done(std::move(info));
  });
}

void EngineImpl::CancelTensor(uint64_t store) {
  tensors_.Cancel(store);
  device_thread_->Post([this] { tensors_.Sweep(); });
}

absl::StatusOr<TensorState> EngineImpl::FindTensor(const std::string& buffer_id) const {
  ASSIGN_OR_RETURN(const TensorPtr tensor, tensors_.Find(buffer_id));
  return TensorState{tensor->info, tensor->version};
}

void EngineImpl::ReadTensor(TensorRead read,
                            std::function<void(absl::StatusOr<std::string>)> done) {
  device_thread_->Post(
      [this, read = std::move(read), done = std::move(done)] { done(ReadTensorNow(read)); });
}

absl::StatusOr<std::string> EngineImpl::ReadTensorNow(const TensorRead& read) {
  ASSIGN_OR_RETURN(const TensorPtr tensor, tensors_.Find(read.buffer_id));
  const uint64_t version = tensor->version;
  if (version != read.version) {
    return Error(Reason::kVersionBehind)
        .Text("tensor ", ShownId(read.buffer_id), " was written to while it was read: got version ",
              version, ", need ", read.version, "; read it again")
        .With("buffer_id", ShownId(read.buffer_id));
  }
  const int64_t bytes = tensor->info.bytes;
  if (read.offset < 0 || read.size < 0 || read.offset > bytes - read.size) {
    return Error(Reason::kBufferRange)
        .Text("got bytes from ", read.offset, " on, ", read.size, " of them, need a part of the ",
              bytes, " bytes of tensor ", ShownId(read.buffer_id));
  }
  std::string piece(static_cast<size_t>(read.size), '\0');
  RETURN_IF_ERROR(
      state_.device->CopyToHost(piece.data(), tensor->memory.as<char>() + read.offset, read.size));
  return piece;
}

absl::Status EngineImpl::DeleteTensor(const std::string& buffer_id) {
  RETURN_IF_ERROR(tensors_.Erase(buffer_id));
  device_thread_->Post([this] { tensors_.Sweep(); });
  return absl::OkStatus();
}

std::vector<TensorInfo> EngineImpl::ListTensors() const { return tensors_.List(); }

}  // namespace expertd::engine
