// One collective call: decodes the request into an operation, submits it, answers with its results.
#ifndef SERVER_RPC_COLLECTIVE_CALL_H_
#define SERVER_RPC_COLLECTIVE_CALL_H_

#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "expertd/v1/types.pb.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"
#include "server/engine/engine.h"
#include "server/engine/operations.h"
#include "server/rpc/convert_layer.h"
#include "server/rpc/convert_step.h"
#include "server/rpc/gate.h"
#include "server/rpc/unary_call.h"

namespace expertd::rpc {

// The reactor of a call whose operation is in the engine. It ends only after the engine has
// answered, because the operation reads from the request message; a caller that goes away cancels
// the operation.
class CollectiveCall final : public grpc::ServerUnaryReactor {
 public:
  // Writes the response from an operation of the kind that was submitted.
  using Encoder = std::function<void(const engine::Operation&)>;

  CollectiveCall(engine::Engine& engine, Gate& calls, const engine::Operation& op, Encoder encode)
      : engine_(engine),
        calls_(calls),
        header_(op.header),
        kind_(op.kind),
        encode_(std::move(encode)) {
    calls_.Enter();
  }

  void Submit(std::shared_ptr<engine::Operation> op);
  void OnCancel() override { engine_.CancelOperation(header_); }
  void OnDone() override {
    calls_.Leave();
    delete this;
  }

 private:
  void Answer(const engine::Operation& answer);

  engine::Engine& engine_;
  Gate& calls_;
  const engine::StepHeader header_;
  const engine::OpKind kind_;
  const Encoder encode_;
};

// Starts a collective method. A request without a usable header is answered at once; any other
// problem goes to the engine as a rejected operation, because it consumes the sequence. The call is
// inside `calls` until its answer has been sent.
template <typename Op, typename Request, typename Response>
grpc::ServerUnaryReactor* RunCollective(grpc::CallbackServerContext* context,
                                        engine::Engine& engine, Gate& calls, const Request& request,
                                        Response* response, std::shared_ptr<Op> op) {
  absl::StatusOr<engine::StepHeader> header =
      FromProto(request.has_header() ? &request.header() : nullptr);
  if (!header.ok()) return AnswerNow(context, header.status());
  op->header = *std::move(header);
  op->rejected = Decode(request, op.get());
  op->deadline = DeadlineOf(*context);
  op->request_bytes = static_cast<int64_t>(request.ByteSizeLong());
  auto* call = new CollectiveCall(engine, calls, *op, [response](const engine::Operation& answer) {
    Encode(static_cast<const Op&>(answer), response);
  });
  call->Submit(std::move(op));
  return call;
}

}  // namespace expertd::rpc

#endif  // SERVER_RPC_COLLECTIVE_CALL_H_
