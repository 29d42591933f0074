// The messages of one PutTensor stream as a pure state machine: what each of them asks for.
#ifndef SERVER_RPC_PUT_PARSER_H_
#define SERVER_RPC_PUT_PARSER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/error.h"
#include "expertd/v1/tensor_service.pb.h"
#include "server/engine/tensor_store.h"

namespace expertd::rpc {

// Largest chunk of a PutTensor message, in bytes.
inline constexpr size_t kMaxPutChunkBytes = size_t{4} << 20;

class PutParser {
 public:
  struct Piece {
    int64_t offset = 0;
    std::string bytes;  // may be empty
  };

  // Takes the next message, whose chunk it moves out. After an error the stream is over.
  // Errors: CONFIG_INVALID, DTYPE_UNSUPPORTED, SHAPE_MISMATCH, PAYLOAD_SIZE_MISMATCH, BUFFER_RANGE;
  // all of one message at once.
  absl::StatusOr<Piece> Accept(v1::PutTensorRequest& message);
  // The stream has ended. Errors: CONFIG_INVALID without any message, PAYLOAD_SIZE_MISMATCH.
  absl::Status End() const;

  // Of the first message, once Accept has taken it.
  bool begun() const { return begun_; }
  const engine::TensorInfo& info() const { return info_; }
  engine::TensorStore::Fill fill() const { return fill_; }

 private:
  void AcceptFirst(const v1::PutTensorRequest& message, Violations* violations);
  void CheckChunk(const v1::PutTensorRequest& message, Violations* violations) const;

  bool begun_ = false;
  engine::TensorInfo info_;
  engine::TensorStore::Fill fill_ = engine::TensorStore::Fill::kChunks;
  int64_t received_ = 0;
  int64_t messages_ = 0;
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_PUT_PARSER_H_
