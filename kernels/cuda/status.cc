// Translation of library codes; see status.h.
#include "kernels/cuda/status.h"

#include "base/error.h"

namespace expertd {
namespace {

absl::Status Fault(std::string_view what, std::string_view name, std::string_view text) {
  return Error(Reason::kDeviceFault)
      .Text(what, ": ", name, ": ", text, "; the device context is lost")
      .With("cuda_error", name);
}

}  // namespace

bool IsStickyCudaError(cudaError_t code) {
  switch (code) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

absl::Status CudaStatus(cudaError_t code, std::string_view what) {
  if (code == cudaSuccess) return absl::OkStatus();
  const std::string_view name = cudaGetErrorName(code);
  const std::string_view text = cudaGetErrorString(code);
  if (IsStickyCudaError(code)) return Fault(what, name, text);
  cudaGetLastError();  // not sticky: later calls must not see it again
  if (code == cudaErrorMemoryAllocation) {
    return Error(Reason::kMemoryBudget).Text(what, ": device memory is used up");
  }
  return Error(Reason::kInternal).Text(what, ": ", name, ": ", text).With("cuda_error", name);
}

absl::Status NcclStatus(ncclResult_t code, std::string_view what, ncclComm_t comm) {
  if (code == ncclSuccess || code == ncclInProgress) return absl::OkStatus();
  if (code == ncclUnhandledCudaError) {
    const cudaError_t cuda = cudaPeekAtLastError();
    if (IsStickyCudaError(cuda)) return CudaStatus(cuda, what);
  }
  const char* last = ncclGetLastError(comm);
  const bool peer = code == ncclRemoteError || code == ncclSystemError;
  return Error(peer ? Reason::kPeerLost : Reason::kInternal)
      .Text(what, ": NCCL: ", ncclGetErrorString(code),
            last != nullptr && *last != '\0' ? ": " : "", last != nullptr ? last : "")
      .With("nccl_error", static_cast<int>(code));
}

absl::Status CublasStatus(cublasStatus_t code, std::string_view what) {
  if (code == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const cudaError_t cuda = cudaPeekAtLastError();
  if (IsStickyCudaError(cuda)) return CudaStatus(cuda, what);
  return Error(Reason::kInternal)
      .Text(what, ": cuBLAS: ", cublasLtGetStatusName(code), ": ", cublasLtGetStatusString(code))
      .With("cublas_error", static_cast<int>(code));
}

}  // namespace expertd
