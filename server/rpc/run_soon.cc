// A gRPC alarm whose time has come already: its callback runs on gRPC's executor.
#include "server/rpc/run_soon.h"

#include <utility>

#include "grpc/support/time.h"
#include "grpcpp/alarm.h"

namespace expertd::rpc {

void RunSoon(std::function<void()> job) {
  auto* alarm = new grpc::Alarm;  // deleted by its own callback, which gRPC allows
  alarm->Set(gpr_now(GPR_CLOCK_MONOTONIC), [alarm, job = std::move(job)](bool) {
    job();
    delete alarm;
  });
}

}  // namespace expertd::rpc
