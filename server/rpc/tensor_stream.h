// The stream of GetTensor: reads chunk by chunk, one of them ahead of the caller.
#ifndef SERVER_RPC_TENSOR_STREAM_H_
#define SERVER_RPC_TENSOR_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "expertd/v1/tensor_service.pb.h"
#include "grpcpp/support/server_callback.h"
#include "server/engine/engine.h"
#include "server/rpc/gate.h"

namespace expertd::rpc {

// Bytes of payload in one message of the stream.
inline constexpr size_t kTensorChunkBytes = size_t{2} << 20;

// The part of a tensor that a request asks for.
struct TensorPart {
  int64_t begin = 0;
  int64_t end = 0;
};
// Errors: BUFFER_RANGE for a part that is not inside the tensor or not of whole elements.
absl::StatusOr<TensorPart> PartOf(const v1::GetTensorRequest& request,
                                  const engine::TensorInfo& info);

// Deletes itself, and is inside `calls` until it has ended: which is not before the engine has
// answered what the stream asked of it. Holds no tensor: one that goes ends the stream.
class TensorStream final : public grpc::ServerWriteReactor<v1::GetTensorResponse> {
 public:
  static TensorStream* Start(engine::Engine& engine, Gate& calls,
                             const v1::GetTensorRequest& request);

  void OnWriteDone(bool ok) override;
  void OnDone() override;

 private:
  // What is to be done once the mutex is free.
  struct Next {
    std::optional<engine::TensorRead> read;
    bool write = false;
    bool finish = false;
  };

  TensorStream(engine::Engine& engine, Gate& calls);
  absl::Status Open(const v1::GetTensorRequest& request);
  void OnRead(absl::StatusOr<std::string> piece);
  Next DecideLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(const Next& next);

  engine::Engine& engine_;
  Gate& calls_;
  engine::TensorState tensor_;
  TensorPart part_;

  Mutex mutex_;
  v1::GetTensorResponse response_;                            // of the write that is out
  std::optional<std::string> ready_ ABSL_GUARDED_BY(mutex_);  // read, not yet written
  int64_t asked_ ABSL_GUARDED_BY(mutex_) = 0;                 // where the next read begins
  int64_t sent_ ABSL_GUARDED_BY(mutex_) = 0;                  // where the next write begins
  bool first_ ABSL_GUARDED_BY(mutex_) = true;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_TENSOR_STREAM_H_
