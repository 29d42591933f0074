// Codes of CUDA, NCCL and cuBLAS as absl::Status: the only place where they become errors.
//
// Usage: RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(...), "copying tokens"));
// A sticky CUDA error (the context is lost) becomes DEVICE_FAULT: the process must end. Running out
// of device memory becomes MEMORY_BUDGET. Everything else becomes INTERNAL with the library's own
// words.
#ifndef KERNELS_CUDA_STATUS_H_
#define KERNELS_CUDA_STATUS_H_

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <string_view>

#include "absl/status/status.h"

namespace expertd {

// True for errors after which no call on this device can succeed in this process.
bool IsStickyCudaError(cudaError_t code);

absl::Status CudaStatus(cudaError_t code, std::string_view what);
// ncclInProgress counts as OK here. `comm` may be null; it gives more words.
// ncclRemoteError and ncclSystemError become PEER_LOST.
absl::Status NcclStatus(ncclResult_t code, std::string_view what, ncclComm_t comm);
absl::Status CublasStatus(cublasStatus_t code, std::string_view what);

}  // namespace expertd

#endif  // KERNELS_CUDA_STATUS_H_
