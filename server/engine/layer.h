// One layer on this rank: its parameters with gradients and optimizer state in device memory.
//
// Device thread only. Everything is allocated when the layer is created.
#ifndef SERVER_ENGINE_LAYER_H_
#define SERVER_ENGINE_LAYER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "kernels/expert_mlp.h"
#include "kernels/optim/optim_kernels.h"
#include "server/engine/config.h"
#include "server/engine/operations.h"

namespace expertd::engine {

// One named parameter tensor of this rank.
struct Parameter {
  std::string name;
  std::vector<int64_t> local_shape;
  std::vector<int64_t> offsets;   // of the shard in the global tensor
  int64_t count = 0;              // elements of the shard
  int64_t first_index = 0;        // global flat index of the shard's first element
  int64_t fan_in = 0;             // for initialisation; 0: starts at zero
  uint32_t key = 0;               // for initialisation; never changes for a name
  bool replicated = false;        // the same on every rank; its gradient is summed over ranks
  bool has_compute_copy = false;  // kept in weight_dtype too
  bool trained = true;

  DeviceBuffer master;    // f32
  DeviceBuffer compute;   // weight_dtype; empty: the master itself is read
  DeviceBuffer gradient;  // f32
  DeviceBuffer first;     // f32 momentum or first moment
  DeviceBuffer second;    // f32 second moment
};

class Layer {
 public:
  // Allocates parameters, zero everywhere. `rank` of `world` owns experts [rank*L, (rank+1)*L).
  // Errors: MEMORY_BUDGET, DTYPE_UNSUPPORTED.
  static absl::StatusOr<std::unique_ptr<Layer>> Create(std::string layer_id, LayerConfig config,
                                                       int64_t rank, int64_t world, Device& device,
                                                       std::unique_ptr<ExpertMlp> mlp);

  const std::string& id() const { return info_.layer_id; }
  const LayerConfig& config() const { return info_.config; }
  // What ListLayers shows; the engine changes counters in it.
  LayerInfo& info() { return info_; }
  const LayerInfo& info() const { return info_; }
  ExpertMlp& mlp() { return *mlp_; }

  MlpWeights Weights() const;
  MlpGradients Gradients() const;
  // Null when the layer has none.
  Parameter* Find(std::string_view name);
  std::vector<Parameter>& parameters() { return parameters_; }

  // Fresh weights from the seed; version 1.
  absl::Status Initialize(uint64_t seed, OptimKernels& optim);
  absl::Status ClearGradients();
  // Frees gradients and optimizer state for good.
  void Freeze();
  // Allocates and zeroes the state of another kind of optimizer; a failure changes nothing.
  absl::Status Configure(const OptimizerConfig& optimizer);

  // One update of all parameters with gradients multiplied by `scale`; refreshes compute copies,
  // zeroes gradients, adds one to the version. Cannot fail half-way on valid input.
  absl::Status Apply(double learning_rate, double scale, OptimKernels& optim);

 private:
  Layer(Device& device, std::unique_ptr<ExpertMlp> mlp) : device_(device), mlp_(std::move(mlp)) {}

  void AddParameter(Parameter parameter);
  void DescribeParameters(int64_t rank, int64_t world);
  // All or nothing: what was there stays when memory runs out.
  absl::Status AllocateOptimizerState(const OptimizerConfig& optimizer);
  absl::Status ZeroOptimizerState();
  absl::Status RefreshComputeCopies(OptimKernels& optim);
  absl::Status Update(Parameter& parameter, double learning_rate, double scale,
                      OptimKernels& optim);

  Device& device_;
  std::unique_ptr<ExpertMlp> mlp_;
  LayerInfo info_;
  std::vector<Parameter> parameters_;
  uint64_t content_version_ = 0;  // changes with every change of compute values
  int64_t optimizer_steps_ = 0;
};

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_LAYER_H_
