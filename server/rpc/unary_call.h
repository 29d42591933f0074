// Unary calls whose answer comes later, and those that are answered at once.
#ifndef SERVER_RPC_UNARY_CALL_H_
#define SERVER_RPC_UNARY_CALL_H_

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"

namespace expertd::rpc {

// The caller's deadline on the steady clock; SteadyTime::max() when it has none.
SteadyTime DeadlineOf(const grpc::CallbackServerContext& context);

// Ends the call at once; the response has been filled.
grpc::ServerUnaryReactor* AnswerNow(grpc::CallbackServerContext* context,
                                    const absl::Status& status);

// A call that ends by its answer or by its caller going away, whichever is first. An answer that
// comes after the call has ended does nothing, so what the call started may run on without it.
class LateCall final : public grpc::ServerUnaryReactor {
 public:
  // Kept by whoever will answer; may outlive the call.
  class Answerer {
   public:
    // Runs `fill`, which writes the response, and ends the call, unless it has ended.
    void Answer(const absl::Status& status, absl::FunctionRef<void()> fill) const;
    void Answer(const absl::Status& status) const {
      Answer(status, [] {});
    }

   private:
    friend class LateCall;
    struct State {
      Mutex mutex;
      LateCall* call ABSL_GUARDED_BY(mutex) = nullptr;  // null once it has ended
    };
    // Shared by the call and by the engine's callbacks, which end in no fixed order.
    std::shared_ptr<State> state_ = std::make_shared<State>();
  };

  LateCall();
  const Answerer& answerer() const { return answerer_; }

  void OnCancel() override;
  void OnDone() override { delete this; }

 private:
  Answerer answerer_;
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_UNARY_CALL_H_
