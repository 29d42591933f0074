// The list of what is not served yet, with what is missing.
#include "server/rpc/unsupported.h"

#include "base/error.h"

namespace expertd::rpc {
namespace {

constexpr char kNoStore[] = "this daemon has no checkpoint store yet";
constexpr char kNoStream[] = "steps are unary calls only; a caller pipelines by sending early";
constexpr char kNoBuffers[] =
    "this daemon cannot keep or register buffers yet; send tensors inline";
constexpr char kNoDataParallel[] = "a group has one copy of every expert; dp_size must be 1";

}  // namespace

const std::vector<Support>& UnsupportedMethods() {
  static const auto* const methods = new std::vector<Support>{
      {"LayerService.LoadWeights", false, kNoStore},
      {"LayerService.SaveWeights", false, kNoStore},
      {"StepService.StreamSteps", false, kNoStream},
      {"TensorService.PutTensor", false, kNoBuffers},
      {"TensorService.GetTensor", false, kNoBuffers},
      {"TensorService.DeleteTensor", false, kNoBuffers},
      {"TensorService.ListTensors", false, kNoBuffers},
      {"TensorService.RegisterSharedMemory", false, kNoBuffers},
      {"TensorService.RegisterCudaMemory", false, kNoBuffers},
      {"TensorService.UnregisterMemory", false, kNoBuffers},
      {"dp_size > 1", false, kNoDataParallel},
  };
  return *methods;
}

absl::Status Unsupported(std::string_view method) {
  std::string_view reason;
  for (const Support& support : UnsupportedMethods()) {
    if (support.name == method) reason = support.reason;
  }
  return Error(Reason::kNotImplemented)
      .Text(method, " is not available: ", reason)
      .With("method", method);
}

}  // namespace expertd::rpc
