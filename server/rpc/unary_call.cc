// The one place that decides whether an answer or a cancellation ends a call.
#include "server/rpc/unary_call.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "server/rpc/status.h"

namespace expertd::rpc {

SteadyTime DeadlineOf(const grpc::CallbackServerContext& context) {
  // Waiting longer than this is the same as waiting forever; beyond it the clocks might overflow.
  constexpr std::chrono::hours kForever{24 * 365};
  constexpr std::chrono::milliseconds kAnswerMargin{100};
  const auto left = context.deadline() - std::chrono::system_clock::now();
  if (left >= kForever) return SteadyTime::max();
  // A little early, so that an answer which names what is missing comes before the caller's own
  // timer, which names nothing.
  const auto margin = std::min<decltype(left)>(left / 10, kAnswerMargin);
  return std::chrono::steady_clock::now() + left - margin;
}

grpc::ServerUnaryReactor* AnswerNow(grpc::CallbackServerContext* context,
                                    const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

LateCall::LateCall() {
  MutexLock lock(answerer_.state_->mutex);
  answerer_.state_->call = this;
}

void LateCall::Answerer::Answer(const absl::Status& status, absl::FunctionRef<void()> fill) const {
  LateCall* call = nullptr;
  {
    MutexLock lock(state_->mutex);
    call = std::exchange(state_->call, nullptr);
  }
  if (call == nullptr) return;
  // The call lives until Finish: only this thread can end it now.
  if (status.ok()) fill();
  call->Finish(ToGrpc(status));
}

void LateCall::OnCancel() {
  const Answerer answerer = answerer_;  // *this may be gone before Answer returns
  answerer.Answer(absl::CancelledError("the caller went away"));
}

}  // namespace expertd::rpc
