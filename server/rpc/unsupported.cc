// The list of what is not served yet, with what is missing.
#include "server/rpc/unsupported.h"

#include "base/error.h"

namespace expertd::rpc {
namespace {

constexpr char kNoStore[] = "this daemon has no checkpoint store yet";
constexpr char kNoStream[] = "steps are unary calls only; a caller pipelines by sending early";
constexpr char kNoRegistration[] =
    "this daemon cannot map memory of its callers yet; store tensors with PutTensor or send them "
    "inline";
constexpr char kNoDataParallel[] = "a group has one copy of every expert; dp_size must be 1";

}  // namespace

const std::vector<Support>& UnsupportedMethods() {
  static const auto* const methods = new std::vector<Support>{
      {"LayerService.LoadWeights", false, kNoStore},
      {"LayerService.SaveWeights", false, kNoStore},
      {"StepService.StreamSteps", false, kNoStream},
      {"TensorService.RegisterSharedMemory", false, kNoRegistration},
      {"TensorService.RegisterCudaMemory", false, kNoRegistration},
      {"TensorService.UnregisterMemory", false, kNoRegistration},
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
