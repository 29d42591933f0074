// At most one chunk is being written and one is read or ready, however slow the caller is.
#include "server/rpc/tensor_stream.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "server/rpc/convert_config.h"
#include "server/rpc/convert_tensor.h"
#include "server/rpc/run_soon.h"
#include "server/rpc/status.h"

namespace expertd::rpc {

absl::StatusOr<TensorPart> PartOf(const v1::GetTensorRequest& request,
                                  const engine::TensorInfo& info) {
  const uint64_t offset = request.buffer().offset_bytes();
  const auto bytes = static_cast<uint64_t>(info.bytes);
  const uint64_t element = DTypeSize(info.dtype);
  Violations violations;
  if (offset > bytes) {
    violations.Add(Reason::kBufferRange, "buffer.offset_bytes",
                   StrCat("got ", offset, ", need at most ", bytes, ", the size of tensor ",
                          engine::ShownId(info.buffer_id)));
  } else if (request.size_bytes() > bytes - offset) {
    violations.Add(
        Reason::kBufferRange, "size_bytes",
        StrCat("got ", request.size_bytes(), " from ", offset, ", need at most ", bytes - offset,
               ": tensor ", engine::ShownId(info.buffer_id), " has ", bytes, " bytes"));
  }
  if (offset % element != 0) {
    violations.Add(Reason::kBufferRange, "buffer.offset_bytes",
                   StrCat("got ", offset, ", need a multiple of ", element));
  }
  if (request.size_bytes() % element != 0) {
    violations.Add(Reason::kBufferRange, "size_bytes",
                   StrCat("got ", request.size_bytes(), ", need a multiple of ", element));
  }
  if (!violations.empty()) return violations.ToStatus("GetTensor");
  const uint64_t end = request.size_bytes() == 0 ? bytes : offset + request.size_bytes();
  return TensorPart{static_cast<int64_t>(offset), static_cast<int64_t>(end)};
}

TensorStream::TensorStream(engine::Engine& engine, Gate& calls) : engine_(engine), calls_(calls) {
  calls_.Enter();
}

TensorStream* TensorStream::Start(engine::Engine& engine, Gate& calls,
                                  const v1::GetTensorRequest& request) {
  auto* stream = new TensorStream(engine, calls);
  const absl::Status status = stream->Open(request);
  Next next;
  {
    MutexLock lock(stream->mutex_);
    stream->status_ = status;
    stream->asked_ = stream->part_.begin;
    stream->sent_ = stream->part_.begin;
    next = stream->DecideLocked();
  }
  stream->Do(next);
  return stream;
}

absl::Status TensorStream::Open(const v1::GetTensorRequest& request) {
  Violations violations;
  const engine::BufferPlace place = FromProto(request.buffer(), "buffer", &violations);
  if (!violations.empty()) return violations.ToStatus("GetTensor");
  ASSIGN_OR_RETURN(tensor_, engine_.FindTensor(place.buffer_id));
  ASSIGN_OR_RETURN(part_, PartOf(request, tensor_.info));
  return absl::OkStatus();
}

void TensorStream::OnRead(absl::StatusOr<std::string> piece) {
  Next next;
  {
    MutexLock lock(mutex_);
    reading_ = false;
    if (piece.ok()) {
      ready_ = *std::move(piece);
    } else if (status_.ok()) {
      status_ = piece.status();
    }
    next = DecideLocked();
  }
  Do(next);
}

void TensorStream::OnWriteDone(bool ok) {
  Next next;
  {
    MutexLock lock(mutex_);
    writing_ = false;
    if (!ok && status_.ok()) status_ = absl::CancelledError("the caller went away");
    next = DecideLocked();
  }
  Do(next);
}

TensorStream::Next TensorStream::DecideLocked() {
  Next next;
  if (finished_) return next;
  if (status_.ok() && ready_ && !writing_) {
    response_.Clear();
    if (first_) {
      response_.mutable_tensor()->set_dtype(ToProto(tensor_.info.dtype));
      response_.mutable_tensor()->mutable_shape()->Assign(tensor_.info.shape.begin(),
                                                          tensor_.info.shape.end());
      first_ = false;
    }
    response_.set_offset_bytes(static_cast<uint64_t>(sent_));
    sent_ += static_cast<int64_t>(ready_->size());
    response_.set_chunk(*std::move(ready_));
    ready_.reset();
    writing_ = true;
    next.write = true;
  }
  const bool more = first_ || asked_ < part_.end;
  if (status_.ok() && more && !reading_ && !ready_) {
    const int64_t size =
        std::min<int64_t>(static_cast<int64_t>(kTensorChunkBytes), part_.end - asked_);
    next.read = engine::TensorRead{tensor_.info.buffer_id, asked_, size, tensor_.version};
    asked_ += size;
    reading_ = true;
  }
  const bool idle = !reading_ && !writing_;
  if (idle && (!status_.ok() || !ready_)) {
    finished_ = true;
    next.finish = true;
  }
  return next;
}

void TensorStream::Do(const Next& next) {
  if (next.finish) {
    absl::Status status;
    {
      MutexLock lock(mutex_);
      status = status_;
    }
    Finish(ToGrpc(status));
    return;
  }
  // The write first: once the read is answered, another thread may end the stream.
  if (next.write) StartWrite(&response_);
  if (!next.read) return;
  engine_.ReadTensor(*next.read, [this](absl::StatusOr<std::string> piece) {
    RunSoon([this, piece = std::move(piece)]() mutable { OnRead(std::move(piece)); });
  });
}

void TensorStream::OnDone() {
  calls_.Leave();
  delete this;
}

}  // namespace expertd::rpc
