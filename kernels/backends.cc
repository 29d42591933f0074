// The factories of backends.h, and the only build conditionals of the product.
#include "kernels/backends.h"

#include <charconv>
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
#include "kernels/cpu/plain_mlp.h"
#include "kernels/mlp/sm90_plan.h"

#if EXPERTD_WITH_ONEDNN
#include "kernels/cpu/onednn_mlp.h"
#endif
#if EXPERTD_WITH_CUDA
#include "kernels/cuda/cuda_device.h"
#include "kernels/ep/lsa_ep.h"
#include "kernels/ep/nccl_ep.h"
#include "kernels/mlp/cublaslt_mlp.h"
#include "kernels/mlp/sm90_mlp.h"
#include "kernels/optim/optim_cuda.h"
#include "kernels/router/router_cuda.h"
#endif

namespace expertd {
namespace {

#if EXPERTD_WITH_CUDA
constexpr std::string_view kNoCuda = "this daemon runs on the cpu device";

CudaDevice& Cuda(Device& device) { return static_cast<CudaDevice&>(device); }

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int64_t ordinal) {
  return CudaDevice::Create(ordinal);
}
absl::StatusOr<std::unique_ptr<EpBackend>> MakeCudaEp(std::string_view name, Device& device,
                                                      const EpGroupConfig& config,
                                                      const EpBootstrap& bootstrap) {
  if (name == "nccl_lsa") return LsaEp::Create(config, bootstrap, Cuda(device));
  return NcclEp::Create(config, bootstrap, Cuda(device));
}
absl::StatusOr<std::unique_ptr<ExpertMlp>> MakeCudaMlp(std::string_view name, Device& device,
                                                       const MlpConfig& config) {
  if (name == "sm90") return Sm90Mlp::Create(config, Cuda(device));
  return CublasLtMlp::Create(config, Cuda(device));
}
std::unique_ptr<RouterKernels> MakeCudaRouter(Device& device) {
  return CreateCudaRouter(Cuda(device));
}
std::unique_ptr<OptimKernels> MakeCudaOptim(Device& device) {
  return CreateCudaOptim(Cuda(device));
}
#else
constexpr std::string_view kNoCuda = "this build has no CUDA: it was configured without a toolkit";

// Without CUDA there is no device that these could be called for, but for the first.
absl::Status NoCuda() { return Error(Reason::kBackendUnsupported).Text(kNoCuda); }
absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int64_t ordinal) {
  return Error(Reason::kBackendUnsupported)
      .Text("device cuda:", ordinal, ": ", kNoCuda, "; need \"cpu\"")
      .With("device", StrCat("cuda:", ordinal));
}
absl::StatusOr<std::unique_ptr<EpBackend>> MakeCudaEp(std::string_view, Device&,
                                                      const EpGroupConfig&, const EpBootstrap&) {
  return NoCuda();
}
absl::StatusOr<std::unique_ptr<ExpertMlp>> MakeCudaMlp(std::string_view, Device&,
                                                       const MlpConfig&) {
  return NoCuda();
}
std::unique_ptr<RouterKernels> MakeCudaRouter(Device&) { return nullptr; }
std::unique_ptr<OptimKernels> MakeCudaOptim(Device&) { return nullptr; }
#endif

// The fastest expert MLP that can serve a config.
std::string_view DefaultExpertMlp(const Device& device, const MlpConfig& config) {
  if (device.facts().kind == "cpu") return EXPERTD_WITH_ONEDNN ? "onednn" : "plain";
  const bool hopper = device.facts().compute_capability == "9.0";
  return hopper && sm90::Refusal(config).empty() ? "sm90" : "cublaslt";
}

bool IsCpu(const Device& device) { return device.facts().kind == "cpu"; }

Support Supported(std::string_view name) { return {std::string(name), true, ""}; }
Support Unsupported(std::string_view name, std::string reason) {
  return {std::string(name), false, std::move(reason)};
}

Support CpuOnly(std::string_view name, const Device& device) {
  return IsCpu(device) ? Supported(name) : Unsupported(name, "runs on the cpu device only");
}

#if EXPERTD_WITH_ONEDNN
Support OnednnSupport(const Device& device) {
  Support onednn = CpuOnly("onednn", device);
  if (onednn.supported) onednn.reason = OnednnNote();
  return onednn;
}
std::unique_ptr<ExpertMlp> MakeOnednnMlp(const MlpConfig& config) {
  return CreateOnednnMlp(config);
}
#else
Support OnednnSupport(const Device& device) {
  const Support onednn = CpuOnly("onednn", device);
  return onednn.supported ? Unsupported("onednn", "this build is without oneDNN") : onednn;
}
std::unique_ptr<ExpertMlp> MakeOnednnMlp(const MlpConfig&) { return nullptr; }  // never asked for
#endif

