// Names to factories: devices, EP backends, expert MLPs and the kernels beside them.
//
// backends.cc is the only file of the product with build conditionals. Asking for what this build
// or machine cannot give is an error with the reason, never a silent substitute.
#ifndef KERNELS_BACKENDS_H_
#define KERNELS_BACKENDS_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "kernels/ep_backend.h"
#include "kernels/expert_mlp.h"
#include "kernels/optim/optim_kernels.h"
#include "kernels/router/router_kernels.h"

namespace expertd {

// One named choice and whether this daemon can serve it.
struct Support {
  std::string name;
  bool supported = false;
  std::string reason;  // why not; when supported, a remark or empty
};

// `spec` is "cpu" or "cuda:N". Errors: BACKEND_UNSUPPORTED naming what is missing.
absl::StatusOr<std::unique_ptr<Device>> CreateDevice(std::string_view spec);

// "loopback", "gloo", "nccl", "nccl_lsa"; the recipes "bf16", "fp8_current", "fp8_block", "mxfp8",
// "nvfp4"; the MLPs "plain", "onednn", "cublaslt", "sm90".
std::vector<Support> ListEpBackends(const Device& device);
std::vector<Support> ListRecipes(const Device& device);
std::vector<Support> ListExpertMlps(const Device& device);

// The EP backend a group gets when its config names none.
std::string_view DefaultEpBackend(const Device& device);

// Collective over the ranks of the epoch: returns once the communicator is formed.
// Errors: BACKEND_UNSUPPORTED; STEP_TIMEOUT, PEER_LOST, CANCELLED while forming.
absl::StatusOr<std::unique_ptr<EpBackend>> CreateEpBackend(std::string_view name, Device& device,
                                                           const EpGroupConfig& config,
                                                           const EpBootstrap& bootstrap);

// An empty name chooses the fastest that supports the config.
// Errors: BACKEND_UNSUPPORTED, DTYPE_UNSUPPORTED.
absl::StatusOr<std::unique_ptr<ExpertMlp>> CreateExpertMlp(std::string_view name, Device& device,
                                                           const MlpConfig& config);

// Threads that one CPU kernel call may use; default all cores of the process. Any thread; takes
// effect at the next kernel call. Values below 1 count as 1.
void SetCpuThreads(int threads);

std::unique_ptr<RouterKernels> CreateRouterKernels(Device& device);
std::unique_ptr<OptimKernels> CreateOptimKernels(Device& device);

}  // namespace expertd

#endif  // KERNELS_BACKENDS_H_
