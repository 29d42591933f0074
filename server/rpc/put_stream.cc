// While one chunk is copied to the device the next one is read; a third waits in the connection.
#include "server/rpc/put_stream.h"

#include <utility>

#include "base/status_macros.h"
#include "server/rpc/run_soon.h"
#include "server/rpc/status.h"

namespace expertd::rpc {
namespace {

constexpr int kChunksInFlight = 2;

}  // namespace

PutStream::PutStream(engine::Engine& engine, Gate& calls, grpc::CallbackServerContext* context,
                     v1::PutTensorResponse* response)
    : engine_(engine), calls_(calls), context_(context), response_(response) {
  calls_.Enter();
}

PutStream* PutStream::Start(engine::Engine& engine, Gate& calls,
                            grpc::CallbackServerContext* context, v1::PutTensorResponse* response) {
  auto* stream = new PutStream(engine, calls, context, response);
  stream->StartRead(&stream->message_);
  return stream;
}

absl::Status PutStream::Take() {
  ASSIGN_OR_RETURN(PutParser::Piece piece, parser_.Accept(message_));
  if (!reserved_) {
    ASSIGN_OR_RETURN(store_, engine_.BeginTensor(parser_.info(), parser_.fill()));
    reserved_ = true;
  }
  if (piece.bytes.empty()) return absl::OkStatus();
  {
    MutexLock lock(mutex_);
    ++writing_;
  }
  engine_.WriteTensor(
      store_, piece.offset, std::move(piece.bytes),
      [this](const absl::Status& status) { RunSoon([this, status] { OnWritten(status); }); });
  return absl::OkStatus();
}

absl::Status PutStream::End() const {
  if (context_->IsCancelled()) return absl::CancelledError("the caller went away");
  return parser_.End();
}

void PutStream::OnReadDone(bool ok) {
  {
    MutexLock lock(mutex_);
    if (ended_) return;  // a write failed; whatever has come is late
    taking_ = true;
  }
  // A caller that goes away ends the stream, too: what has come is then not the whole tensor.
  const absl::Status status = ok ? Take() : End();
  Next next;
  {
    MutexLock lock(mutex_);
    taking_ = false;
    reading_ = false;
    ended_ |= !ok || !status.ok();
    if (status_.ok()) status_ = status;
    next = DecideLocked();
  }
  Do(next);
}

void PutStream::OnWritten(const absl::Status& status) {
  Next next;
  {
    MutexLock lock(mutex_);
    --writing_;
    if (status_.ok()) status_ = status;
    ended_ |= !status.ok();
    next = DecideLocked();
  }
  Do(next);
}

PutStream::Next PutStream::DecideLocked() {
  if (finishing_) return Next::kNothing;
  if (!ended_) {
    if (reading_ || writing_ >= kChunksInFlight) return Next::kNothing;
    reading_ = true;
    return Next::kRead;
  }
  // A read that is still out ends when the call does, but the engine's answers need the stream.
  if (writing_ > 0 || taking_) return Next::kNothing;
  finishing_ = true;
  return status_.ok() ? Next::kCommit : Next::kFail;
}

void PutStream::Do(Next next) {
  switch (next) {
    case Next::kNothing:
      return;
    case Next::kRead:
      StartRead(&message_);
      return;
    case Next::kCommit:
      engine_.FinishTensor(store_, [this](const absl::StatusOr<engine::TensorInfo>& info) {
        RunSoon([this, info] { OnCommitted(info); });
      });
      return;
    case Next::kFail: {
      if (reserved_) engine_.CancelTensor(store_);
      absl::Status status;
      {
        MutexLock lock(mutex_);
        status = status_;
      }
      Finish(ToGrpc(status));
    }
  }
}

void PutStream::OnCommitted(const absl::StatusOr<engine::TensorInfo>& info) {
  if (info.ok()) {
    response_->set_size_bytes(info->bytes);
    response_->set_epoch(info->epoch);
  }
  Finish(ToGrpc(info.status()));
}

void PutStream::OnDone() {
  calls_.Leave();
  delete this;
}

}  // namespace expertd::rpc
