// The stream of PutTensor: takes chunks and hands them to the device thread, at most two ahead of
// it.
#ifndef SERVER_RPC_PUT_STREAM_H_
#define SERVER_RPC_PUT_STREAM_H_

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "expertd/v1/tensor_service.pb.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"
#include "server/engine/engine.h"
#include "server/rpc/gate.h"
#include "server/rpc/put_parser.h"

namespace expertd::rpc {

// Deletes itself, and is inside `calls` until it has ended: which is not before the engine has
// answered everything that the stream asked of it.
class PutStream final : public grpc::ServerReadReactor<v1::PutTensorRequest> {
 public:
  static PutStream* Start(engine::Engine& engine, Gate& calls, grpc::CallbackServerContext* context,
                          v1::PutTensorResponse* response);

  void OnReadDone(bool ok) override;
  void OnDone() override;

 private:
  // What is to be done once the mutex is free.
  enum class Next : uint8_t { kNothing, kRead, kCommit, kFail };

  PutStream(engine::Engine& engine, Gate& calls, grpc::CallbackServerContext* context,
            v1::PutTensorResponse* response);
  // The message that has come. Errors end the stream.
  absl::Status Take();
  // No message has come, and none will.
  absl::Status End() const;
  void OnWritten(const absl::Status& status);
  Next DecideLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(Next next);
  void OnCommitted(const absl::StatusOr<engine::TensorInfo>& info);

  engine::Engine& engine_;
  Gate& calls_;
  grpc::CallbackServerContext* const context_;
  v1::PutTensorResponse* const response_;
  v1::PutTensorRequest message_;
  PutParser parser_;
  bool reserved_ = false;
  uint64_t store_ = 0;

  Mutex mutex_;
  int writing_ ABSL_GUARDED_BY(mutex_) = 0;         // chunks that the engine has not answered
  bool reading_ ABSL_GUARDED_BY(mutex_) = true;     // a read has been asked for
  bool taking_ ABSL_GUARDED_BY(mutex_) = false;     // its message is being looked at
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;      // nothing more will come
  bool finishing_ ABSL_GUARDED_BY(mutex_) = false;  // decided how it ends
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_PUT_STREAM_H_
