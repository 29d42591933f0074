// The factories of backends.h, and the only build conditionals of the product.
#include "kernels/backends.h"

#include <utility>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/cpu_ep.h"
#include "kernels/cpu/cpu_optim.h"
#include "kernels/cpu/cpu_router.h"
#include "kernels/cpu/float_convert.h"
#include "kernels/cpu/gloo_transport.h"
#include "kernels/cpu/loopback_transport.h"
#include "kernels/cpu/onednn_mlp.h"
#include "kernels/cpu/plain_mlp.h"

namespace expertd {
namespace {

#if EXPERTD_WITH_CUDA
constexpr std::string_view kNoCuda = "this build has CUDA but no GPU device yet";
#else
constexpr std::string_view kNoCuda = "this build has no CUDA: it was configured without a toolkit";
#endif

bool IsCpu(const Device& device) { return device.facts().kind == "cpu"; }

Support Supported(std::string_view name) { return {std::string(name), true, ""}; }
Support Unsupported(std::string_view name, std::string reason) {
  return {std::string(name), false, std::move(reason)};
}

Support CpuOnly(std::string_view name, const Device& device) {
  return IsCpu(device) ? Supported(name) : Unsupported(name, "runs on the cpu device only");
}

Support GpuOnly(std::string_view name, std::string_view need) {
  return Unsupported(name, StrCat("needs ", need, "; ", kNoCuda));
}

// The entry of `name`, or an error that says why it cannot be had.
absl::Status Require(const std::vector<Support>& list, std::string_view kind,
                     std::string_view name) {
  std::string known;
  for (const Support& support : list) {
    if (support.name == name) {
      if (support.supported) return absl::OkStatus();
      return Error(Reason::kBackendUnsupported)
          .Text(kind, " ", name, ": ", support.reason)
          .With("backend", name);
    }
    StrAppend(&known, known.empty() ? "" : ", ", support.name);
  }
  return Error(Reason::kBackendUnsupported)
      .Text(kind, ": got ", name, ", need one of ", known)
      .With("backend", name);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateDevice(std::string_view spec) {
  if (spec == "cpu") return std::make_unique<CpuDevice>();
  if (spec.starts_with("cuda:")) {
    return Error(Reason::kBackendUnsupported)
        .Text("device ", spec, ": ", kNoCuda, "; need \"cpu\"")
        .With("device", spec);
  }
  return Error(Reason::kBackendUnsupported)
      .Text("device: got \"", spec, "\", need \"cpu\" or \"cuda:N\"")
      .With("device", spec);
}

std::vector<Support> ListEpBackends(const Device& device) {
  return {CpuOnly("loopback", device), CpuOnly("gloo", device),
          GpuOnly("nccl", "an NVIDIA GPU and NCCL"),
          GpuOnly("nccl_lsa", "NVIDIA GPUs of one NVLink domain and NCCL 2.28")};
}

std::vector<Support> ListRecipes(const Device& device) {
  static_cast<void>(device);
  return {Supported("bf16"),
          GpuOnly("fp8_current", "a GPU of compute capability 8.9 or 9.0"),
          GpuOnly("fp8_block", "a GPU of compute capability 9.0"),
          GpuOnly("mxfp8", "a GPU of compute capability 10.0"),
          GpuOnly("nvfp4", "a GPU of compute capability 10.0")};
}

std::vector<Support> ListExpertMlps(const Device& device) {
  Support onednn = CpuOnly("onednn", device);
  if (onednn.supported) onednn.reason = OnednnNote();
  return {CpuOnly("plain", device), std::move(onednn), GpuOnly("cublaslt", "an NVIDIA GPU"),
          GpuOnly("sm90", "a GPU of compute capability 9.0")};
}

std::string_view DefaultEpBackend(const Device& device) { return IsCpu(device) ? "gloo" : "nccl"; }

absl::StatusOr<std::unique_ptr<EpBackend>> CreateEpBackend(std::string_view name, Device& device,
                                                           const EpGroupConfig& config,
                                                           const EpBootstrap& bootstrap) {
  RETURN_IF_ERROR(Require(ListEpBackends(device), "EP backend", name));
  std::unique_ptr<CpuTransport> transport;
  if (name == "loopback") {
    ASSIGN_OR_RETURN(transport, LoopbackTransport::Create(config, bootstrap));
  } else {
    ASSIGN_OR_RETURN(transport, GlooTransport::Create(config, bootstrap));
  }
  return CpuEp::Create(config, std::move(transport));
}

absl::StatusOr<std::unique_ptr<ExpertMlp>> CreateExpertMlp(std::string_view name, Device& device,
                                                           const MlpConfig& config) {
  if (name.empty()) name = "onednn";
  RETURN_IF_ERROR(Require(ListExpertMlps(device), "expert MLP", name));
  for (DType dtype : {config.token_dtype, config.weight_dtype}) {
    if (IsFloat(dtype)) continue;
    return Error(Reason::kDtypeUnsupported)
        .Text("expert MLP ", name, ": got ", DTypeName(dtype),
              ", need DTYPE_F32, DTYPE_F16 or DTYPE_BF16");
  }
  if (name == "plain") return CreatePlainMlp(config);
  return CreateOnednnMlp(config);
}

std::unique_ptr<RouterKernels> CreateRouterKernels(Device& device) {
  static_cast<void>(device);
  return CreateCpuRouter();
}

std::unique_ptr<OptimKernels> CreateOptimKernels(Device& device) {
  static_cast<void>(device);
  return CreateCpuOptim();
}

}  // namespace expertd
