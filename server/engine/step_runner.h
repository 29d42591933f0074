// Runs one collective operation on the device thread: validate, arrive, execute, record the result.
//
// The order of every step lives here and nowhere else: arrival -> stage in -> prepare -> dispatch
// -> experts -> combine -> stage out. Implemented in step_runner.cc (the common course),
// step_staging.cc, step_forward.cc, step_backward.cc, step_primitives.cc, step_parameters.cc and
// step_rehearsal.cc.
#ifndef SERVER_ENGINE_STEP_RUNNER_H_
#define SERVER_ENGINE_STEP_RUNNER_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backends.h"
#include "server/engine/arrival.h"
#include "server/engine/group_session.h"
#include "server/engine/layer.h"
#include "server/engine/operations.h"
#include "server/engine/stage_clock.h"

namespace expertd::engine {

// What the device thread owns besides the group.
struct DeviceState {
  std::unique_ptr<Device> device;
  std::unique_ptr<RouterKernels> router;
  std::unique_ptr<OptimKernels> optim;
  std::string expert_mlp;  // implementation to use; "": the fastest
  std::map<std::string, std::unique_ptr<Layer>> layers;
};

class StepRunner {
 public:
  StepRunner(DeviceState& state, GroupSession& session) : state_(state), session_(session) {}

  // Fills op.status, results and stats. Returns OK when the group can go on, and otherwise why its
  // communicator is lost.
  absl::Status Run(Operation& op);

 private:
  // One operation's way through its phases.
  struct Step {
    OpContext context;
    ArrivalRecord record;                 // this rank's
    std::vector<ArrivalRecord> arrivals;  // all ranks', after arrival
    Layer* layer = nullptr;
    HandleState* handle = nullptr;
    TicketState* ticket = nullptr;
    std::unique_ptr<Layer> created;  // CreateLayer: made before arrival, kept after it
    StageClock stages;               // of what comes after arrival
  };

  // Before arrival: find what the operation names and validate it against that.
  absl::Status Check(Operation& op, Step& step);
  absl::Status CheckForward(ForwardOp& op, Step& step);
  absl::Status CheckBackward(BackwardOp& op, Step& step);
  absl::Status CheckPrimitive(Operation& op, Step& step);
  absl::Status CheckParameters(Operation& op, Step& step);
  absl::Status CheckCreateLayer(CreateLayerOp& op, Step& step);
  // Refreshes memory_bytes after the layer's buffers have changed.
  absl::Status PlanMemory(Layer& layer);
  absl::Status FindLayer(const std::string& layer_id, Step& step);
  absl::Status FindHandle(uint64_t handle, Step& step);
  struct Rows;
  static Rows RowsOf(const Step& step);

  // OK when all ranks go on.
  absl::Status Arrive(Operation& op, Step& step);

  // After arrival. Run says what a failure leaves of results in resident tensors.
  absl::Status Execute(Operation& op, Step& step);
  absl::Status Perform(Operation& op, Step& step);
  absl::Status Forward(ForwardOp& op, Step& step);
  absl::Status Backward(BackwardOp& op, Step& step);
  absl::Status Prepare(PrepareOp& op, Step& step);
  absl::Status Dispatch(DispatchOp& op, Step& step);
  absl::Status Combine(CombineOp& op, Step& step);
  absl::Status DispatchBackward(DispatchBackwardOp& op, Step& step);
  absl::Status CombineBackward(CombineBackwardOp& op, Step& step);
  absl::Status CreateLayer(CreateLayerOp& op, Step& step);
  // Loads on a GPU what the layer's steps will use; see step_rehearsal.cc.
  absl::Status RehearseExchange(Step& step, const LayerConfig& config);
  absl::Status RehearseExperts(Layer& layer);  // REQUIRES: weights and gradients are zero
  absl::Status RehearseRouter(Layer& layer);
  absl::Status DeleteLayer(LayerOp& op, Step& step);
  absl::Status ApplyGradients(ApplyGradientsOp& op, Step& step);

  // Pieces of Forward and Backward.
  struct Routed;
  absl::Status Route(ForwardOp& op, Step& step, const void* tokens, Routed& routed);
  absl::Status AuxLoss(ForwardOp& op, Step& step, Routed& routed);
  absl::Status KeepTicket(ForwardOp& op, Step& step, Routed& routed, TicketState ticket);
  absl::Status RouterBackward(BackwardOp& op, Step& step, const float* grad_weights,
                              Matrix grad_tokens);
  // Pieces of ApplyGradients.
  struct GradientVote;
  absl::StatusOr<GradientVote> InspectGradients(Step& step, std::vector<DeviceBuffer>& reduced);
  absl::Status AgreeOnNorm(ApplyGradientsOp& op, Step& step, const GradientVote& vote);

  // Copies between requests, results, resident tensors and device memory (step_staging.cc).
  //
  // Where the device can read the input as it lies, that; otherwise a copy in `hold`. Null when it
  // is absent.
  absl::StatusOr<const void*> StageIn(const TensorInput& input, DeviceBuffer& hold);
  // A copy of a present input in `device_data`.
  absl::Status CopyIn(const TensorInput& input, void* device_data);
  // Makes input.data point at the values, for checks on the host.
  absl::Status FetchValues(TensorInput& input);
  // Memory to compute a result in: the request's own place where that will do, otherwise `hold`.
  absl::StatusOr<void*> Place(const TensorOutput& output, int64_t rows, int64_t cols, DType dtype,
                              DeviceBuffer& hold);
  // Moves a result to where it is to go, which may be where it is.
  absl::Status StageOut(const void* device_data, DType dtype, std::vector<int64_t> shape,
                        TensorOutput& output);
  // What is queued from now on belongs to this duration of the step's statistics.
  absl::Status Enter(Step& step, Stage stage) { return step.stages.Enter(*state_.device, stage); }
  absl::StatusOr<DeviceBuffer> Allocate(int64_t rows, int64_t cols, DType dtype);
  absl::StatusOr<DeviceBuffer> Zeros(int64_t rows, int64_t cols, DType dtype);
  // What the device's kernels need of the addresses they read and write.
  bool Aligned(const void* address, DType dtype) const;

  DeviceState& state_;
  GroupSession& session_;
};

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_STEP_RUNNER_H_
