// Hands the engine's answer over to a gRPC thread, where it is copied and serialized.
#include "server/rpc/collective_call.h"

#include <memory>
#include <utility>

#include "base/error.h"
#include "server/rpc/run_soon.h"
#include "server/rpc/status.h"

namespace expertd::rpc {

void CollectiveCall::Submit(std::shared_ptr<engine::Operation> op) {
  engine_.Submit(std::move(op), [this](std::shared_ptr<const engine::Operation> answer) {
    RunSoon([this, answer = std::move(answer)] { Answer(*answer); });
  });
}

void CollectiveCall::Answer(const engine::Operation& answer) {
  if (!answer.status.ok()) {
    Finish(ToGrpc(answer.status));
  } else if (answer.kind != kind_) {
    Finish(ToGrpc(Error(Reason::kSequenceConflict)
                      .Text("sequence ", header_.sequence, " is a ", engine::OpName(answer.kind),
                            " with this request id, got ", engine::OpName(kind_))
                      .With("sequence", header_.sequence)
                      .With("operation", engine::OpName(answer.kind))));
  } else {
    encode_(answer);
    Finish(grpc::Status::OK);
  }
}

}  // namespace expertd::rpc