Support GpuOnly(std::string_view name, const Device& device, std::string_view need) {
  return IsCpu(device) ? Unsupported(name, StrCat("needs ", need, "; ", kNoCuda)) : Supported(name);
}

// Whether the other ranks' GPUs are of the same NVLink domain only forming a group can tell.
Support Lsa(const Device& device) {
  Support lsa = GpuOnly("nccl_lsa", device, "NVIDIA GPUs of one NVLink domain and NCCL 2.28");
  if (lsa.supported) {
    lsa.reason = "for groups within one NVLink domain, up to 72 ranks; others use nccl";
  }
  return lsa;
}

// For GPUs of the given compute capabilities only.
Support GpuModels(std::string_view name, const Device& device,
                  const std::vector<std::string_view>& capabilities) {
  std::string need = "a GPU of compute capability ";
  bool fits = false;
  for (size_t i = 0; i < capabilities.size(); ++i) {
    StrAppend(&need, i == 0 ? "" : " or ", capabilities[i]);
    fits = fits || capabilities[i] == device.facts().compute_capability;
  }
  if (IsCpu(device)) return GpuOnly(name, device, need);
  if (fits) return Supported(name);
  return Unsupported(name,
                     StrCat("needs ", need, "; this one has ", device.facts().compute_capability));
}

// A recipe for such GPUs, which has no code yet.
Support GpuRecipe(std::string_view name, const Device& device,
                  const std::vector<std::string_view>& capabilities) {
  Support support = GpuModels(name, device, capabilities);
  if (!support.supported) return support;
  return Unsupported(name, StrCat("not built yet: ", device.facts().name,
                                  " has the hardware, this build has no kernels for it"));
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
  constexpr std::string_view kCuda = "cuda:";
  if (spec.starts_with(kCuda)) {
    int64_t ordinal = -1;
    const std::string_view digits = spec.substr(kCuda.size());
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), ordinal);
    if (error == std::errc() && end == digits.data() + digits.size() && ordinal >= 0) {
      return MakeCudaDevice(ordinal);
    }
  }
  return Error(Reason::kBackendUnsupported)
      .Text("device: got \"", spec, "\", need \"cpu\" or \"cuda:N\"")
      .With("device", spec);
}

std::vector<Support> ListEpBackends(const Device& device) {
  return {CpuOnly("loopback", device), CpuOnly("gloo", device),
          GpuOnly("nccl", device, "an NVIDIA GPU and NCCL"), Lsa(device)};
}

std::vector<Support> ListRecipes(const Device& device) {
  return {Supported("bf16"),
          Supported("f16"),
          Supported("f32"),
          GpuRecipe("fp8_current", device, {"8.9", "9.0"}),
          GpuRecipe("fp8_block", device, {"9.0"}),
          GpuRecipe("mxfp8", device, {"10.0"}),
          GpuRecipe("nvfp4", device, {"10.0"})};
}

std::vector<Support> ListExpertMlps(const Device& device) {
  return {CpuOnly("plain", device), OnednnSupport(device),
          GpuOnly("cublaslt", device, "an NVIDIA GPU"), GpuModels("sm90", device, {"9.0"})};
}

std::string_view DefaultEpBackend(const Device& device) { return IsCpu(device) ? "gloo" : "nccl"; }

absl::StatusOr<std::unique_ptr<EpBackend>> CreateEpBackend(std::string_view name, Device& device,
                                                           const EpGroupConfig& config,
                                                           const EpBootstrap& bootstrap) {
  RETURN_IF_ERROR(Require(ListEpBackends(device), "EP backend", name));
  if (!IsCpu(device)) return MakeCudaEp(name, device, config, bootstrap);
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
  if (name.empty()) name = DefaultExpertMlp(device, config);
  RETURN_IF_ERROR(Require(ListExpertMlps(device), "expert MLP", name));
  for (DType dtype : {config.token_dtype, config.weight_dtype}) {
    if (IsFloat(dtype)) continue;
    return Error(Reason::kDtypeUnsupported)
        .Text("expert MLP ", name, ": got ", DTypeName(dtype),
              ", need DTYPE_F32, DTYPE_F16 or DTYPE_BF16");
  }
  if (!IsCpu(device)) return MakeCudaMlp(name, device, config);
  if (name == "plain") return CreatePlainMlp(config);
  return MakeOnednnMlp(config);
}

std::unique_ptr<RouterKernels> CreateRouterKernels(Device& device) {
  return IsCpu(device) ? CreateCpuRouter() : MakeCudaRouter(device);
}

std::unique_ptr<OptimKernels> CreateOptimKernels(Device& device) {
  return IsCpu(device) ? CreateCpuOptim() : MakeCudaOptim(device);
}

}  // namespace expertd
