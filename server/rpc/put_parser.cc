// Sizes are compared before they are added, so that no number of a message can overflow them.
#include "server/rpc/put_parser.h"

#include <utility>
#include <vector>

#include "base/error.h"
#include "base/strings.h"
#include "server/rpc/convert_config.h"
#include "server/rpc/convert_step.h"
#include "server/rpc/convert_tensor.h"

namespace expertd::rpc {
namespace {

using engine::TensorStore;

const TensorRule& AnyTensor() {
  static const auto* const rule =
      new TensorRule{"tensor",
                     -1,
                     {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3FN, DType::kF8E5M2,
                      DType::kI32, DType::kI64}};
  return *rule;
}

}  // namespace

void PutParser::AcceptFirst(const v1::PutTensorRequest& message, Violations* violations) {
  CheckId(message.buffer_id(), "buffer_id", violations);
  if (message.has_tensor()) {
    info_.bytes = CheckSpec(message.tensor(), AnyTensor(), violations);
  } else {
    violations->Add(Reason::kConfigInvalid, "tensor", "got none, need dtype and shape");
  }
  info_.buffer_id = message.buffer_id();
  info_.epoch = message.epoch();
  fill_ = message.zeros() ? TensorStore::Fill::kZeros : TensorStore::Fill::kChunks;
  if (!violations->empty()) return;
  info_.dtype = FromProto(message.tensor().dtype());
  info_.shape.assign(message.tensor().shape().begin(), message.tensor().shape().end());
  begun_ = true;
}

void PutParser::CheckChunk(const v1::PutTensorRequest& message, Violations* violations) const {
  const size_t size = message.chunk().size();
  if (message.has_offset_bytes() && message.offset_bytes() != static_cast<uint64_t>(received_)) {
    violations->Add(Reason::kBufferRange, "offset_bytes",
                    StrCat("got ", message.offset_bytes(), " in message ", messages_, ", need ",
                           received_, ": chunks come in order, without gaps or overlaps"));
  }
  if (size > kMaxPutChunkBytes) {
    violations->Add(
        Reason::kPayloadSizeMismatch, "chunk",
        StrCat("got ", size, " bytes in one message, need at most ", kMaxPutChunkBytes));
  } else if (fill_ == TensorStore::Fill::kZeros && size > 0) {
    violations->Add(Reason::kPayloadSizeMismatch, "chunk",
                    StrCat("got ", size, " bytes, need none: the tensor is zeros"));
  } else if (static_cast<int64_t>(size) > info_.bytes - received_) {
    violations->Add(
        Reason::kPayloadSizeMismatch, "chunk",
        StrCat("got ", size, " bytes after ", received_, ", need ", info_.bytes, " in all"));
  }
}

absl::StatusOr<PutParser::Piece> PutParser::Accept(v1::PutTensorRequest& message) {
  Violations violations;
  ++messages_;
  if (messages_ == 1) {
    AcceptFirst(message, &violations);
  } else if (!message.buffer_id().empty() || message.has_tensor() || message.epoch() != 0 ||
             message.zeros()) {
    violations.Add(Reason::kConfigInvalid, "tensor",
                   StrCat("got buffer_id, tensor, epoch or zeros in message ", messages_,
                          ", need them in the first only"));
  }
  if (violations.empty()) CheckChunk(message, &violations);
  if (!violations.empty()) return violations.ToStatus("PutTensor");
  Piece piece{received_, std::move(*message.mutable_chunk())};
  received_ += static_cast<int64_t>(piece.bytes.size());
  return piece;
}

absl::Status PutParser::End() const {
  Violations violations;
  if (messages_ == 0) {
    violations.Add(Reason::kConfigInvalid, "tensor", "got no message, need dtype and shape");
  } else if (fill_ == TensorStore::Fill::kChunks && received_ != info_.bytes) {
    violations.Add(Reason::kPayloadSizeMismatch, "chunk",
                   StrCat("got ", received_, " bytes in all, need ", info_.bytes));
  }
  return violations.ToStatus("PutTensor");
}

}  // namespace expertd::rpc
