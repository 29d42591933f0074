// Keeps the gRPC health service in step with the engine.
//
// Names: "" and "expertd.v1.ControlService" are SERVING while the daemon takes work and NOT_SERVING
// while it drains; they never depend on a group. "expertd.group" is SERVING while the group is
// READY.
#ifndef SERVER_RPC_HEALTH_H_
#define SERVER_RPC_HEALTH_H_

#include <memory>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "grpcpp/health_check_service_interface.h"
#include "server/engine/engine.h"

namespace expertd::rpc {

inline constexpr char kGroupHealthName[] = "expertd.group";

// Shared by its owner and by the engine's watch, which ends some time after Stop.
class HealthMonitor : public std::enable_shared_from_this<HealthMonitor> {
 public:
  // `engine` and `health` must live until Stop has returned.
  HealthMonitor(engine::Engine& engine, grpc::HealthCheckServiceInterface& health)
      : engine_(engine), health_(health) {}

  // Sets all names, then follows the group.
  void Start();
  // Sets all names to what the engine says now.
  void Refresh();
  // Sets all names to NOT_SERVING for good and stops following.
  void Stop();

 private:
  void Watch();
  void RefreshLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  engine::Engine& engine_;
  grpc::HealthCheckServiceInterface& health_;
  Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  CondVar left_engine_;
  bool in_engine_ ABSL_GUARDED_BY(mutex_) = false;  // Watch is calling the engine
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_HEALTH_H_
