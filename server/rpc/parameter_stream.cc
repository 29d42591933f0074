// One write at a time, so that a slow reader holds one chunk beside the shard.
#include "server/rpc/parameter_stream.h"

#include <algorithm>
#include <utility>

#include "server/rpc/convert_config.h"
#include "server/rpc/convert_layer.h"
#include "server/rpc/convert_sharding.h"
#include "server/rpc/run_soon.h"
#include "server/rpc/status.h"

namespace expertd::rpc {

ParameterStream::ParameterStream(Gate& calls) : calls_(calls) {
  calls_.Enter();
  MutexLock lock(waiting_->mutex);
  waiting_->stream = this;
}

ParameterStream* ParameterStream::Start(engine::Engine& engine, Gate& calls,
                                        const v1::GetParameterRequest& request) {
  auto* stream = new ParameterStream(calls);
  const absl::StatusOr<engine::ParameterKind> kind = FromProto(request.kind());
  if (!kind.ok()) {
    Take(*stream->waiting_)->Finish(ToGrpc(kind.status()));
    return stream;
  }
  engine.GetParameter(request.layer_id(), request.parameter(), *kind,
                      [waiting = stream->waiting_](absl::StatusOr<engine::ParameterShard> shard) {
                        RunSoon([waiting, shard = std::move(shard)]() mutable {
                          ParameterStream* taken = Take(*waiting);
                          if (taken != nullptr) taken->Begin(std::move(shard));
                        });
                      });
  return stream;
}

ParameterStream* ParameterStream::Take(Waiting& waiting) {
  MutexLock lock(waiting.mutex);
  return std::exchange(waiting.stream, nullptr);
}

void ParameterStream::Begin(absl::StatusOr<engine::ParameterShard> shard) {
  if (!shard.ok()) {
    Finish(ToGrpc(shard.status()));
    return;
  }
  shard_ = *std::move(shard);
  Continue();
}

void ParameterStream::Continue() {
  if (!first_ && sent_ == shard_.tensor.data.size()) {
    Finish(grpc::Status::OK);
    return;
  }
  response_.Clear();
  if (first_) {
    response_.mutable_tensor()->set_dtype(ToProto(shard_.tensor.dtype));
    response_.mutable_tensor()->mutable_shape()->Assign(shard_.tensor.shape.begin(),
                                                        shard_.tensor.shape.end());
    FillSlice(shard_.offsets, shard_.tensor.shape, response_.mutable_slice());
    first_ = false;
  }
  response_.set_weights_version(shard_.weights_version);
  const size_t size = std::min(kParameterChunkBytes, shard_.tensor.data.size() - sent_);
  response_.set_chunk(shard_.tensor.data.data() + sent_, size);
  sent_ += size;
  StartWrite(&response_);
}

void ParameterStream::OnWriteDone(bool ok) {
  if (ok) {
    Continue();
  } else {
    Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the caller went away"));
  }
}

void ParameterStream::OnDone() {
  calls_.Leave();
  delete this;
}

void ParameterStream::OnCancel() {
  const std::shared_ptr<Waiting> waiting = waiting_;
  ParameterStream* taken = Take(*waiting);
  if (taken != nullptr) {
    taken->Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the caller went away"));
  }
}

}  // namespace expertd::rpc
