// The stream of GetParameter: one shard as chunks.
#ifndef SERVER_RPC_PARAMETER_STREAM_H_
#define SERVER_RPC_PARAMETER_STREAM_H_

#include <cstddef>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "expertd/v1/layer_service.pb.h"
#include "grpcpp/support/server_callback.h"
#include "server/engine/engine.h"
#include "server/rpc/gate.h"

namespace expertd::rpc {

// Bytes of payload in one message of the stream.
inline constexpr size_t kParameterChunkBytes = size_t{1} << 20;

class ParameterStream final : public grpc::ServerWriteReactor<v1::GetParameterResponse> {
 public:
  // Asks the engine for the shard and returns the stream, which deletes itself and is inside
  // `calls` until it has ended.
  static ParameterStream* Start(engine::Engine& engine, Gate& calls,
                                const v1::GetParameterRequest& request);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  // Until the shard has come the stream may end by cancellation, and the engine's answer then finds
  // nobody. Shared by the stream and the engine's callback.
  struct Waiting {
    Mutex mutex;
    ParameterStream* stream ABSL_GUARDED_BY(mutex) = nullptr;
  };
  static ParameterStream* Take(Waiting& waiting);

  explicit ParameterStream(Gate& calls);
  void Begin(absl::StatusOr<engine::ParameterShard> shard);
  // Writes the next chunk, or finishes when all have been written.
  void Continue();

  Gate& calls_;
  std::shared_ptr<Waiting> waiting_ = std::make_shared<Waiting>();
  engine::ParameterShard shard_;
  size_t sent_ = 0;
  bool first_ = true;
  v1::GetParameterResponse response_;
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_PARAMETER_STREAM_H_
